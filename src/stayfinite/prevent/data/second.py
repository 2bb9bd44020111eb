"""A second look at single samples, where a batch does not tell which of them is bad."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stayfinite.detect.parts import undisturbed
from stayfinite.prevent.data.ends import ends_of
from stayfinite.prevent.data.extremes import fences
from stayfinite.prevent.data.findings import in_order
from stayfinite.prevent.data.inspection import Inspection, Key, parted, place_of
from stayfinite.prevent.data.leaves import leaves
from stayfinite.prevent.data.reading import is_lost, iterating, told
from stayfinite.prevent.data.twin import Twin

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
