"""The batches of the last steps, kept so that these can be run again after going back."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.errors import ConfigError
from stayfinite.nested import children
from stayfinite.snapshot.copies import Cell
from stayfinite.snapshot.rng import global_cells


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """One batch, as it was when its step began."""

    step: int
    nbytes: int
    """Bytes of tensors and arrays in it."""
    _value: Any
    _is_copied: bool
    _versions: tuple[tuple[Tensor, int], ...]
    _random: tuple[tuple[Cell, Any], ...]

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into its tensors since."""
        return all(tensor._version == version for tensor, version in self._versions)

    def value(self) -> Any:
        """The batch, in containers of its own: whoever takes something out does not harm it."""
        return rebuilt(self._value, _cloned if self._is_copied else _safe)

    def restore_random(self) -> None:
        """Global random states as when its step began: what its loader drew is drawn."""
        for cell, content in self._random:
            cell.put_back(content)


class RecentBatches:
    """The batches since the snapshots that one may go back to; the oldest give way.

    For loops whose loader cannot tell its position. Tensors are kept by reference: no memory
    but the batches themselves, at most `max_batches` and `max_bytes` of them. Once a step has
    written into a batch, later ones are copied, as NumPy arrays always are; with `copies` all
    are. Containers are mappings, lists, tuples and dataclasses; other objects are not looked
    into.

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

    def __init__(
        self, *, max_batches: int = 1024, max_bytes: int = 1 << 28, copies: bool = False
    ) -> None:
        for name, limit in (("max_batches", max_batches), ("max_bytes", max_bytes)):
            if limit < 1:
                raise ConfigError(f"{name} is {limit}; it must be at least 1.")
        self._max_batches, self._max_bytes, self._copies = max_batches, max_bytes, copies
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
            self._copies = True
        kept = _kept(batch, step, is_copied=self._copies)
        self._kept.append(kept)
        self.nbytes += kept.nbytes
        while len(self._kept) > self._max_batches or self.nbytes > self._max_bytes:
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


def _kept(batch: Any, step: int, *, is_copied: bool) -> KeptBatch:
    # Nobody counts what is written into inference tensors.
    is_copied = is_copied or any(map(torch.is_inference, _tensors(batch)))
    value = rebuilt(batch, _cloned if is_copied else _safe)
    return KeptBatch(
        step=step,
        nbytes=sum(leaf.nbytes for leaf in _leaves(value)),
        _value=value,
        _is_copied=is_copied,
        _versions=() if is_copied else tuple((t, t._version) for t in _tensors(value)),
        _random=tuple((cell, cell.content()) for cell in global_cells()),
    )


def _cloned(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else _safe(leaf)


def _safe(leaf: Any) -> Any:
    """A leaf that later writes do not change, or at least not unseen."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
    else:
        for _, item in children(value):
            yield from _leaves(item)


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value in new containers, with each leaf changed."""
    if isinstance(value, (Tensor, np.ndarray)):
        return change(value)
    if isinstance(value, tuple):
        items = [rebuilt(item, change) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, list):
        return type(value)(rebuilt(item, change) for item in value)
    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        mapping.update({key: rebuilt(item, change) for key, item in value.items()})
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            object.__setattr__(record, field.name, rebuilt(item, change))
        return record
    return value
