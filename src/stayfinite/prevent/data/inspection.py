"""Batches looked at one after another, and what was seen in them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from stayfinite.detect.parts import undisturbed
from stayfinite.prevent.data.ends import Ends, ends_of
from stayfinite.prevent.data.leaves import Leaf, leaves, size_of
from stayfinite.prevent.data.padding import PaddingMasks
from stayfinite.prevent.data.roles import Picked, Role, roles_of
from stayfinite.prevent.data.sights import Kind, Scene, Sight, sights
from stayfinite.prevent.data.tally import Tally

_SAMPLE_BITS = 24
_FIRST_CLEARING = 512

Key = tuple[Kind, str]


def place_of(batch: int, sample: int) -> int:
    return batch << _SAMPLE_BITS | sample


def parted(place: int) -> tuple[int, int]:
    """Batch and sample."""
    return place >> _SAMPLE_BITS, place & ((1 << _SAMPLE_BITS) - 1)


class Case:
    """One kind of thing in one tensor, over all batches."""

    def __init__(self) -> None:
        self.places = array("q")
        self.counts: Counter[str] = Counter()
        self.span: tuple[float, float] | None = None

    def add(self, sight: Sight, batch: int) -> None:
        self.places.extend(place_of(batch, sample) for sample in sight.samples.tolist())
        self.counts.update(sight.counts)
        if sight.span is not None:
            low, high = sight.span if self.span is None else self.span
            self.span = (min(low, sight.span[0]), max(high, sight.span[1]))


class Inspection:
    """Looks at batches, each once.

    Its memory grows with what is wrong, not with the number of batches: `cases` has the places
    of bad samples, `tallies` what each tensor is like, and `indices` the dataset indices of the
    batches that either of them refers to. `outliers` are the places that a second pass found.
    """

    def __init__(
        self, *, classes: int | None = None, ignore_index: int = -100, picked: Picked | None = None
    ) -> None:
        self.classes, self.ignore_index = classes, ignore_index
        self.picked = picked or Picked()
        self.batches = self.samples = 0
        self.sizes: Counter[int] = Counter()
        self.roles: dict[str, Role] = {}
        self.cases: dict[Key, Case] = {}
        self.tallies: dict[str, Tally] = {}
        self.padding: dict[str, PaddingMasks] = {}
        self.outliers: dict[str, array[int]] = {}
        self.indices: dict[int, Sequence[Any]] = {}
        self._next_clearing = _FIRST_CLEARING

    @undisturbed
    def look(self, batch: Any, *, number: int = 0, indices: Sequence[Any] | None = None) -> None:
        """Takes a batch, its number, and the dataset indices of its samples if they are known."""
        self.batches += 1
        found = leaves(batch, None if indices is None else len(indices))
        size = size_of(batch) if indices is None else len(indices)
        self.samples += size or 0
        self.sizes[size or 0] += 1
        self._learn_roles(found)
        for leaf in found:
            self._look_at(leaf, number)
        if indices is not None:
            self.keep(number, indices)

    def sights_of(self, batch: Any, size: int | None) -> Iterator[tuple[Leaf, Ends, list[Sight]]]:
        """What is wrong with a batch, leaf by leaf; nothing is remembered."""
        for leaf in leaves(batch, size):
            ends = ends_of(leaf.values)
            yield leaf, ends, list(sights(self._scene(leaf, ends)))

    def _learn_roles(self, found: list[Leaf]) -> None:
        new = [leaf for leaf in found if leaf.path not in self.roles]
        if new:
            if self.batches == 1:
                self.picked.refuse_unknown(found)
            learned = roles_of(found, self.picked, self.classes)
            self.roles |= {leaf.path: learned[leaf.path] for leaf in new}

    def _scene(self, leaf: Leaf, ends: Ends) -> Scene:
        role = self.roles.get(leaf.path, Role.OTHER)
        return Scene(
            leaf=leaf, ends=ends, role=role, classes=self.classes, ignore_index=self.ignore_index
        )

    def _look_at(self, leaf: Leaf, number: int) -> None:
        ends = ends_of(leaf.values)
        for sight in sights(self._scene(leaf, ends)):
            self.cases.setdefault((sight.kind, sight.path), Case()).add(sight, number)
        if not leaf.values.numel():
            return
        places = leaf.sample_of + (number << _SAMPLE_BITS)
        if leaf.values.dtype is torch.bool and self.roles[leaf.path] is not Role.MASK:
            self.padding.setdefault(leaf.path, PaddingMasks()).add(leaf.values, places)
        if leaf.path not in self.tallies:
            self.tallies[leaf.path] = Tally(leaf)
        self.tallies[leaf.path].add(leaf, ends, places)

    @undisturbed
    def settle(self) -> None:
        """Takes everything into account that was looked at."""
        for tally in self.tallies.values():
            tally.settle()

    def keep(self, number: int, indices: Sequence[Any]) -> None:
        """Remembers the dataset indices of a batch; now and then those are forgotten to which
        nothing refers."""
        is_whole = set(map(type, indices)) == {int}
        self.indices[number] = array("q", indices) if is_whole else tuple(indices)
        if len(self.indices) >= self._next_clearing:
            self.settle()
            referred = self._referred_batches()
            self.indices = {n: i for n, i in self.indices.items() if n in referred}
            self._next_clearing = max(_FIRST_CLEARING, 2 * len(self.indices))

    def indices_at(self, places: Iterable[int]) -> Iterator[Any]:
        """The dataset index of each place, if rows are in the order of the indices."""
        for batch, row in map(parted, places):
            indices = self.indices.get(batch, ())
            if row < len(indices):
                yield indices[row]

    def _referred_batches(self) -> set[int]:
        places = {place for case in self.cases.values() for place in case.places}
        for outliers in self.outliers.values():
            places.update(outliers)
        for padding in self.padding.values():
            places.update(padding.places)
        for tally in self.tallies.values():
            for table in filter(None, (tally.ends, tally.columns)):
                places.update(table.places.unique().tolist())
        return {parted(place)[0] for place in places}
