"""One moment of training: the values of everything, and where they belong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from stayfinite.detect.reports import bad_reports
from stayfinite.detect.scan import all_finite
from stayfinite.errors import NonFiniteError
from stayfinite.snapshot.cells import Cell, GradientsCell, ProtocolCell
from stayfinite.snapshot.census import PARTS, Census, Item
from stayfinite.snapshot.copies import (
    Offload,
    copy_groups,
    fits,
    grouped,
    joined,
    like,
    memories,
    put_back,
    size_of,
)
from stayfinite.snapshot.owners import add_gradients, add_modules
from stayfinite.snapshot.rng import global_cells

_Memories = list[torch.Tensor]
IsVital = Callable[[Item], bool]


class Snapshot:
    """A moment of training that can be put back in place, again and again.

    `Snapshot([model])` keeps parameters, buffers (persistent or not), plain attributes,
    gradients, train flags and random states, finite or not; `TrainingState.capture` keeps all.
    Restoring writes into the same tensors, so that whoever holds them sees the old values.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), *, step: int = 0) -> None:
        self.step = step
        self._vital: list[tuple[Item, _Memories]] = []
        self._tensors: list[tuple[Item, _Memories]] = []
        self._contents: list[tuple[Cell, Any]] = []
        roots = list(modules)
        if roots:
            self.write(_census_of(roots))

    @torch.no_grad()
    def write(
        self,
        census: Census,
        *,
        parts: Collection[str] = PARTS,
        offload: Offload = "none",
        is_vital: IsVital | None = None,
    ) -> None:
        """Keep everything that the census found now; memory that fits is used again.

        NonFiniteError names the first vital item that is not finite; nothing is changed then.
        """
        items = [item for item in census.items if item.part in parts]
        vital = [item for item in items if is_vital is not None and is_vital(item)]
        refuse_nonfinite([(item.name, item.tensor) for item in vital])
        now = [memories(item.tensor) for item in items]
        rooms = self._rooms(items, now, offload)
        contents = [(cell, cell.content()) for cell in census.cells if cell.part in parts]
        self._tensors, self._vital, self._contents = [], [], []  # whatever happens while copying
        pairs = zip(chain.from_iterable(rooms), chain.from_iterable(now), strict=True)
        copy_groups(grouped(pairs), non_blocking=offload == "pinned")
        self._tensors, self._contents = list(zip(items, rooms, strict=True)), contents
        names = {item.name for item in vital}
        self._vital = [(item, kept) for item, kept in self._tensors if item.name in names]

    def _rooms(self, items: list[Item], now: list[_Memories], offload: Offload) -> list[_Memories]:
        """Memory for each value, that of the last one where it fits."""
        old = {item.name: kept for item, kept in self._tensors}
        rooms = []
        for item, tensors in zip(items, now, strict=True):
            known = old.get(item.name, [])
            is_known = len(known) == len(tensors)
            fitting = is_known and all(
                fits(a, b, offload) for a, b in zip(known, tensors, strict=True)
            )
            rooms.append(known if fitting else [like(tensor, offload) for tensor in tensors])
        return rooms

    def restore(self, *, parts: Collection[str] = PARTS) -> None:
        """Put everything back; the snapshot can be used again.

        NonFiniteError when a value in it that must be finite no longer is; nothing is changed
        then.
        """
        refuse_nonfinite([(item.name, t) for item, kept in self._vital for t in kept])
        contents = [pair for pair in self._contents if pair[0].part in parts]
        # What an object loads itself may replace tensors, so it comes before them.
        contents.sort(key=lambda pair: not isinstance(pair[0], ProtocolCell))
        for cell, content in contents:
            cell.put_back(content)
        tensors = [(item.tensor, kept) for item, kept in self._tensors if item.part in parts]
        put_back([tensor for tensor, _ in tensors], [kept for _, kept in tensors])

    @property
    def nbytes(self) -> int:
        """Bytes of tensor memory that it holds."""
        tensors = [memory for _, kept in self._tensors for memory in kept]
        for cell, content in self._contents:
            if isinstance(cell, GradientsCell):
                tensors += [kept[1] for kept in content if kept is not None]
        return sum(map(size_of, tensors))


def refuse_nonfinite(named: list[tuple[str, torch.Tensor]]) -> None:
    """NonFiniteError about the first tensor that is not finite."""
    if all_finite(joined(tensor for _, tensor in named)):
        return
    reports = bad_reports(named, described=1)
    names = ", ".join(report.location for report in reports[:5])
    raise NonFiniteError(
        f"a snapshot must be finite, but {names} is not; restore an older one.",
        report=reports[0],
    )


def _census_of(roots: list[nn.Module]) -> Census:
    census = Census()
    add_modules(census, roots)
    add_gradients(census, ((name, p) for r in roots for name, p in r.named_parameters()))
    census.cells += global_cells()
    return census
