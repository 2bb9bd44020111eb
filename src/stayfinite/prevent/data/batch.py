"""The tensors of a batch: whose sample each row is, what each is for, what is padding."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.detect.memory import is_readable, plain_parts
from stayfinite.errors import InputError
from stayfinite.nested import children

ROOT = "batch"
Path = str | int
Paths = Path | Sequence[Path]

_REDUCIBLE = {torch.float32, torch.float64, torch.bool, torch.uint8}
_REDUCIBLE |= {torch.int8, torch.int16, torch.int32, torch.int64}
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}
_TARGET = re.compile(
    r"(^|_)(labels?|targets?|class(es)?|categor(y|ies)|y|gt|boxes|bboxes)(_ids?)?$"
)
_LABEL = re.compile(r"(^|_)(labels?|targets?|class(es)?|categor(y|ies)|y|gt)(_ids?)?$")
_LENGTH = re.compile(r"(^|_)(lens?|lengths?)$")
_BOOKKEEPING = re.compile(r"(^|_)(ids?|idx|index|indices|area|iscrowd|orig_size|size)$")
_MOST_PLACES = 10_000
_MOST_CHANNELS = 64
_MOST_COLUMNS = 2048


@dataclass(frozen=True, eq=False)
class Leaf:
    """One tensor of a batch, on the host: dense, real, of a dtype that torch can reduce.

    Its first dimension are rows. `owners` has the sample of each row; None means that the rows are
    the samples, in order, or that it is not known. `empty` are samples that are there without any
    row.
    """

    path: str
    values: Tensor
    owners: Tensor | None = None
    empty: tuple[int, ...] = ()
    is_sparse: bool = False

    @property
    def sample_of(self) -> Tensor:
        """The sample of each row; where it is not known, the number of the row."""
        return torch.arange(len(self.values)) if self.owners is None else self.owners

    @cached_property
    def ends(self) -> Ends:
        """The extremes of each row."""
        return ends_of(self.values)


def leaves(batch: Any, size: int | None = None) -> list[Leaf]:
    """Every tensor, array and list of numbers in a batch of `size` samples.

    A list with an item for each sample gives leaves for all of them together, and a star in the
    path: the boxes of all images are `batch.1.*.boxes`.
    """
    return list(_walk(batch, ROOT, size_of(batch) if size is None else size, ()))


def size_of(batch: Any) -> int | None:
    """How many samples, told by the first tensor or list inside; None if nothing tells."""
    if isinstance(batch, Tensor | np.ndarray):
        if isinstance(batch, Tensor) and batch.is_nested:
            return batch.size(0)
        return len(batch) if batch.ndim else None
    for _, item in children(batch):
        size = len(item) if _is_list(item) and len(item) > 1 else size_of(item)
        if size is not None:
            return size
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _walk(value: Any, path: str, size: int | None, above: tuple[int, ...]) -> Iterator[Leaf]:
    tensor = _as_tensor(value)
    if tensor is not None:
        yield from _leaves_of(tensor, path)
    elif id(value) not in above:  # else it holds itself
        inside = (*above, id(value))
        if _has_one_per_sample(value, path, size):
            yield from _merge(value, path, inside)
        else:
            for key, item in children(value):
                yield from _walk(item, f"{path}.{key}", size, inside)


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        if array.dtype.itemsize > 8 and array.dtype.kind == "f":  # long double
            array = array.astype(np.float64)
        if array.dtype.itemsize > 16:
            array = array.astype(np.complex128)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        # torch takes neither read-only memory nor negative strides.
        is_usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        return torch.from_numpy(array if is_usable else array.copy())
    numbers = value if _is_list(value) and value else [value]
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    is_whole = all(isinstance(number, int) and abs(number) < 2**63 for number in numbers)
    is_bool = all(isinstance(number, bool) for number in numbers)
    dtype = torch.bool if is_bool else torch.int64 if is_whole else torch.float64
    return torch.tensor(value, dtype=dtype)


def _has_one_per_sample(value: Any, path: str, size: int | None) -> bool:
    """Whether a list has an item for each sample, and not some fields for all of them.

    Two crops of two images are two fields: each has a row for each sample.
    """
    if not _is_list(value) or len(value) != size:
        return False
    kinds = {isinstance(item, Tensor | np.ndarray) for item in value}
    has_others = kinds == {False} and not all(any(True for _ in children(item)) for item in value)
    if len(kinds) > 1 or has_others:
        return False
    if path == ROOT and len({(type(i), *(str(k) for k, _ in children(i))) for i in value}) > 1:
        return False
    has_nested = any(isinstance(item, Tensor) and item.is_nested for item in value)
    are_fields = all(_rows(item) == size for item in value)
    if not are_fields or path == ROOT or kinds != {True} or has_nested:
        return not are_fields
    # Three images of many sizes have three channels, and are not three fields.
    return len({item.shape for item in value}) > 1 and all(item.ndim > 2 for item in value)


def _rows(item: Any) -> int | None:
    """The rows of a tensor, or of the first one inside; None for none."""
    if isinstance(item, Tensor | np.ndarray):
        return size_of(item)
    return next((rows for _, child in children(item) if (rows := _rows(child)) is not None), None)


def _merge(samples: Any, path: str, above: tuple[int, ...]) -> Iterator[Leaf]:
    """The leaves of all samples, those of one path together where their shapes allow it."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for number, sample in enumerate(samples):
        for name, part in _walk_sample(sample, f"{path}.*", above):
            found.setdefault(name, []).append((number, part))
    for name, parts in found.items():
        yield from _together(name, parts)


