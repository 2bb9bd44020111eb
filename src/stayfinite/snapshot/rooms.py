"""Memory of our own that is filled again and again with the values of the same tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stayfinite.snapshot.copies import (
    Group,
    Offload,
    copy_all,
    copy_groups,
    grouped,
    is_simple,
    like,
    memories,
    put_back,
    size_of,
)

Memories = list[Tensor]
_CPU = torch.device("cpu")


class Rooms:
    """Room for the value of each tensor; while these keep their form, filling is a call or two.

    `known` is memory from before, for each tensor; it is used where it fits.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        offload: Offload = "none",
        known: Sequence[Memories] | None = None,
    ) -> None:
        self._tensors, self._offload = list(tensors), offload
        self.memories = list(known) if known is not None else [[] for _ in self._tensors]
        self._arrange()

    def _arrange(self) -> None:
        """Make room for what does not fit, and see what can be copied together."""
        now = [memories(tensor) for tensor in self._tensors]
        places = zip(self.memories, now, strict=True)
        self.memories = [self._fitting(room, values) for room, values in places]
        together = [number for number, tensor in enumerate(self._tensors) if is_simple(tensor)]
        # The memory of the others must be looked for each time.
        self._others = sorted(set(range(len(now))) - set(together))
        self._together = [self._tensors[number] for number in together]
        self._groups: list[Group] = grouped((self.memories[n][0], now[n][0]) for n in together)
        self._forms = self._forms_now()

    def _forms_now(self) -> list[object]:
        return [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._together]

    def _fitting(self, room: Memories, values: Memories) -> Memories:
        if len(room) == len(values) and all(map(self._fits, room, values)):
            return room
        return [like(value, self._offload) for value in values]

    def _fits(self, memory: Tensor, value: Tensor) -> bool:
        return (
            memory.shape == value.shape
            and memory.dtype is value.dtype
            and memory.layout is value.layout
            and memory.device == (value.device if self._offload == "none" else _CPU)
        )

    def fill(self) -> None:
        """Copy the values of now."""
        if self._forms_now() != self._forms:
            self._arrange()
        for number in self._others:
            now = memories(self._tensors[number])
            self.memories[number] = self._fitting(self.memories[number], now)
            copy_all(zip(self.memories[number], now, strict=True))
        copy_groups(self._groups, non_blocking=self._offload == "pinned")

    def empty(self, numbers: Sequence[int] | None = None) -> None:
        """Put the values back into the tensors, or into some of them."""
        which = range(len(self._tensors)) if numbers is None else numbers
        put_back([self._tensors[n] for n in which], [self.memories[n] for n in which])

    @property
    def nbytes(self) -> int:
        return sum(size_of(memory) for room in self.memories for memory in room)
