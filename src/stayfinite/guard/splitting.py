"""Parts of a batch: some of its rows, some of its values, another precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.detect.walk import children
from stayfinite.snapshot.batches import rebuilt

_LEAVES = (Tensor, np.ndarray)


class Split:
    """A nested batch whose tensors and arrays all have the samples in their first dimension.

    Lists of as many other things, such as captions, go with them; so do lists of samples, as
    detectors take them. `rows` is 0 where that is not so, and `why_not` says why.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        lists = _sample_lists(batch)
        leaves = [] if lists else list(_leaves(batch))
        sizes = {len(each) for each in lists} or {leaf.shape[0] for leaf in leaves if leaf.ndim}
        self._by_lists = bool(lists)
        self.rows = sizes.pop() if len(sizes) == 1 else 0
        self.why_not: str | None = None
        if sizes:
            self.why_not = "its tensors do not agree on how many samples there are"
        elif not self.rows:
            self.why_not = "there is no tensor in it"

    @property
    def values(self) -> int:
        """How many floating-point numbers one row has."""
        if self._by_lists or not self.rows:
            return 0
        return sum(leaf[0].numel() for leaf in self._floats(self._batch))

    def only(self, rows: Sequence[int]) -> Any:
        """The batch with these rows, copied, in this order."""
        if self._by_lists:
            return rebuilt(type(self._batch)(_picked(b, rows) for b in self._batch), _copied)
        return self._taken(self._batch, list(rows))

    def with_values(self, batch: Any, low: int, high: int, donor: int) -> Any:
        """`batch`, of copies, where these values of the first row are those of the donor."""
        given = [leaf[donor].reshape(-1) for leaf in self._floats(self._batch)]
        offset = 0
        for leaf, other in zip(self._floats(batch), given, strict=True):
            start, end = max(low - offset, 0), min(high - offset, other.numel())
            if start < end:
                leaf[0].view(-1)[start:end] = other[start:end]
            offset += other.numel()
        return batch

    def _floats(self, batch: Any) -> list[Tensor]:
        found = [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        return [leaf for leaf in found if leaf.is_floating_point()]

    def _taken(self, value: Any, rows: list[int]) -> Any:
        if isinstance(value, list) and self._goes_along(value):
            return _picked(value, rows)
        if isinstance(value, list):
            return type(value)(self._taken(item, rows) for item in value)
        return rebuilt(_with_lists(value, self, rows), lambda leaf: _rows_of(leaf, rows))

    def _goes_along(self, value: Sequence[Any]) -> bool:
        return len(value) == self.rows and not any(_leaves(item) for item in value)


def _with_lists(value: Any, split: Split, rows: list[int]) -> Any:
    """The value with the lists directly in it cut; what is deeper stays."""
    if not isinstance(value, dict):
        return value
    return {
        key: _picked(item, rows)
        if isinstance(item, (list, tuple)) and split._goes_along(item)
        else item
        for key, item in value.items()
    }


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf.copy()


def _rows_of(leaf: Any, rows: list[int]) -> Any:
    if not leaf.ndim:
        return _copied(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf[rows]
    taken = leaf.detach()[torch.tensor(rows, device=leaf.device)].contiguous()
    return taken.requires_grad_(leaf.requires_grad)


def _picked(value: Any, rows: Sequence[int]) -> Any:
    return type(value)(value[row] for row in rows)


def _sample_lists(batch: Any) -> list[Any]:
    """The lists of a batch that is nothing but lists of samples; empty for others."""
    if not isinstance(batch, (list, tuple)) or hasattr(batch, "_fields") or not batch:
        return []
    is_so = all(isinstance(item, list) and len(item) > 1 for item in batch)
    return list(batch) if is_so and _leaves(batch) else []


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, _LEAVES):
        return [value]
    return [leaf for _, item in children(value) for leaf in _leaves(item)]


def in_float64(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    return rebuilt(batch, lambda leaf: _raised(leaf, torch.float64))


def in_float32(batch: Any) -> Any:
    """The batch with its 16-bit tensors in float32."""
    return rebuilt(batch, lambda leaf: _raised(leaf, torch.float32) if leaf.itemsize == 2 else leaf)


def _raised(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
    return leaf
