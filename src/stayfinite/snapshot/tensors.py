"""Buffers and other tensors that are not parameters, kept in every step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stayfinite.detect.parts import undisturbed
from stayfinite.snapshot.copies import copy_all, like, memories, put_back, size_of
from stayfinite.snapshot.rooms import Memories, Rooms

SMALL = 1 << 16
"""Tensors of up to so many bytes are copied in each step without asking."""
_LEARNING = 3
_LOOK_AGAIN = 64


class TensorWatch:
    """Copies small tensors in each step, and large ones only when they have changed."""

    def __init__(self, tensors: Iterable[Tensor], before: TensorWatch | None = None) -> None:
        unique = {id(tensor): tensor for tensor in tensors}.values()
        values = [tensor for tensor in unique if memories(tensor)]
        known = {id(large.tensor): large for large in before._large} if before else {}
        self._small = [tensor for tensor in values if size_of(tensor) <= SMALL]
        self._large: list[_LargeTensor] = [
            known.get(id(tensor)) or _LargeTensor(tensor, is_late=before is not None)
            for tensor in values
            if size_of(tensor) > SMALL
        ]
        self._pool: list[Rooms] = []

    def keep(self) -> KeptTensors | None:
        """Their values now; None when there is nothing to keep."""
        return self._keep() if self._small or self._large else None

    @undisturbed
    def _keep(self) -> KeptTensors:
        rooms = self._pool.pop() if self._pool else Rooms(self._small)
        rooms.fill()
        return KeptTensors(rooms, self._pool, [large.keep() for large in self._large])


class KeptTensors:
    """Values of tensors at one moment; the memory goes back to its pool in the end."""

    def __init__(self, rooms: Rooms, pool: list[Rooms], large: list[_KeptLarge]) -> None:
        self._rooms, self._pool, self._large = rooms, pool, large

    def __del__(self) -> None:
        self._pool.append(self._rooms)

    def restore(self) -> None:
        self._rooms.empty()
        changed = [(t, kept) for t, kept, version in self._large if kept and version != t._version]
        put_back([tensor for tensor, _ in changed], [kept for _, kept in changed])


_KeptLarge = tuple[Tensor, Memories, int]
"""A tensor, its value, and the version that needs no restoring."""
_ALWAYS = -1


class _LargeTensor:
    """A tensor that is worth a look before it is copied: most large buffers never change.

    torch counts writes to a tensor, but not those through `.data` or by batch norm. So the first
    steps, and then some, compare bytes: who was caught once is copied each time. One that is
    new since the last step has replaced another, and will be replaced rather than written to:
    it is copied only if it is still there a step later.
    """

    def __init__(self, tensor: Tensor, *, is_late: bool) -> None:
        self.tensor = tensor
        self._is_late = is_late
        self._kept: Memories = []
        self._version = -1
        self._looks = 0
        self._writes_silently = False

    def keep(self) -> _KeptLarge:
        version = self.tensor._version
        if self._is_late:
            self._is_late = False
            return self.tensor, [], version
        self._looks += 1
        if version == self._version and not self._writes_silently:
            if self._looks > _LEARNING and self._looks % _LOOK_AGAIN:
                return self.tensor, self._kept, version
            if self._is_same():
                return self.tensor, self._kept, _ALWAYS
            self._writes_silently = True
        # Older marks may hold the old value.
        now = memories(self.tensor)
        self._kept = [like(memory) for memory in now]
        copy_all(zip(self._kept, now, strict=True))
        self._version = version
        return self.tensor, self._kept, _ALWAYS

    def _is_same(self) -> bool:
        return all(map(_same_bytes, memories(self.tensor), self._kept))  # host sync


def _same_bytes(one: Tensor, two: Tensor) -> bool:
    if one.is_contiguous() and two.is_contiguous():
        one, two = one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)
    return torch.equal(one, two)
