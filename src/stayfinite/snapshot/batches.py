"""The batches of the last steps, kept so that these can be run again after going back."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.nested import children, map_leaves
from stayfinite.snapshot.copies import Contents
from stayfinite.snapshot.rng import global_cells

MAX_BATCHES = 1024
MAX_BYTES = 1 << 28
_LEAVES = (Tensor, np.ndarray)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """One batch, as it was when its step began."""

    step: int
    nbytes: int
    """Bytes of tensors and arrays in it."""
    _value: Any
    _is_copied: bool
    _versions: tuple[tuple[Tensor, int], ...]
    _random: Contents

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into its tensors since."""
        return all(tensor._version == version for tensor, version in self._versions)

    def value(self) -> Any:
        """The batch, in containers of its own: whoever takes something out does not harm it."""
        return _copied(self._value, with_tensors=self._is_copied)

    def restore_random(self) -> None:
        """Global random states as when its step began: what its loader drew is drawn."""
        for cell, content in self._random:
            cell.put_back(content)


class RecentBatches:
    """The batches since the snapshots that one may go back to; the oldest give way.

    For loops whose loader cannot tell its position. Tensors are kept by reference: no memory
    but the batches themselves, at most `MAX_BATCHES` and `MAX_BYTES` of them. Once a step has
    written into a batch, later ones are copied, as NumPy arrays always are. Containers are
    mappings, lists, tuples and dataclasses; other objects are not looked into.

    >>> import torch
    >>> recent = RecentBatches()
    >>> for step in range(4):
    ...     recent.keep(torch.full((2,), float(step)), step=step)
    >>> recent.forget(before=1)
    >>> [kept.value().tolist() for kept in recent.take_back(2) or []]
    [[2.0, 2.0], [3.0, 3.0]]
    >>> len(recent)
    1
    """

    def __init__(self) -> None:
        self._are_written = False
        self._kept: deque[KeptBatch] = deque()
        self._lost: float = -math.inf
        self.nbytes = 0
        """Bytes of tensors and arrays that are kept."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, batch: Any, *, step: int) -> None:
        """Note a batch just before its step uses it; with accumulation, several for one step.

        `step` is what the snapshots count: the batches of a snapshot's own step come after it.
        """
        if self._kept and not self._kept[-1].is_intact:
            self._are_written = True
        # Nobody counts what is written into inference tensors.
        is_copied = self._are_written or any(map(torch.is_inference, _tensors(batch)))
        value = _copied(batch, with_tensors=is_copied)
        # torch counts the writes to a tensor; there is no public name for the count.
        kept = KeptBatch(
            step=step,
            nbytes=sum(leaf.nbytes for leaf in _leaves(value)),
            _value=value,
            _is_copied=is_copied,
            _versions=() if is_copied else tuple((t, t._version) for t in _tensors(value)),
            _random=[(cell, cell.content()) for cell in global_cells()],
        )
        self._kept.append(kept)
        self.nbytes += kept.nbytes
        while len(self._kept) > MAX_BATCHES or self.nbytes > MAX_BYTES:
            self._lost = self._drop_oldest().step

    def since(self, step: int) -> list[KeptBatch] | None:
        """The batches from this step on, oldest first; None if they are not all there any more.

        They are not if they were too many or too large, or if a step has written into one.
        """
        found = [kept for kept in self._kept if kept.step >= step]
        is_complete = step > self._lost and all(kept.is_intact for kept in found)
        return found if is_complete else None

    def take_back(self, step: int) -> list[KeptBatch] | None:
        """The same, and forget them: who runs them again keeps them again.

        Also for the batches of a step that was left out.
        """
        found = self.since(step)
        while self._kept and self._kept[-1].step >= step:
            self.nbytes -= self._kept.pop().nbytes
        return found

    def forget(self, *, before: int) -> None:
        """Give up the batches of earlier steps: no snapshot is so old any more."""
        while self._kept and self._kept[0].step < before:
            self._drop_oldest()
        self._lost = max(self._lost, before - 1)

    def _drop_oldest(self) -> KeptBatch:
        kept = self._kept.popleft()
        self.nbytes -= kept.nbytes
        return kept


def _copied(batch: Any, *, with_tensors: bool) -> Any:
    """The batch in new containers: arrays are copied, tensors only where that is asked for."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        return leaf.detach().clone() if with_tensors else leaf

    return rebuilt(batch, copy)


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value in new containers, with each tensor and array changed."""
    return map_leaves(value, change, kinds=_LEAVES)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, _LEAVES):
        yield value
    else:
        for _, item in children(value):
            yield from _leaves(item)
