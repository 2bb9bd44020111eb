"""The beginning of a step, noted cheaply enough to be noted every time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stayfinite.snapshot.cells import Cell, ProtocolCell
from stayfinite.snapshot.census import PARTS, Census
from stayfinite.snapshot.copies import copy_all, like, memories, put_back

MARKED = frozenset(PARTS) - {"parameters", "optimizer", "ema", "loader"}
"""A vetoed step has not touched the rest, and a skipped batch stays delivered."""


class Mark:
    """Everything but parameters, optimizer state and averages, as a step began."""

    def __init__(self, census: Census) -> None:
        items = [item for item in census.items if item.part in MARKED]
        self._tensors: list[tuple[Tensor, list[Tensor]]] = []
        for item in items:
            now = memories(item.tensor)
            self._tensors.append((item.tensor, [like(tensor) for tensor in now]))
            copy_all(zip(self._tensors[-1][1], now, strict=True))
        self._contents: list[tuple[Cell, Any]] = [
            (cell, cell.content()) for cell in census.cells if cell.part in MARKED
        ]

    def restore(self) -> None:
        contents = sorted(self._contents, key=lambda pair: not isinstance(pair[0], ProtocolCell))
        for cell, content in contents:
            cell.put_back(content)
        put_back([tensor for tensor, _ in self._tensors], [kept for _, kept in self._tensors])