def _walk_sample(sample: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    tensor = _as_tensor(sample)
    if tensor is not None:
        yield from ((path, part) for part in _readable(tensor))
    elif id(sample) not in above:
        for key, item in children(sample):
            yield from _walk_sample(item, f"{path}.{key}", (*above, id(sample)))


def _together(path: str, parts: list[tuple[int, Tensor]]) -> Iterator[Leaf]:
    """Scalars, sequences and tables end to end; images and the like as they are, or stacked."""
    empty = tuple(number for number, part in parts if not part.numel())
    rest = [(number, part) for number, part in parts if part.numel()]
    if rest and len({(part.dtype, part.ndim, part.shape[1:]) for _, part in rest}) == 1:
        rows = [part if part.ndim in (1, 2) else part.unsqueeze(0) for _, part in rest]
        if len({part.shape[1:] for part in rows}) == 1:
            lengths = torch.tensor([len(part) for part in rows])
            owners = torch.tensor([number for number, _ in rest]).repeat_interleave(lengths)
            yield Leaf(path, torch.cat(rows), owners, empty)
            return
    for number, part in rest:
        yield Leaf(path, part.unsqueeze(0), torch.tensor([number]))
    if empty:
        yield Leaf(path, torch.zeros(0), torch.zeros(0, dtype=torch.int64), empty)


def _leaves_of(tensor: Tensor, path: str) -> Iterator[Leaf]:
    if tensor.is_nested:
        yield from _merge(tensor.unbind(), path, ())
    elif tensor.layout not in _SPARSE or tensor.is_meta:
        for part in _readable(tensor):
            yield Leaf(path, part if part.ndim else part.unsqueeze(0))
    elif tensor.layout is not torch.sparse_coo and tensor.ndim != 2:
        yield from (Leaf(path, part, is_sparse=True) for part in _readable(tensor))
    else:  # each value that is stored is a row of its sample
        listed = tensor.to_sparse_coo()
        # Not values() and indices(), which refuse what is not coalesced.
        for values in _readable(listed._values()):
            yield Leaf(path, values, listed._indices()[0].cpu(), is_sparse=True)


def _readable(tensor: Tensor) -> Iterator[Tensor]:
    """The memory of the tensor on the host, complex numbers as pairs."""
    if tensor.numel() == 0 and tensor.layout is torch.strided and not tensor.is_meta:
        yield torch.zeros(tensor.shape)
        return
    for part in plain_parts(tensor):
        if not is_readable(part.dtype):
            continue
        part = part.detach().cpu().resolve_conj().resolve_neg()
        part = torch.view_as_real(part) if part.is_complex() else part
        wider = torch.float32 if part.dtype.is_floating_point else torch.int64
        yield part if part.dtype in _REDUCIBLE else part.to(wider)


@dataclass(frozen=True, eq=False)
class Ends:
    """For each row its finite extremes, NaN where there are none, and whether it is not finite.

    `channels` has the smallest and the largest value of each channel, or column of a matrix, over
    all rows; None where there are none or too many.
    """

    low: Tensor
    high: Tensor
    is_bad: Tensor
    any_bad: bool = False
    channels: tuple[Tensor, Tensor] | None = None


def ends_of(values: Tensor) -> Ends:
    """One pass over the memory for each end when all is finite."""
    is_bad = torch.zeros(len(values), dtype=torch.bool)
    if not values.numel():
        nothing = torch.full((len(values),), torch.nan, dtype=torch.float64)
        return Ends(nothing, nothing, is_bad)
    low, high = _ends_of(values)
    floors = tops = values
    # The difference is NaN or Inf where one of the two is, and so is the sum.
    is_real = values.is_floating_point()
    if is_real and not math.isfinite(float((high.double() - low.double()).sum())):
        is_bad = ~(low.isfinite() & high.isfinite()).all(1)
        known = values.isfinite()
        # In place of NaN and Inf: what cannot be an extreme.
        floors, tops = torch.where(known, values, torch.inf), torch.where(known, values, -torch.inf)
        low, high = _ends_of(floors)[0], _ends_of(tops)[1]
    channels = None
    if values.ndim == 2 and is_real and values.shape[1] <= _MOST_COLUMNS:
        channels = floors.amin(0).double(), tops.amax(0).double()
    elif low.shape[1] > 1:
        channels = low.amin(0).double(), high.amax(0).double()
    low, high, any_bad = low.amin(1).double(), high.amax(1).double(), bool(is_bad.any())
    if any_bad:
        has_none = low > high
        low, high = low.masked_fill(has_none, torch.nan), high.masked_fill(has_none, torch.nan)
    return Ends(low, high, is_bad, any_bad, channels)


def _ends_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest over everything but the row and the channel: two matrices.

    The channels of images and signals are the second or the last dimension.
    """
    if values.ndim == 1:
        return values.unsqueeze(1), values.unsqueeze(1)
    channel = 1 if values.shape[1] <= values.shape[-1] else values.ndim - 1
    has_channel = values.ndim > 2 and values.shape[channel] <= _MOST_CHANNELS
    dims = [dim for dim in range(1, values.ndim) if not (has_channel and dim == channel)]
    low, high = values.amin(dims), values.amax(dims)
    return (low, high) if has_channel else (low.unsqueeze(1), high.unsqueeze(1))


class Role(Enum):
    """What a tensor is for, as far as can be told."""

    INPUT = "input"
    TARGET = "target"
    LABEL = "label"
    MASK = "mask"
    LENGTH = "length"
    OTHER = "other"


def refuse_unknown(found: Iterable[Leaf], paths: Paths | None) -> None:
    """Raises InputError if one of the paths is not in the batch."""
    there = dict.fromkeys(_short(leaf.path) for leaf in found)
    for asked in _path_list(paths):
        if not any(_is_under(leaf.path, [asked]) for leaf in found):
            known = ", ".join(there) or "nothing"
            raise InputError(f"the batch has no tensor at {str(asked)!r}; it has {known}.")


def _path_list(paths: Paths | None) -> Sequence[Path]:
    return (paths,) if isinstance(paths, str | int) else paths or ()


def _short(path: str) -> str:
    return path.removeprefix(f"{ROOT}.").replace("*.", "").removesuffix(".*")


def _is_under(path: str, paths: Paths) -> bool:
    return any(f"{_short(path)}.".startswith(f"{asked}.") for asked in _path_list(paths))


def roles_of(
    found: Sequence[Leaf], inputs: Paths | None, targets: Paths | None, classes: int | None
) -> dict[str, Role]:
    """The role of each path.

    What the caller picked comes first, then names, as in {"input_ids": ..., "labels": ...}. Of a
    tuple the first field is the input and all others are targets. Integers among these are labels
    if there is one candidate; of several it is the one that fits `classes`, else the last.
    """
    roles = {leaf.path: _role(leaf, inputs, targets) for leaf in found}
    if targets is not None:
        return roles
    labels = [leaf for leaf in found if roles[leaf.path] is Role.LABEL and not _name(leaf.path)]
    if len({leaf.path for leaf in labels}) > 1:
        fitting = [
            leaf
            for leaf in labels
            if classes
            and leaf.values.numel()
            and int(leaf.values.min()) >= 0
            and int(leaf.values.max()) < classes
        ]
        likeliest = (fitting or labels)[-1].path
        roles |= {leaf.path: Role.OTHER for leaf in labels if leaf.path != likeliest}
    named = {path for path in roles if _LABEL.search(_name(path))}
    if named:
        # Among boxes, areas and image numbers, what is called labels are the labels.
        others = [path for path, role in roles.items() if role is Role.LABEL and path not in named]
        roles |= dict.fromkeys(others, Role.OTHER)
    return roles


def _role(leaf: Leaf, inputs: Paths | None, targets: Paths | None) -> Role:
    if targets is not None and _is_under(leaf.path, targets):
        return Role.LABEL if _is_whole(leaf.values) else Role.TARGET
    named = _named_role(leaf)
    if inputs is not None:
        return Role.INPUT if _is_under(leaf.path, inputs) else named or Role.OTHER
    # The number of the field in a batch that is a tuple; 0 in any other.
    field = leaf.path.split(".")[1:2]
    if named is None and targets is None and field and field[0].isdigit() and int(field[0]):
        return Role.LABEL if _is_whole(leaf.values) and not _is_binary(leaf.values) else Role.TARGET
    return named or Role.INPUT


def _named_role(leaf: Leaf) -> Role | None:
    name, values = _name(leaf.path), leaf.values
    if "mask" in name or is_additive_mask(values):
        # One with a class for each pixel is a segmentation.
        is_picture = values.ndim > 2 and _is_whole(values) and values.numel() > 0
        is_segmentation = is_picture and "att" not in name and bool(values.amax() > 1)
        return Role.LABEL if is_segmentation else Role.MASK
    if _LENGTH.search(name):
        return Role.LENGTH
    if _TARGET.search(name):
        return Role.LABEL if _is_whole(values) and _LABEL.search(name) else Role.TARGET
    if _BOOKKEEPING.search(name) and name not in ("input_ids", "token_ids", "ids"):
        return Role.OTHER
    return None


def _name(path: str) -> str:
    """The last word in the path; "" when there are only numbers."""
    words = [part for part in path.split(".")[1:] if part != "*" and not part.isdigit()]
    return words[-1].lower() if words else ""


def _is_whole(values: Tensor) -> bool:
    return not values.is_floating_point() and values.dtype is not torch.bool


def _is_binary(values: Tensor) -> bool:
    """Whether all values are 0 or 1, and there are several to a row: many labels."""
    return values.ndim > 1 and values.shape[1] > 1 and bool(((values == 0) | (values == 1)).all())


def is_additive_mask(values: Tensor) -> bool:
    """Whether it is added to attention scores: 0 where they count, -Inf or the like elsewhere."""
    if not values.is_floating_point() or values.ndim < 2 or not values.numel():
        return False
    lowest = values.amin()
    if not bool(lowest <= -1e4) or bool(values.amax() != 0):
        return False
    return bool(((values == 0) | (values == lowest)).all())


class PaddingMasks:
    """Rows of booleans that change at most once, as those of padding masks do.

    Whether True keeps or hides is not known. Sequences that fill the whole width are common, so
    of rows that are all True and rows that are all False the rarer kind is taken as hidden.
    """

    def __init__(self) -> None:
        self.is_padding = True
        self._has_edges = False
        self._counts = [0, 0]
        self._places = (array("q"), array("q"))

    def add(self, values: Tensor, places: Tensor) -> None:
        self.is_padding = self.is_padding and values.ndim == 2 and values.shape[1] > 1
        if not self.is_padding:
            return
        changes = (values[:, 1:] != values[:, :-1]).sum(1)
        self.is_padding = bool((changes <= 1).all())
        self._has_edges = self._has_edges or bool((changes == 1).any())
        for kind in (False, True):
            rows = (changes == 0) & (values[:, 0] == kind)
            self._counts[kind] += int(rows.sum())
            if len(self._places[kind]) < _MOST_PLACES:
                self._places[kind].extend(places[rows].tolist())

    @property
    def hidden(self) -> array[int]:
        """The places of rows that hide everything."""
        if not (self.is_padding and self._has_edges and all(self._counts)):
            return array("q")
        return self._places[self._counts[True] < self._counts[False]]

    @property
    def places(self) -> array[int]:
        """The places that `hidden` may still speak of."""
        return self._places[0] + self._places[1] if self.is_padding else array("q")
