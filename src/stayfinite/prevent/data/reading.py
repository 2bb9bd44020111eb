"""The batches of a loader one by one, past the ones that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from stayfinite.prevent.data.twin import Twin

_MOST_FAILURES_IN_A_ROW = 100


@dataclass(frozen=True, eq=False, kw_only=True)
class Read:
    """One batch, or the error in its place; `indices` are None where they are not known."""

    number: int
    batch: Any = None
    indices: list[Any] | None = None
    error: str | None = None


class Reader:
    """Reads each batch of a loader once; `was_stopped` says why it could not go on, if so."""

    def __init__(self, loader: Any, most: int | None = None) -> None:
        self.twin = Twin(loader) if isinstance(loader, DataLoader) else None
        self.loader: Iterable[Any] = loader if self.twin is None else self.twin.loader
        self._most = most
        self.was_stopped: str | None = None

    @property
    def length(self) -> int | None:
        """How many batches there will be; None if the loader cannot tell."""
        try:
            length = len(self.loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return self._most
        if self.twin is not None:
            vars(self.loader)["_IterableDataset_len_called"] = None
        return length if self._most is None else min(length, self._most)

    def __iter__(self) -> Iterator[Read]:
        iterator = iter(self.loader)
        number = failures = 0
        while (self._most is None or number < self._most) and self.was_stopped is None:
            read = self._next(iterator, number)
            if read is None:
                return
            yield read
            number += 1
            failures = failures + 1 if read.error else 0
            if failures == _MOST_FAILURES_IN_A_ROW and not self._has_indices:
                self.was_stopped = f"{failures} errors in a row, the last one {read.error}"

    @property
    def _has_indices(self) -> bool:
        return self.twin is not None and self.twin.has_indices

    def _next(self, iterator: Iterator[Any], number: int) -> Read | None:
        try:
            batch = next(iterator)
        except StopIteration as error:
            # An item that raises it ends the loop of training too, in silence.
            return self._failed(error, number) if self.twin and self.twin.is_waiting else None
        except Exception as error:
            return self._failed(error, number)
        return Read(number=number, batch=batch, indices=self._indices(batch))

    def _indices(self, batch: Any = None) -> list[Any] | None:
        return None if self.twin is None else self.twin.next_indices(batch)

    def _failed(self, error: Exception, number: int) -> Read | None:
        said = told(error)
        indices = self._indices()
        is_lost = self._is_lost(error) or (self._has_indices and indices is None)
        if is_lost:
            self.was_stopped = said
            return None
        return Read(number=number, indices=indices, error=said)

    def _is_lost(self, error: Exception) -> bool:
        """Whether the loader failed, not an item: a worker died, or took too long."""
        workers = getattr(self.loader, "num_workers", 0)
        return bool(workers) and not _came_from_a_worker(error.__traceback__)


def _came_from_a_worker(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_code is ExceptionWrapper.reraise.__code__:
            return True
        traceback = traceback.tb_next
    return False


def told(error: Exception) -> str:
    """The error in one line, such as "ValueError: no such file"."""
    name = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught ") and len(lines) > 1:  # the traceback of a worker
        last = (line for line in reversed(lines) if _names(line, name))
        return next(last, lines[-1]).strip()
    return f"{name}: {lines[0]}" if lines[0] else name


def _names(line: str, error: str) -> bool:
    return line.partition(":")[0].rpartition(".")[2] == error
