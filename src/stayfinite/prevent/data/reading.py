"""The batches of a loader one by one, past the ones that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
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
        if self.twin is not None and self.twin.may_repeat:
            self._most = self.length

    @property
    def length(self) -> int | None:
        """How many batches there will be; None if the loader cannot tell."""
        try:
            length = len(self.loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return self._most
        if self.twin is not None:
            self.twin.forget_length()
        return length if self._most is None else min(length, self._most)

    def __iter__(self) -> Iterator[Read]:
        with iterating(self.loader) as iterator:
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
        if is_lost(self.loader, error) or (self._has_indices and indices is None):
            self.was_stopped = said
            return None
        return Read(number=number, indices=indices, error=said)


@contextmanager
def iterating(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """An iterator of the loader; that of a twin ends its workers here.

    One that an error kept alive would be inherited by the next workers, and its end fail there.
    """
    if not isinstance(loader, DataLoader):
        yield iter(loader)
        return
    # An __iter__ of a subclass may go on with an iterator that it shares with the user's loader.
    iterator = DataLoader.__iter__(loader)
    try:
        yield iterator
    finally:
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def is_lost(loader: Any, error: Exception) -> bool:
    """Whether the loader itself failed, not an item: a worker died, or took too long."""
    if not getattr(loader, "num_workers", 0):
        return False
    codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
    return ExceptionWrapper.reraise.__code__ not in codes


def is_death_of_worker(error: Exception) -> bool:
    """Whether torch says that a worker died; it does so from a signal handler, anywhere."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


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
