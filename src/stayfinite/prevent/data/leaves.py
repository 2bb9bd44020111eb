"""The tensors of a batch, with the sample that each of their rows belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.detect.parts import is_readable, plain_parts
from stayfinite.detect.walk import children

ROOT = "batch"
_REDUCIBLE = {torch.float32, torch.float64, torch.bool, torch.uint8}
_REDUCIBLE |= {torch.int8, torch.int16, torch.int32, torch.int64}
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}


@dataclass(frozen=True, eq=False)
class Leaf:
    """One tensor of a batch, on the host: dense, real, of a dtype that torch can reduce.

    Its first dimension are rows. `owners` has the sample of each row; None means that the rows are
    the samples, in order, or if `is_aligned` is false that it is not known. `empty` are samples
    that are there without any row.
    """

    path: str
    values: Tensor
    owners: Tensor | None = None
    is_aligned: bool = True
    empty: tuple[int, ...] = ()
    is_sparse: bool = False

    @property
    def sample_of(self) -> Tensor:
        """The sample of each row; where it is not known, the number of the row."""
        return torch.arange(len(self.values)) if self.owners is None else self.owners


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
        yield from _leaves_of(tensor, path, size)
    elif id(value) not in above:  # else it holds itself
        inside = (*above, id(value))
        if _has_one_per_sample(value, path, size):
            yield from _merged(value, path, inside)
        else:
            for key, item in children(value):
                yield from _walk(item, f"{path}.{key}", size, inside)


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return _from_array(np.asarray(value))
    if _is_list(value) and value and all(isinstance(item, int | float) for item in value):
        return torch.tensor(value, dtype=_dtype_of(value))
    return torch.tensor(value, dtype=_dtype_of([value])) if isinstance(value, int | float) else None


def _from_array(array: np.ndarray[Any, Any]) -> Tensor:
    kind = array.dtype.kind
    if array.dtype.itemsize > 8 and kind == "f":  # long double
        array = array.astype(np.float64)
    if array.dtype.itemsize > 16:
        array = array.astype(np.complex128)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # torch takes neither read-only memory nor negative strides.
    is_usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if is_usable else array.copy())


def _dtype_of(values: Sequence[Any]) -> torch.dtype:
    if all(isinstance(value, bool) for value in values):
        return torch.bool
    is_whole = all(isinstance(value, int) and abs(value) < 2**63 for value in values)
    return torch.int64 if is_whole else torch.float64


def _has_one_per_sample(value: Any, path: str, size: int | None) -> bool:
    """Whether a list has an item for each sample, and not some fields for all of them.

    Two crops of two images are two fields: each has a row for each sample.
    """
    if not _is_list(value) or len(value) != size:
        return False
    kinds = {isinstance(item, Tensor | np.ndarray) for item in value}
    if len(kinds) > 1 or (kinds == {False} and not all(map(_has_children, value))):
        return False
    if path == ROOT and len({_structure(item) for item in value}) > 1:
        return False
    if path != ROOT and kinds == {True} and _are_images_of_many_sizes(value):
        return True
    return not all(_rows(item) == size for item in value)


def _are_images_of_many_sizes(tensors: Sequence[Any]) -> bool:
    """Three such images have three channels, and are not three fields."""
    if any(isinstance(each, Tensor) and each.is_nested for each in tensors):
        return False
    return len({each.shape for each in tensors}) > 1 and all(each.ndim > 2 for each in tensors)


def _has_children(value: Any) -> bool:
    return any(True for _ in children(value))


def _structure(item: Any) -> tuple[Any, ...]:
    return type(item), *(str(key) for key, _ in children(item))


def _rows(item: Any) -> int | None:
    """The rows of a tensor, or of the first one inside; None for none."""
    if isinstance(item, Tensor | np.ndarray):
        return size_of(item)
    return next((_rows(child) for _, child in children(item) if _rows(child) is not None), None)


def _merged(samples: Any, path: str, above: tuple[int, ...]) -> Iterator[Leaf]:
    """The leaves of all samples, those of one path together where their shapes allow it."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for number, sample in enumerate(samples):
        for leaf in _walk_sample(sample, f"{path}.*", above):
            found.setdefault(leaf.path, []).append((number, leaf.values))
    for name, parts in found.items():
        yield from _together(name, parts)


def _walk_sample(sample: Any, path: str, above: tuple[int, ...]) -> Iterator[Leaf]:
    tensor = _as_tensor(sample)
    if tensor is not None:
        yield from (Leaf(path, part) for part in _readable(tensor))
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
            yield Leaf(path, torch.cat(rows), owners, empty=empty)
            return
    for number, part in rest:
        yield Leaf(path, part.unsqueeze(0), torch.tensor([number]))
    if empty:
        yield Leaf(path, torch.zeros(0), torch.zeros(0, dtype=torch.int64), empty=empty)


def _leaves_of(tensor: Tensor, path: str, size: int | None) -> Iterator[Leaf]:
    if tensor.is_nested:
        yield from _merged(tensor.unbind(), path, ())
    elif tensor.layout in _SPARSE and not tensor.is_meta:
        yield from _stored_values(tensor, path)
    else:
        for part in _readable(tensor):
            is_whole = part.shape[:1] == tensor.shape[:1]
            yield Leaf(
                path, part if part.ndim else part.unsqueeze(0), None, _fits(part, size) and is_whole
            )


def _fits(tensor: Tensor, size: int | None) -> bool:
    return tensor.ndim > 0 and (size is None or len(tensor) == size)


def _stored_values(tensor: Tensor, path: str) -> Iterator[Leaf]:
    """What a sparse tensor holds, each value a row of its sample."""
    if tensor.layout is not torch.sparse_coo and tensor.ndim != 2:
        yield from (Leaf(path, part, None, False, is_sparse=True) for part in _readable(tensor))
        return
    listed = tensor.to_sparse_coo()
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
        yield part if part.dtype in _REDUCIBLE else part.to(_wider(part.dtype))


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else torch.int64
