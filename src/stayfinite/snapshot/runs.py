"""Memory of many tensors side by side, filled and looked at run by run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

RUN = 1 << 19
"""Elements that are copied and then looked at, while the cache still holds them."""
_LINE = 16
"""Elements; each memory begins at a multiple of it."""

Part = tuple[int, Tensor, slice | None]
"""The number of a tensor, the memory of its value, and which elements; None for all of them."""


def side_by_side(values: Sequence[Tensor]) -> list[Tensor]:
    """New memory on the host for values like these, of one dtype; between them there are zeros."""
    lengths = [-(-value.numel() // _LINE) * _LINE for value in values]
    # Zeros that nobody has touched take no time.
    whole = torch.zeros(sum(lengths), dtype=values[0].dtype, device="cpu")
    parts = zip(whole.split(lengths), values, strict=True)
    return [part[: value.numel()].view(value.shape) for part, value in parts]


class Run:
    """Neighbours in memory that hold the values of some tensors, or of a part of one."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._sources = [(number, part) for number, _, part in parts]
        self._targets = [to if part is None else to.view(-1)[part] for _, to, part in parts]
        first, last = self._targets[0], self._targets[-1]
        length = last.storage_offset() + last.numel() - first.storage_offset()
        self.memory = first.as_strided((length,), (1,))
        """All of it in one piece, with the zeros in between."""

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values that these tensors have now."""
        sources = [
            tensors[number] if part is None else tensors[number].reshape(-1)[part]
            for number, part in self._sources
        ]
        torch._foreach_copy_(self._targets, sources)


def runs_of(memories: Iterable[tuple[int, Tensor]]) -> list[Run]:
    """Runs over the memory of numbered tensors, none much longer than `RUN` elements."""
    runs: list[list[Part]] = []
    end, room = None, 0
    for number, memory in sorted(memories, key=lambda pair: _place(pair[1])):
        storage, start = _place(memory)
        for part in _parts(memory.numel()):
            length = memory.numel() if part is None else part.stop - part.start
            if end is None or not _is_near(end, (storage, start)) or length > room:
                runs.append([])
                room = RUN
            runs[-1].append((number, memory, part))
            start, room = start + length, room - length
            end = storage, start
    return [Run(parts) for parts in runs]


def _place(memory: Tensor) -> tuple[int, int]:
    return memory.untyped_storage().data_ptr(), int(memory.storage_offset())


def _is_near(end: tuple[int, int], start: tuple[int, int]) -> bool:
    return end[0] == start[0] and start[1] - end[1] < _LINE


def _parts(length: int) -> Iterator[slice | None]:
    if length <= RUN:
        yield None
    else:
        for start in range(0, length, RUN):
            yield slice(start, min(start + RUN, length))
