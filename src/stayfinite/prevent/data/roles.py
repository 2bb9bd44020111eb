"""What the tensors of a batch are for: inputs, targets, labels, masks, lengths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from stayfinite.errors import InputError
from stayfinite.prevent.data.leaves import ROOT, Leaf

Path = str | int
Paths = Path | Sequence[Path]

_TARGET = re.compile(
    r"(^|_)(labels?|targets?|class(es)?|categor(y|ies)|y|gt|boxes|bboxes)(_ids?)?$"
)
_LABEL = re.compile(r"(^|_)(labels?|targets?|class(es)?|categor(y|ies)|y|gt)(_ids?)?$")
_LENGTH = re.compile(r"(^|_)(lens?|lengths?)$")
_BOOKKEEPING = re.compile(r"(^|_)(ids?|idx|index|indices|area|iscrowd|orig_size|size)$")


class Role(Enum):
    """What a tensor is for, as far as can be told."""

    INPUT = "input"
    TARGET = "target"
    LABEL = "label"
    MASK = "mask"
    LENGTH = "length"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Picked:
    """Which parts of a batch the caller named, as paths such as "labels", 1 or "1.boxes"."""

    inputs: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None

    @classmethod
    def of(cls, inputs: Paths | None, targets: Paths | None) -> Picked:
        return cls(inputs=_as_paths(inputs), targets=_as_paths(targets))

    def refuse_unknown(self, found: Iterable[Leaf]) -> None:
        """Raises InputError if a path that the caller named is not in the batch."""
        paths = [leaf.path for leaf in found]
        for asked in (*(self.inputs or ()), *(self.targets or ())):
            if not any(_is_under(path, asked) for path in paths):
                there = ", ".join(dict.fromkeys(_short(path) for path in paths)) or "nothing"
                raise InputError(f"the batch has no tensor at {asked!r}; it has {there}.")


def _as_paths(given: Paths | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return (str(given),) if isinstance(given, str | int) else tuple(map(str, given))


def _short(path: str) -> str:
    return path.removeprefix(f"{ROOT}.").replace("*.", "").removesuffix(".*")


def _is_under(path: str, asked: str) -> bool:
    return f"{_short(path)}.".startswith(f"{asked}.")


def roles_of(found: Sequence[Leaf], picked: Picked, classes: int | None) -> dict[str, Role]:
    """The role of each path.

    What the caller picked comes first, then names, as in {"input_ids": ..., "labels": ...}. Of a
    tuple the first field is the input and all others are targets. Integers among these are labels
    if there is one candidate; of several it is the one that fits `classes`, else the last.
    """
    roles = {leaf.path: _role(leaf, picked) for leaf in found}
    labels = [leaf for leaf in found if roles[leaf.path] is Role.LABEL and not _name(leaf.path)]
    if picked.targets is None and len({leaf.path for leaf in labels}) > 1:
        kept = _likeliest(labels, classes)
        roles |= {leaf.path: Role.OTHER for leaf in labels if leaf.path != kept}
    if picked.targets is None and any(map(_is_named_label, roles)):
        # Among boxes, areas and image numbers, what is called labels are the labels.
        roles |= {
            path: Role.OTHER
            for path, role in roles.items()
            if role is Role.LABEL and not _is_named_label(path)
        }
    return roles


def _role(leaf: Leaf, picked: Picked) -> Role:
    if picked.targets is not None and any(_is_under(leaf.path, p) for p in picked.targets):
        return Role.LABEL if _is_whole(leaf.values) else Role.TARGET
    if picked.inputs is not None:
        is_named = any(_is_under(leaf.path, p) for p in picked.inputs)
        return Role.INPUT if is_named else _named_role(leaf) or Role.OTHER
    named = _named_role(leaf)
    if named is not None:
        return named
    if picked.targets is None and _field(leaf.path) > 0:
        return Role.LABEL if _is_whole(leaf.values) and not is_binary(leaf) else Role.TARGET
    return Role.INPUT


def _named_role(leaf: Leaf) -> Role | None:
    name = _name(leaf.path)
    if "mask" in name or is_additive_mask(leaf.values):
        return Role.LABEL if _is_segmentation(name, leaf.values) else Role.MASK
    if _LENGTH.search(name):
        return Role.LENGTH
    if _TARGET.search(name):
        return Role.LABEL if _is_whole(leaf.values) and _LABEL.search(name) else Role.TARGET
    if _BOOKKEEPING.search(name) and name not in ("input_ids", "token_ids", "ids"):
        return Role.OTHER
    return None


def _is_segmentation(name: str, values: Tensor) -> bool:
    """A mask with a class for each pixel."""
    is_picture = values.ndim > 2 and _is_whole(values) and values.numel() > 0
    return is_picture and "att" not in name and bool(values.amax() > 1)


def _name(path: str) -> str:
    """The last word in the path; "" when there are only numbers."""
    words = [part for part in path.split(".")[1:] if part != "*" and not part.isdigit()]
    return words[-1].lower() if words else ""


def _is_named_label(path: str) -> bool:
    return _LABEL.search(_name(path)) is not None


def _field(path: str) -> int:
    """The number of the field in a batch that is a tuple; 0 in any other."""
    parts = path.split(".")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


def _likeliest(labels: list[Leaf], classes: int | None) -> str:
    fitting = [leaf for leaf in labels if classes and _fits(leaf.values, classes)]
    return (fitting or labels)[-1].path


def _fits(values: Tensor, classes: int) -> bool:
    return values.numel() > 0 and int(values.min()) >= 0 and int(values.max()) < classes


def _is_whole(values: Tensor) -> bool:
    return not values.is_floating_point() and values.dtype is not torch.bool


def is_binary(leaf: Leaf) -> bool:
    """Whether all values are 0 or 1, and there are several to a row: a mask, or many labels."""
    values = leaf.values
    if values.dtype is torch.bool:
        return True
    return values.ndim > 1 and values.shape[1] > 1 and bool(((values == 0) | (values == 1)).all())


def is_additive_mask(values: Tensor) -> bool:
    """Whether it is added to attention scores: 0 where they count, -Inf or the like elsewhere."""
    if not values.is_floating_point() or values.ndim < 2 or not values.numel():
        return False
    lowest = values.amin()
    if not bool(lowest <= -1e4) or bool(values.amax() != 0):
        return False
    return bool(((values == 0) | (values == lowest)).all())
