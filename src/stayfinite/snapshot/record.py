"""One moment of training: the values of everything, and where they belong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from stayfinite.detect.parts import undisturbed
from stayfinite.errors import SnapshotError
from stayfinite.snapshot.cells import Cell, GradientsCell, ProtocolCell
from stayfinite.snapshot.census import PARTS, Census, Item
from stayfinite.snapshot.copies import Offload, size_of
from stayfinite.snapshot.finite import FiniteCheck, Named, is_finite, refuse_nonfinite
from stayfinite.snapshot.owners import add_gradients, add_modules
from stayfinite.snapshot.rng import global_cells
from stayfinite.snapshot.rooms import Memories, Rooms

IsVital = Callable[[Item], bool]
_SMALL = 1 << 22
"""Of up to so many bytes, everything is looked at before the first is written."""


class Snapshot:
    """A moment of training that can be put back in place, again and again.

    `Snapshot([model])` keeps parameters, buffers (persistent or not), plain attributes,
    gradients, train flags and random states, finite or not; `TrainingState.capture` keeps all.
    Restoring writes into the same tensors, so that whoever holds them sees the old values.
    """

    def __init__(self, modules: Iterable[nn.Module] | None = None, *, step: int = 0) -> None:
        self.step = step
        self._plan: _Plan | None = None
        self.is_whole = False
        self._contents: list[tuple[Cell, Any]] = []
        if modules is not None:
            self.write(_census_of(list(modules)))

    @torch.no_grad()
    def write(
        self,
        census: Census,
        *,
        contents: list[tuple[Cell, Any]] | None = None,
        parts: Collection[str] = PARTS,
        offload: Offload = "none",
        is_vital: IsVital | None = None,
        careful: bool = True,
    ) -> None:
        """Keep everything that the census found now; memory that fits is used again.

        `contents` is what is in its cells, where the caller knows. NonFiniteError names the
        first vital item that is not finite. If `careful`, or where it costs little, nothing is
        changed then. Otherwise values are looked at only as they are copied, and what was kept
        before is lost.
        """
        plan = self._plan
        if plan is None or not plan.is_for(census, parts, offload):
            plan = _Plan(census, parts, offload, is_vital, self._plan)
        is_checked = self.is_whole and (careful or plan.is_small)
        if is_checked:
            plan.refuse_all()
        else:
            plan.refuse_odd()
        if contents is None:
            contents = [(cell, cell.content()) for cell in census.cells if cell.part in parts]
        self.is_whole = False
        if is_checked:
            plan.rooms.fill_runs()
        else:
            plan.fill_runs_or_refuse()
        plan.rooms.fill_rest()
        self._plan, self._contents, self.is_whole = plan, contents, True

    def restore(self, *, parts: Collection[str] = PARTS) -> None:
        """Put everything back; the snapshot can be used again.

        NonFiniteError when a value in it that must be finite no longer is; nothing is changed
        then.
        """
        if self._plan is None or not self.is_whole:
            raise SnapshotError("nothing was captured in this snapshot, or not to the end.")
        self._plan.refuse_kept()
        contents = [pair for pair in self._contents if pair[0].part in parts]
        # What an object loads itself may replace tensors, so it comes before them.
        contents.sort(key=lambda pair: not isinstance(pair[0], ProtocolCell))
        for cell, content in contents:
            cell.put_back(content)
        items = enumerate(self._plan.items)
        self._plan.rooms.empty([number for number, item in items if item.part in parts])

    @property
    def nbytes(self) -> int:
        """Bytes of tensor memory that it holds."""
        gradients = [
            kept[1]
            for cell, content in self._contents
            if isinstance(cell, GradientsCell)
            for kept in content
            if kept is not None
        ]
        rooms = 0 if self._plan is None else self._plan.rooms.nbytes
        return rooms + sum(map(size_of, gradients))

    def memory_of(self, name: str) -> list[torch.Tensor]:
        """Where the value of the item with this name is kept."""
        names = [] if self._plan is None else [item.name for item in self._plan.items]
        if self._plan is None or name not in names:
            raise SnapshotError(f"{name} is not in this snapshot.")
        return self._plan.rooms.memories[names.index(name)]


class _Plan:
    """What to copy where: made once, and again when the census or a form is another one."""

    def __init__(
        self,
        census: Census,
        parts: Collection[str],
        offload: Offload,
        is_vital: IsVital | None,
        before: _Plan | None,
    ) -> None:
        self._key = census, tuple(parts), offload
        self.items = [item for item in census.items if item.part in parts]
        vital = [] if is_vital is None else list(map(is_vital, self.items))
        self._vital = [number for number, is_wanted in enumerate(vital) if is_wanted]
        old = {} if before is None else before.memories_by_name()
        known = [old.get(item.name, []) for item in self.items]
        tensors = [item.tensor for item in self.items]
        self.rooms = Rooms(tensors, offload=offload, known=known, checked=self._vital)
        self.is_small = self.rooms.nbytes <= _SMALL
        self._all = FiniteCheck(self._named(self._vital))
        self._odd = FiniteCheck(self._named(self.rooms.not_in_runs))

    def is_for(self, census: Census, parts: Collection[str], offload: Offload) -> bool:
        is_known = self._key[0] is census and self._key[1:] == (tuple(parts), offload)
        return is_known and self.rooms.fit()

    def memories_by_name(self) -> dict[str, Memories]:
        names = [item.name for item in self.items]
        return dict(zip(names, self.rooms.memories, strict=True))

    def refuse_all(self) -> None:
        """NonFiniteError if a vital item is not finite now."""
        self._all.refuse()

    def refuse_odd(self) -> None:
        """The same, but for those that are looked at as they are copied."""
        self._odd.refuse()

    @undisturbed
    def fill_runs_or_refuse(self) -> None:
        """Copy run by run; NonFiniteError as soon as one is not finite."""
        for run in self.rooms.runs:
            run.fill(self.rooms.tensors)
            if not is_finite(run.memory):
                self.refuse_all()

    def refuse_kept(self) -> None:
        """NonFiniteError if a vital value is no longer finite in the memory that keeps it."""
        refuse_nonfinite(
            [(self.items[n].name, memory) for n in self._vital for memory in self.rooms.memories[n]]
        )

    def _named(self, numbers: Iterable[int]) -> Named:
        return [(self.items[number].name, self.items[number].tensor) for number in numbers]


def _census_of(roots: list[nn.Module]) -> Census:
    census = Census()
    add_modules(census, roots)
    add_gradients(census, ((name, p) for r in roots for name, p in r.named_parameters()))
    census.cells += global_cells()
    return census
