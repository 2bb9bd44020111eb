"""Batches looked at one after another, and what is wrong with single rows of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stayfinite.detect.memory import undisturbed
from stayfinite.prevent.data.batch import (
    Leaf,
    PaddingMasks,
    Paths,
    Role,
    is_additive_mask,
    leaves,
    refuse_unknown,
    roles_of,
    size_of,
)
from stayfinite.prevent.data.statistics import OutlierLimits, TensorStatistics

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
Key = tuple[Kind, str]
"""What is wrong, and the path of the tensor."""

BadSamples = tuple[Kind, Tensor, dict[str, int]]
"""What is wrong with which samples of a batch, and numbers about it; see Occurrences."""

SAMPLE_BITS = 24
_FIRST_CLEARING = 512


def split_place(place: int) -> tuple[int, int]:
    """Batch and sample."""
    return place >> SAMPLE_BITS, place & ((1 << SAMPLE_BITS) - 1)


class Occurrences:
    """One kind of thing in one tensor, over all batches: where it was, and numbers about it.

    These add up over batches, such as how many values are NaN; of `lowest` and `highest`, the
    ends of the values that are wrong, the extremes are kept.
    """

    def __init__(self) -> None:
        self.places = array("q")
        self.counts: Counter[str] = Counter()

    def add(self, places: Iterable[int], **counts: int) -> None:
        before = len(self.places)
        self.places.extend(places)
        self.counts["rows"] += len(self.places) - before
        for name, count in counts.items():
            if name in ("lowest", "highest"):
                choose = min if name == "lowest" else max
                self.counts[name] = choose(count, self.counts.get(name, count))
            else:
                self.counts[name] += count


class Inspection:
    """Looks at batches, each once.

    Its memory grows with what is wrong, not with the number of batches: `seen` has the places
    of bad samples, `tensors` what each tensor is like, and `indices` the dataset indices of the
    batches that either of them refers to.
    """

    def __init__(
        self,
        *,
        classes: int | None = None,
        ignore_index: int = -100,
        inputs: Paths | None = None,
        targets: Paths | None = None,
    ) -> None:
        self.classes, self.ignore_index = classes, ignore_index
        self._inputs, self._targets = inputs, targets
        self.batches = self.samples = 0
        self.sizes: Counter[int] = Counter()
        self.roles: dict[str, Role] = {}
        self.seen: dict[Key, Occurrences] = {}
        self.tensors: dict[str, TensorStatistics] = {}
        self.padding: dict[str, PaddingMasks] = {}
        self.indices: dict[int, Sequence[Any]] = {}
        self._next_clearing = _FIRST_CLEARING

    @undisturbed
    def look(self, batch: Any, *, number: int = 0, indices: Sequence[Any] | None = None) -> None:
        """Takes a batch, its number, and the dataset indices of its samples if they are known."""
        self.batches += 1
        size = size_of(batch) if indices is None else len(indices)
        found = leaves(batch, size)
        self.samples += size or 0
        self.sizes[size or 0] += 1
        new = [leaf for leaf in found if leaf.path not in self.roles]
        if new:
            if self.batches == 1:
                refuse_unknown(found, self._inputs)
                refuse_unknown(found, self._targets)
            roles = roles_of(found, self._inputs, self._targets, self.classes)
            self.roles |= {leaf.path: roles[leaf.path] for leaf in new}
        for leaf in found:
            for kind, samples, counts in self.bad_samples(leaf):
                self._note(kind, leaf.path, samples, number, **counts)
            if leaf.values.numel():
                self._gather(leaf, leaf.sample_of + (number << SAMPLE_BITS))
        if indices is not None:
            self._remember(number, indices)

    def _note(self, kind: Kind, path: str, samples: Tensor, batch: int, **counts: int) -> None:
        seen = self.seen.setdefault((kind, path), Occurrences())
        seen.add((samples + (batch << SAMPLE_BITS)).tolist(), **counts)

    def _gather(self, leaf: Leaf, places: Tensor) -> None:
        if leaf.values.dtype is torch.bool and self.roles[leaf.path] is not Role.MASK:
            self.padding.setdefault(leaf.path, PaddingMasks()).add(leaf.values, places)
        if leaf.path not in self.tensors:
            self.tensors[leaf.path] = TensorStatistics(leaf)
        self.tensors[leaf.path].add(leaf, places)

    def bad_samples(self, leaf: Leaf) -> Iterator[BadSamples]:
        """All that is wrong with rows of the leaf and can be said without other batches."""
        role = self.roles.get(leaf.path, Role.OTHER)
        for look in LOOKS:
            yield from (found for found in look(leaf, role, self) if len(found[1]))

    @undisturbed
    def settle(self) -> None:
        """Takes everything into account that was looked at."""
        for tensor in self.tensors.values():
            tensor.settle()

    def outlier_limits(self) -> dict[str, OutlierLimits]:
        """For each tensor that has outliers what they are beyond; only floats are judged."""
        found: dict[str, OutlierLimits] = {}
        for path, tensor in self.tensors.items():
            if self.roles[path] in (Role.INPUT, Role.TARGET) and tensor.dtype.startswith("float"):
                limits = tensor.limits()
                if limits is not None and limits.beyond(tensor.table.values).any():
                    found[path] = limits
        return found

    @undisturbed
    def look_for_outliers(
        self,
        limits: dict[str, OutlierLimits],
        batch: Any,
        *,
        number: int,
        indices: Sequence[Any] | None,
    ) -> None:
        """Notes the places of all outliers in a batch, by what a first pass has found."""
        for leaf in leaves(batch, None if indices is None else len(indices)):
            if leaf.path in limits:
                rows = self.tensors[leaf.path].rows_beyond(limits[leaf.path], leaf)
                self._note("outlier", leaf.path, _with_any(leaf, rows), number)
                if rows.any() and indices is not None:
                    self._remember(number, indices)

    def _remember(self, number: int, indices: Sequence[Any]) -> None:
        """Keeps the dataset indices of a batch; now and then those are forgotten to which
        nothing refers."""
        is_whole = set(map(type, indices)) == {int}
        self.indices[number] = array("q", indices) if is_whole else tuple(indices)
        if len(self.indices) >= self._next_clearing:
            self.settle()
            referred = {split_place(place)[0] for place in self._referred_places()}
            self.indices = {n: i for n, i in self.indices.items() if n in referred}
            self._next_clearing = max(_FIRST_CLEARING, 2 * len(self.indices))

    def _referred_places(self) -> Iterator[int]:
        for seen in self.seen.values():
            yield from seen.places
        for padding in self.padding.values():
            yield from padding.places
        for tensor in self.tensors.values():
            for table in filter(None, (tensor.ends, tensor.columns)):
                yield from table.places.unique().tolist()

    def indices_at(self, places: Iterable[int]) -> Iterator[Any]:
        """The dataset index of each place, if rows are in the order of the indices."""
        for batch, row in map(split_place, places):
            indices = self.indices.get(batch, ())
            if row < len(indices):
                yield indices[row]


def _with_any(leaf: Leaf, rows: Tensor) -> Tensor:
    """The samples that own one of the rows."""
    samples: Tensor = leaf.sample_of[rows].unique()
    return samples


def _with_all(leaf: Leaf, rows: Tensor) -> Tensor:
    """The samples that own only such rows."""
    owners = leaf.sample_of
    counts = owners.bincount()
    chosen = owners[rows].bincount(minlength=len(counts))
    return ((counts == chosen) & (counts > 0)).nonzero().flatten()


def _any(flags: Tensor) -> Tensor:
    """For each row, whether any of its flags is set."""
    return flags.flatten(1).any(1) if flags.ndim > 1 else flags


def _non_finite(leaf: Leaf, role: Role, inspection: Inspection) -> Iterator[BadSamples]:
    is_bad = leaf.ends.is_bad
    if leaf.ends.any_bad and not is_additive_mask(leaf.values):
        values = leaf.values[is_bad]
        counts = {"nan": int(values.isnan().sum()), "inf": int(values.isinf().sum())}
        yield "non_finite", _with_any(leaf, is_bad), counts


def _empty(leaf: Leaf, role: Role, inspection: Inspection) -> Iterator[BadSamples]:
    """Sequences of length 0. Targets may be: an image without boxes."""
    has_values = leaf.values.numel() > 0
    if role is Role.LENGTH and has_values:
        yield "empty", _with_any(leaf, _any(leaf.values <= 0)), {}
    elif role is Role.INPUT and leaf.empty:
        yield "empty", torch.tensor(leaf.empty), {}
    elif role is Role.INPUT and not has_values and leaf.owners is None:
        yield "empty", leaf.sample_of, {}


def _labels(leaf: Leaf, role: Role, inspection: Inspection) -> Iterator[BadSamples]:
    """Labels out of range, samples without a label that counts, and batches of nothing else."""
    if role is not Role.LABEL or not leaf.values.numel():
        return
    ends, index, classes = leaf.ends, inspection.ignore_index, inspection.classes
    top = torch.inf if classes is None else classes
    rows = (ends.low < 0) | (ends.high >= top)
    if rows.any():
        values = leaf.values[rows]
        is_wrong = ((values < 0) | (values >= top)) & (values != index)
        rows[rows.clone()] = _any(is_wrong)
        wrong = values[is_wrong]
        if len(wrong):
            span = {"lowest": int(wrong.min()), "highest": int(wrong.max())}
            kind: Kind = "negative_label" if classes is None else "label_range"
            yield kind, _with_any(leaf, rows), {"labels": len(wrong), **span}
    rows = (ends.low == index) & (ends.high == index)
    if rows.all():
        yield "all_ignored", _with_all(leaf, rows), {"batches": 1}
    if rows.any() and (leaf.values.ndim > 1 or leaf.owners is not None):
        yield "ignored_row", _with_all(leaf, rows), {}


def _blank(leaf: Leaf, role: Role, inspection: Inspection) -> Iterator[BadSamples]:
    """Inputs of many values that are all the same: black images, silence, nothing but padding."""
    values, ends = leaf.values, leaf.ends
    if role is not Role.INPUT or values.ndim < 2 or values[:1].numel() < FEWEST_VALUES:
        return
    if values.dtype is not torch.bool and not leaf.is_sparse:
        rows = (ends.low == ends.high) & ~ends.is_bad
        if rows.any():
            yield "blank", _with_all(leaf, rows), {}


def _look_at_mask(leaf: Leaf, role: Role, inspection: Inspection) -> Iterator[BadSamples]:
    """Masks that leave nothing to look at.

    1 keeps, unless the name says padding; what is added to scores keeps at 0. Larger masks than
    one value for each position are judged only when they are clearly for attention.
    """
    values, name = leaf.values, leaf.path.rpartition(".")[2].lower()
    if role is not Role.MASK or values.ndim < 2:
        return
    if is_additive_mask(values):
        is_hidden = values != 0
    elif values.ndim == 2 or "att" in name:
        is_hidden = values != 0 if "pad" in name else values == 0
    else:
        return
    kind: Kind = "masked" if values.ndim == 2 else "masked_query"
    yield kind, _with_any(leaf, _any(is_hidden.all(-1))), {}


LOOKS: tuple[Callable[[Leaf, Role, Inspection], Iterator[BadSamples]], ...] = (
    _non_finite,
    _empty,
    _labels,
    _blank,
    _look_at_mask,
)
