"""The batches of a loader, read without a trace, with their indices.

Those that cannot be read are passed over, and single samples get a second look.
"""

from __future__ import annotations

import copy
import functools
import random
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from stayfinite.detect.memory import undisturbed
from stayfinite.errors import InputError
from stayfinite.prevent.data.batch import leaves, size_of
from stayfinite.prevent.data.inspection import Inspection, Key, parted, place_of
from stayfinite.prevent.data.problems import fences, in_order
from stayfinite.prevent.data.statistics import ends_of
from stayfinite.snapshot.copies import Cell, FunctionsCell, ProtocolCell
from stayfinite.snapshot.rng import PART, generator_cell, global_cells

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


class Twin:
    """Reads the dataset of a loader as the loader would, without touching it.

    The loader itself is never iterated: its workers, its iterator and its sampler stay as they
    are. Where a subclass has an iteration of its own it `may_repeat`, without an end.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._recorded: RecordedIndices | None = None
        if not isinstance(loader.dataset, IterableDataset):
            self._recorded = RecordedIndices(spare_sampler(loader))
        self.loader = _twin(loader, self._recorded)
        self.may_repeat = type(loader).__iter__ is not DataLoader.__iter__
        self._takes_one = False

    @property
    def has_indices(self) -> bool:
        return self._recorded is not None

    @property
    def is_row_known(self) -> bool:
        """Whether the n-th row of a batch is sure to be its n-th index.

        A collate function of the user's may sort, drop, pack or mix.
        """
        is_batched = self._loader.batch_sampler is not None
        return self._takes_one or (is_batched and self._loader.collate_fn is default_collate)

    @property
    def is_waiting(self) -> bool:
        """Whether the sampler has given indices for which there was no batch."""
        return self._recorded is not None and bool(self._recorded.waiting)

    def forget_length(self) -> None:
        """A length that was asked for makes torch warn about iterable datasets that are longer."""
        vars(self.loader)["_IterableDataset_len_called"] = None

    def next_indices(self, batch: Any = None) -> list[Any] | None:
        """The indices of the next batch, in the order of the sampler; None if they are not known.

        Without automatic batching one index may stand for all rows of the batch.
        """
        if self._recorded is None or not self._recorded.waiting:
            return None
        item = self._recorded.waiting.popleft()
        item = item.tolist() if hasattr(item, "tolist") else item
        if self._loader.batch_sampler is None and not isinstance(item, list | tuple):
            self._takes_one = True
            return [item] * (size_of(batch) or 1)
        if set(map(type, item)) == {int}:
            return list(item)
        return [each.item() if hasattr(each, "item") else each for each in item]

    def reading(
        self, wanted: Sequence[Sequence[Any]], collate: Callable[[Any], Any] | None = None
    ) -> DataLoader[Any]:
        """A loader of these batches of indices, with the same workers."""
        items = [each[0] for each in wanted] if self._takes_one else list(wanted)
        loader = _twin(self._loader, items)
        if collate is not None:
            vars(loader)["collate_fn"] = collate
        return loader


def _twin(loader: DataLoader[Any], sampler: Any | None) -> DataLoader[Any]:
    twin = copy.copy(loader)
    own = vars(twin)  # a loader refuses to have its sampler set
    own.update(_iterator=None, persistent_workers=False, pin_memory=False, in_order=True)
    own.update(_IterableDataset_len_called=None)
    if sampler is not None:
        own["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    return twin


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
    for item in reachable(_parts(loader)):
        if isinstance(item, _GENERATORS) and not isinstance(item, random.SystemRandom):
            yield generator_cell(item, "generator")
        elif item is loader or (isinstance(item, Dataset) and not _is_read_elsewhere(loader)):
            yield from _counting_cells(item)


def _parts(loader: Any) -> list[Any]:
    if not isinstance(loader, DataLoader):
        return [loader]
    names = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn", "worker_init_fn")
    return [getattr(loader, name, None) for name in names]


def _is_read_elsewhere(loader: Any) -> bool:
    return bool(getattr(loader, "num_workers", 0))


def _counting_cells(owner: Any) -> Iterator[Cell]:
    if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
        yield ProtocolCell(owner, "dataset", PART)
    own = getattr(owner, "__dict__", None)
    if isinstance(own, dict):
        yield FunctionsCell("dataset", PART, functools.partial(_numbers, own), own.update)


def _numbers(attributes: dict[str, Any]) -> dict[str, int | float]:
    return {key: value for key, value in attributes.items() if type(value) in (int, float)}


def reachable(roots: Iterable[Any]) -> list[Any]:
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
    if isinstance(item, dict):
        return list(item.values()) if len(item) <= _LONGEST else ()
    if isinstance(item, list | tuple | set | frozenset | deque):
        return list(item) if len(item) <= _LONGEST else ()
    if isinstance(item, functools.partial):
        return (item.func, item.args, item.keywords)
    if isinstance(item, types.MethodType):
        return (item.__self__,)
    if isinstance(item, types.FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or () if _is_full(cell)]
    own = getattr(item, "__dict__", None)
    return list(own.values()) if isinstance(own, dict) else ()


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # assigned later
        return False


def spare_sampler(loader: DataLoader[Any]) -> Any:
    """A copy of what gives the loader its indices, which can be used up in its place.

    It draws from the same generators in the same order. The dataset is not copied.
    """
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    data = getattr(loader.dataset, "__dict__", {}).values()
    inside = reachable([sampler])
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


Cases = Mapping[Key, Sequence[int]]


def nothing(samples: Any) -> int:
    """A collate function for who only wants to know whether samples can be read."""
    return 0


def errors_of(twin: Twin, indices: Sequence[Any]) -> list[str | None]:
    """For each index the error that reading it alone gives; None if it can be read."""
    return [error for _, error in read_each(twin, [[index] for index in indices], nothing)]


def read_each(
    twin: Twin, wanted: Sequence[Sequence[Any]], collate: Callable[[Any], Any] | None = None
) -> Iterator[tuple[Any, str | None]]:
    """For each list of indices its batch, or the error in its place."""
    if not wanted:
        return
    loader, lost = twin.reading(wanted, collate), None
    with iterating(loader) as iterator:
        for _ in wanted:
            try:
                yield (None, lost) if lost else (next(iterator), None)
            except Exception as error:
                lost = told(error) if is_lost(loader, error) else None
                yield None, told(error)


class Confirmation:
    """Which samples are bad, when the rows of a batch need not be in the order of its indices.

    Each suspect is read alone, through the same collate function, and is guilty if the same is
    seen in the same tensor. First the sample at the place of the bad row, then, if that is not it,
    all others of its batch.
    """

    def __init__(self, twin: Twin, inspection: Inspection) -> None:
        self._twin, self._inspection = twin, inspection
        self._fences = fences(inspection)
        self._seen: dict[Any, set[Key]] = {}

    def guilty(self, cases: Cases) -> dict[Key, tuple[Any, ...]]:
        """For each case the dataset indices that are certain."""
        self._read(
            index for places in cases.values() for index in self._inspection.indices_at(places)
        )
        missing = {key: self._unexplained(key, places) for key, places in cases.items()}
        self._read(i for batches in missing.values() for b in batches for i in self._of(b))
        return {key: self._certain(key, places) for key, places in cases.items()}

    def _of(self, batch: int) -> Sequence[Any]:
        return self._inspection.indices.get(batch, ())

    def _unexplained(self, key: Key, places: Sequence[int]) -> list[int]:
        """Batches in which fewer samples are guilty so far than rows are bad."""
        rows: dict[int, int] = {}
        for batch, _ in map(parted, places):
            rows[batch] = rows.get(batch, 0) + 1
        return [batch for batch, count in rows.items() if len(self._guilty_of(key, batch)) < count]

    def _guilty_of(self, key: Key, batch: int) -> list[Any]:
        return [index for index in self._of(batch) if key in self._seen.get(index, ())]

    def _certain(self, key: Key, places: Sequence[int]) -> tuple[Any, ...]:
        batches = dict.fromkeys(parted(place)[0] for place in places)
        return in_order(i for batch in batches for i in self._guilty_of(key, batch))

    def _read(self, indices: Iterable[Any]) -> None:
        new = [index for index in dict.fromkeys(indices) if index not in self._seen]
        singles = read_each(self._twin, [[index] for index in new])
        for index, (batch, error) in zip(new, singles, strict=True):
            self._seen[index] = set() if error else self._look(batch)

    @undisturbed
    def _look(self, batch: Any) -> set[Key]:
        found: set[Key] = set()
        for leaf, ends, seen in self._inspection.sights_of(batch, 1):
            found |= {(sight.kind, sight.path) for sight in seen}
            fence = self._fences.get(leaf.path)
            if fence is not None and fence.rows_outside(leaf, ends).any():
                found.add(("outlier", leaf.path))
        return found


class SecondPass:
    """Notes the places of all outliers, by what is known after a first pass."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection, self._fences = inspection, fences(inspection)
        inspection.outliers = {path: array("q") for path in self._fences}

    @undisturbed
    def look(self, batch: Any, *, number: int, indices: Sequence[Any] | None) -> None:
        for leaf in leaves(batch, None if indices is None else len(indices)):
            fence = self._fences.get(leaf.path)
            if fence is None:
                continue
            rows = fence.rows_outside(leaf, ends_of(leaf.values))
            samples = leaf.sample_of[rows].unique().tolist()
            places = [place_of(number, sample) for sample in samples]
            self._inspection.outliers[leaf.path].extend(places)
            if places and indices is not None:
                self._inspection.keep(number, indices)
