"""Batches looked at one after another, and what is wrong with single rows of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stayfinite.detect.memory import undisturbed
from stayfinite.prevent.data.batch import (
    Leaf,
    PaddingMasks,
    Picked,
    Role,
    is_additive_mask,
    leaves,
    roles_of,
    size_of,
)
from stayfinite.prevent.data.statistics import Ends, Tally, ends_of

FEWEST_VALUES = 8
"""A row of fewer values that are all the same is nothing special."""

Kind = Literal[
    "error",
    "stopped",
    "no_batches",
    "non_finite",
    "label_range",
    "negative_label",
    "all_ignored",
    "ignored_row",
    "empty",
    "masked",
    "masked_query",
    "outlier",
    "scale",
    "same_rows",
    "constant",
    "blank",
    "single",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sight:
    """Something about some samples of a batch, by their number in it.

    `counts` are numbers that add up over batches, such as how many values are NaN; `span` is the
    smallest and the largest value that is wrong.
    """

    kind: Kind
    path: str
    samples: Tensor
    counts: Mapping[str, int]
    span: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Scene:
    """One leaf of one batch, with what is known about it."""

    leaf: Leaf
    ends: Ends
    role: Role
    classes: int | None
    ignore_index: int

    @property
    def is_empty(self) -> bool:
        return not self.leaf.values.numel()


def sights(scene: Scene) -> Iterator[Sight]:
    """Everything that is wrong with rows of the leaf and can be said without other batches."""
    for look in LOOKS:
        yield from look(scene)


def sight(
    scene: Scene,
    kind: Kind,
    samples: Tensor,
    *,
    counts: Mapping[str, int] | None = None,
    span: tuple[float, float] | None = None,
) -> Iterator[Sight]:
    """A sight of these samples; none if there are none."""
    if len(samples):
        counts = {"rows": len(samples), **(counts or {})}
        path = scene.leaf.path
        yield Sight(kind=kind, path=path, samples=samples, counts=counts, span=span)


def with_any(scene: Scene, rows: Tensor) -> Tensor:
    """The samples that own one of the rows."""
    samples: Tensor = scene.leaf.sample_of[rows].unique()
    return samples


def with_all(scene: Scene, rows: Tensor) -> Tensor:
    """The samples that own only such rows."""
    owners = scene.leaf.sample_of
    counts = owners.bincount()
    chosen = owners[rows].bincount(minlength=len(counts))
    return ((counts == chosen) & (counts > 0)).nonzero().flatten()


def non_finite(scene: Scene) -> Iterator[Sight]:
    if not scene.ends.any_bad or is_additive_mask(scene.leaf.values):
        return
    values = scene.leaf.values[scene.ends.is_bad]
    counts = {"nan": int(values.isnan().sum()), "inf": int(values.isinf().sum())}
    yield from sight(scene, "non_finite", with_any(scene, scene.ends.is_bad), counts=counts)


def empty(scene: Scene) -> Iterator[Sight]:
    """Sequences of length 0. Targets may be: an image without boxes."""
    leaf = scene.leaf
    if scene.role is Role.LENGTH and not scene.is_empty:
        yield from sight(scene, "empty", with_any(scene, _any(leaf.values <= 0)))
    elif scene.role is Role.INPUT and leaf.empty:
        yield from sight(scene, "empty", torch.tensor(leaf.empty))
    elif scene.role is Role.INPUT and scene.is_empty and leaf.owners is None:
        yield from sight(scene, "empty", leaf.sample_of)


def labels_out_of_range(scene: Scene) -> Iterator[Sight]:
    if scene.role is not Role.LABEL or scene.is_empty:
        return
    top = torch.inf if scene.classes is None else scene.classes
    rows = (scene.ends.low < 0) | (scene.ends.high >= top)
    if not rows.any():
        return
    values = scene.leaf.values[rows]
    is_wrong = ((values < 0) | (values >= top)) & (values != scene.ignore_index)
    rows[rows.clone()] = _any(is_wrong)
    wrong = values[is_wrong]
    if len(wrong):
        kind: Kind = "negative_label" if scene.classes is None else "label_range"
        span = (int(wrong.min()), int(wrong.max()))
        yield from sight(
            scene, kind, with_any(scene, rows), span=span, counts={"labels": len(wrong)}
        )


def ignored(scene: Scene) -> Iterator[Sight]:
    """Samples without a label that counts, and batches of nothing else."""
    if scene.role is not Role.LABEL or scene.is_empty:
        return
    index = scene.ignore_index
    rows = (scene.ends.low == index) & (scene.ends.high == index)
    if rows.all():
        yield from sight(scene, "all_ignored", with_all(scene, rows), counts={"batches": 1})
    if rows.any() and (scene.leaf.values.ndim > 1 or scene.leaf.owners is not None):
        yield from sight(scene, "ignored_row", with_all(scene, rows))


def blank(scene: Scene) -> Iterator[Sight]:
    """Inputs of many values that are all the same: black images, silence, nothing but padding."""
    values = scene.leaf.values
    if scene.role is not Role.INPUT or values.ndim < 2 or values[:1].numel() < FEWEST_VALUES:
        return
    if values.dtype is not torch.bool and not scene.leaf.is_sparse:
        rows = (scene.ends.low == scene.ends.high) & ~scene.ends.is_bad
        if rows.any():
            yield from sight(scene, "blank", with_all(scene, rows))


def covered(scene: Scene) -> Iterator[Sight]:
    """Masks that leave nothing to look at.

    1 keeps, unless the name says padding; what is added to scores keeps at 0. Larger masks than
    one value for each position are judged only when they are clearly for attention.
    """
    if scene.role is not Role.MASK or scene.leaf.values.ndim < 2:
        return
    values, name = scene.leaf.values, scene.leaf.path.rpartition(".")[2].lower()
    if is_additive_mask(values):
        is_hidden = values != 0
    elif values.ndim == 2 or "att" in name:
        is_hidden = values != 0 if "pad" in name else values == 0
    else:
        return
    kind: Kind = "masked" if values.ndim == 2 else "masked_query"
    yield from sight(scene, kind, with_any(scene, _any(is_hidden.all(-1))))


def _any(flags: Tensor) -> Tensor:
    """For each row, whether any of its flags is set."""
    return flags.flatten(1).any(1) if flags.ndim > 1 else flags


LOOKS: tuple[Callable[[Scene], Iterator[Sight]], ...] = (
    non_finite,
    empty,
    labels_out_of_range,
    ignored,
    blank,
    covered,
)


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
