"""What is wrong with single rows of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stayfinite.prevent.data.ends import Ends
from stayfinite.prevent.data.leaves import Leaf
from stayfinite.prevent.data.roles import Role, is_additive_mask

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
