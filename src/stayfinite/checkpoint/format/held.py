"""A tensor as a checkpoint holds it: with its values, or only with what is known of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stayfinite.checkpoint.format.digests import digest
from stayfinite.checkpoint.format.layout import bytes_of
from stayfinite.checkpoint.format.tally import Tally, tally


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """A leaf in the place of a tensor; `tensor` is None when the file was only looked through.

    `is_private`: its memory belongs to this file's entry alone, and may be written to.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tally: Tally
    tensor: Tensor | None = None
    digest: bytes | None = None
    is_array: bool = False
    is_private: bool = False

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def hold(key: str, tensor: Tensor) -> Held:
    """The tensor as a leaf, with its values."""
    return Held(
        key=key,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        tally=tally(tensor),
        tensor=tensor,
    )


def is_same(one: Held, other: Held) -> bool:
    """Whether two tensors are the same to the byte; both must have values or digests."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return _known_digest(one) == _known_digest(other)


def _known_digest(held: Held) -> bytes | None:
    if held.digest is None and held.tensor is not None:
        return digest(bytes_of(held.tensor).numpy())
    return held.digest


def hold_all(tree: Any, key: str) -> Any:
    """The same nested dicts, lists and tuples, with a leaf for each tensor."""
    if isinstance(tree, Tensor):
        return hold(key, tree)
    if isinstance(tree, dict) and not isinstance(tree, Counter):
        return {name: hold_all(item, f"{key}.{name}") for name, item in tree.items()}
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        return type(tree)(hold_all(item, f"{key}.{place}") for place, item in enumerate(tree))
    return tree


def mapped(tree: Any, change: Callable[[Held], Any]) -> Any:
    """The same tree with each leaf changed; other values as they are."""
    if isinstance(tree, Held):
        return change(tree)
    if isinstance(tree, dict):
        return type(tree)({key: mapped(item, change) for key, item in tree.items()})
    if type(tree) in (list, tuple, set):
        return type(tree)(mapped(item, change) for item in tree)
    return tree


def leaves(tree: Any) -> Iterator[Held]:
    """All tensors of a tree."""
    if isinstance(tree, Held):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)


def with_tensors(tree: Any) -> Any:
    """The tree with true tensors and arrays in the place of leaves; all must have been kept."""
    return mapped(tree, _value)


def _value(held: Held) -> Any:
    assert held.tensor is not None, held.key
    return held.tensor.numpy() if held.is_array else held.tensor
