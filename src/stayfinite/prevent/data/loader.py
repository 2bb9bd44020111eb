"""The batches of a loader, read without a trace, with their indices.

Those that cannot be read are passed over, and single samples can be read again.
"""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from stayfinite.errors import InputError
from stayfinite.prevent.data.batch import size_of
from stayfinite.snapshot.copies import Cell, FunctionsCell, ProtocolCell
from stayfinite.snapshot.rng import PART, generator_cell, global_cells

_MOST_FAILURES_IN_A_ROW = 100
_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.RandomState,
    np.random.Generator,
    np.random.BitGenerator,
)
_OPAQUE = (str, bytes, int, float, complex, type, types.ModuleType, Tensor, np.ndarray)
_LONGEST = 256
_MOST_OBJECTS = 20_000


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchRead:
    """One batch, or the error in its place; `indices` are None where they are not known."""

    number: int
    batch: Any = None
    indices: list[Any] | None = None
    error: str | None = None


class Reader:
    """Reads each batch of a loader once; `was_stopped` says why it could not go on, if so.

    A DataLoader itself is never iterated but a copy of it, so that its workers, its iterator and
    its sampler stay as they are.
    """

    def __init__(self, loader: Any, most: int | None = None) -> None:
        self._original, self._most = loader, most
        self._loader: Iterable[Any] = loader
        self._recorded: RecordedIndices | None = None
        self._takes_one = False
        self.was_stopped: str | None = None
        if isinstance(loader, DataLoader):
            if not isinstance(loader.dataset, IterableDataset):
                self._recorded = RecordedIndices(_spare_sampler(loader))
            self._loader = _copy_of(loader, self._recorded)
            if type(loader).__iter__ is not DataLoader.__iter__:
                self._most = self.length  # one of its own may repeat, without an end

    @property
    def length(self) -> int | None:
        """How many batches there will be; None if the loader cannot tell."""
        try:
            length = len(self._loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return self._most
        if isinstance(self._loader, DataLoader):
            # Having been asked, torch would warn about iterable datasets that are longer.
            vars(self._loader)["_IterableDataset_len_called"] = None
        return length if self._most is None else min(length, self._most)

    @property
    def has_indices(self) -> bool:
        return self._recorded is not None

    @property
    def is_row_known(self) -> bool:
        """Whether the n-th row of a batch is sure to be its n-th index.

        A collate function of the user's may sort, drop, pack or mix.
        """
        is_batched = self._original.batch_sampler is not None
        return self._takes_one or (is_batched and self._original.collate_fn is default_collate)

    def __iter__(self) -> Iterator[BatchRead]:
        with _iterator_of(self._loader) as iterator:
            number = failures = 0
            while (self._most is None or number < self._most) and self.was_stopped is None:
                read = self._next(iterator, number)
                if read is None:
                    return
                yield read
                number += 1
                failures = failures + 1 if read.error else 0
                if failures == _MOST_FAILURES_IN_A_ROW and not self.has_indices:
                    self.was_stopped = f"{failures} errors in a row, the last one {read.error}"

    def _next(self, iterator: Iterator[Any], number: int) -> BatchRead | None:
        try:
            batch = next(iterator)
        except Exception as error:
            # An item that raises StopIteration ends the loop of training too, in silence.
            is_waiting = self._recorded is not None and bool(self._recorded.waiting)
            if isinstance(error, StopIteration) and not is_waiting:
                return None
            indices, line = self._next_indices(), error_line(error)
            self.was_stopped = _failure_of(self._loader, error)
            if self.has_indices and indices is None and self.was_stopped is None:
                self.was_stopped = line
            if self.was_stopped is not None:
                return None
            return BatchRead(number=number, indices=indices, error=line)
        return BatchRead(number=number, batch=batch, indices=self._next_indices(batch))

    def _next_indices(self, batch: Any = None) -> list[Any] | None:
        """The indices of the next batch, in the order of the sampler; None if they are not known.

        Without automatic batching one index may stand for all rows of the batch.
        """
        if self._recorded is None or not self._recorded.waiting:
            return None
        item = self._recorded.waiting.popleft()
        item = item.tolist() if hasattr(item, "tolist") else item
        if self._original.batch_sampler is None and not isinstance(item, list | tuple):
            self._takes_one = True
            return [item] * (size_of(batch) or 1)
        if set(map(type, item)) == {int}:
            return list(item)
        return [each.item() if hasattr(each, "item") else each for each in item]

    def read_each(
        self, wanted: Sequence[Sequence[Any]], collate: Callable[[Any], Any] | None = None
    ) -> Iterator[tuple[Any, str | None]]:
        """For each list of indices its batch, or the error in its place; with the same workers."""
        if not wanted:
            return
        items = [each[0] for each in wanted] if self._takes_one else list(wanted)
        loader, lost = _copy_of(self._original, items), None
        if collate is not None:
            vars(loader)["collate_fn"] = collate
        with _iterator_of(loader) as iterator:
            for _ in wanted:
                try:
                    yield (None, lost) if lost else (next(iterator), None)
                except Exception as error:
                    lost = _failure_of(loader, error)
                    yield None, lost or error_line(error)

    def errors_of(self, indices: Sequence[Any]) -> Iterator[str | None]:
        """For each index the error that reading it alone gives; None if it can be read."""
        return (error for _, error in self.read_each([[index] for index in indices], _discard))


def _discard(samples: Any) -> int:
    """A collate function for who only wants to know whether samples can be read."""
    return 0


class RecordedIndices:
    """A sampler that remembers what it has given out and no batch was got for."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self.waiting: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        for item in self._sampler:
            self.waiting.append(item)
            yield item

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


def _copy_of(loader: DataLoader[Any], sampler: Any | None) -> DataLoader[Any]:
    """The loader with another sampler and workers of its own."""
    other = copy.copy(loader)
    own = vars(other)  # a loader refuses to have its sampler set
    own.update(_iterator=None, persistent_workers=False, pin_memory=False, in_order=True)
    own.update(_IterableDataset_len_called=None)
    if sampler is not None:
        own["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    return other


def _spare_sampler(loader: DataLoader[Any]) -> Any:
    """A copy of what gives the loader its indices, which can be used up in its place.

    It draws from the same generators in the same order. The dataset is not copied.
    """
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    data = getattr(loader.dataset, "__dict__", {}).values()
    inside = _reachable([sampler])
    shared = [item for item in inside if isinstance(item, (*_GENERATORS, Dataset))]
    shared += [item for item in data if not isinstance(item, list | dict | set)]
    memo = {id(item): item for item in (loader.dataset, *shared)}
    with suppress(Exception):  # a sampler may hold anything
        return copy.deepcopy(sampler, memo)
    if not any(isinstance(item, Iterator) for item in inside):
        with suppress(Exception):
            return copy.copy(sampler)
    raise InputError(
        f"the sampler of the loader, a {type(sampler).__name__}, cannot be copied; reading it "
        "would use up the order that training gets. Give another loader of the same dataset, "
        "such as DataLoader(dataset, batch_size=64)."
    )


@contextmanager
def _iterator_of(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """An iterator of the loader; the workers of a copy end here.

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
        # torch ends workers only when the iterator is collected; there is no public way.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            try:
                shut_down()
            except RuntimeError as error:
                if not is_death_of_worker(error):  # which matters no longer
                    raise


def is_death_of_worker(error: Exception) -> bool:
    """Whether torch says that a worker died; it does so from a signal handler, anywhere."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


def _failure_of(loader: Any, error: Exception) -> str | None:
    """What to say if the loader itself failed: a worker died, or took too long.

    None if an item did.
    """
    codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
    # What a worker has caught is raised by `reraise`, and by nothing else.
    if not getattr(loader, "num_workers", 0) or ExceptionWrapper.reraise.__code__ in codes:
        return None
    line = error_line(error)
    is_of_queue = any("multiprocessing" in code.co_filename for code in codes)
    if is_of_queue and isinstance(error, EOFError | OSError):
        # On a busy machine its end is noticed at the queue or the socket of its tensors first.
        return f"a DataLoader worker exited unexpectedly ({line})"
    return line


def error_line(error: Exception) -> str:
    """The error in one line, such as "ValueError: no such file"."""
    name = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught ") and len(lines) > 1:  # the traceback of a worker
        ends = (line for line in reversed(lines) if line.partition(":")[0].split(".")[-1] == name)
        return next(ends, lines[-1]).strip()
    return f"{name}: {lines[0]}" if lines[0] else name


@contextmanager
def as_before(loader: Any) -> Iterator[None]:
    """Afterwards every generator that reading the loader can draw from is where it was.

    These are the global ones of python, numpy, torch and the accelerators in use, and those that
    the loader, its dataset, samplers, transforms and functions hold. So are the numbers that a
    dataset in this process counts with, such as its epoch, and the state of one with a state_dict.
    """
    cells = [*global_cells(), *_cells(loader)]
    contents = [cell.content() for cell in cells]
    try:
        yield
    finally:
        for cell, content in zip(cells, contents, strict=True):
            cell.put_back(content)


def _cells(loader: Any) -> Iterator[Cell]:
    roots = [loader]
    if isinstance(loader, DataLoader):
        names = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn", "worker_init_fn")
        roots = [getattr(loader, name, None) for name in names]
    is_read_here = not getattr(loader, "num_workers", 0)
    for item in _reachable(roots):
        if isinstance(item, _GENERATORS):
            if not isinstance(item, random.SystemRandom):
                yield generator_cell(item, "generator")
        elif item is loader or (isinstance(item, Dataset) and is_read_here):
            if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
                yield ProtocolCell(item, "dataset", PART)
            own = getattr(item, "__dict__", None)
            if isinstance(own, dict):
                yield FunctionsCell("dataset", PART, functools.partial(_numbers, own), own.update)


def _numbers(attributes: dict[str, Any]) -> dict[str, int | float]:
    return {key: value for key, value in attributes.items() if type(value) in (int, float)}


def _reachable(roots: Iterable[Any]) -> list[Any]:
    """Objects that the roots lead to; long lists are not looked into: they hold the data."""
    found: dict[int, Any] = {}
    queue = deque(roots)
    while queue and len(found) < _MOST_OBJECTS:
        item = queue.popleft()
        if item is not None and id(item) not in found and not isinstance(item, _OPAQUE):
            found[id(item)] = item
            queue.extend(_inside(item))
    return list(found.values())


def _inside(item: Any) -> Iterable[Any]:
    if isinstance(item, _GENERATORS):
        return ()
    if isinstance(item, dict | list | tuple | set | frozenset | deque):
        values = item.values() if isinstance(item, dict) else item
        return list(values) if len(item) <= _LONGEST else ()
    if isinstance(item, functools.partial):
        return (item.func, item.args, item.keywords)
    if isinstance(item, types.MethodType):
        return (item.__self__,)
    if isinstance(item, types.FunctionType):
        held = []
        for cell in item.__closure__ or ():
            with suppress(ValueError):  # assigned later
                held.append(cell.cell_contents)
        return held
    own = getattr(item, "__dict__", None)
    return list(own.values()) if isinstance(own, dict) else ()
