"""TrainingState: all that one training job has, kept and put back in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stayfinite.detect.scan import all_finite
from stayfinite.snapshot.census import PARTS, Item
from stayfinite.snapshot.copies import Offload
from stayfinite.snapshot.mark import Mark, Marker
from stayfinite.snapshot.members import gathered
from stayfinite.snapshot.proof import prove
from stayfinite.snapshot.record import Snapshot
from stayfinite.snapshot.watch import Watch

_VITAL = ("parameters", "optimizer", "ema")


class TrainingState:
    """All state of one training job: what to keep so that training can go on from there.

    model, optimizer, scheduler and ema are one or a sequence; ema is a module, an object with
    state_dict and load_state_dict, or tensors in a dict or list. The loader's position is kept
    if it, or its sampler, has state_dict and load_state_dict. Of modules, plain attributes are
    kept too: numbers, text, tensors, arrays, generators, and boxes of such.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> state = TrainingState(net, torch.optim.Adam(net.parameters()))
    >>> snapshot = state.capture(step=7)
    >>> _ = net.weight.data.zero_()
    >>> state.restore(snapshot)
    >>> bool(net.weight.any())
    True
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        loader: Any = None,
        generators: Any = (),
    ) -> None:
        self.members = gathered(model, optimizer, scheduler, scaler, ema, loader, generators)
        self._marker: Marker | None = None
        self._watch = Watch(self.members.census)
        items = self._watch.census.items
        self._infinite = {item.name for item in items if _may_be_bad(item)}
        self._known = {item.name for item in items}

    def capture(
        self,
        *,
        step: int = 0,
        into: Snapshot | None = None,
        offload: Offload = "none",
        parts: Collection[str] = PARTS,
        careful: bool = True,
    ) -> Snapshot:
        """Everything as it is now, in the memory of `into` where that is given.

        NonFiniteError names the parameter, optimizer state or running statistic that is not
        finite; `into` is then as before. If not `careful`, it may be empty then: large values
        are looked at only as they are copied, which costs far less.
        """
        snapshot = into if into is not None else Snapshot()
        contents = self._watch.pairs(parts)
        snapshot.write(
            self._watch.census,
            contents=contents,
            parts=parts,
            offload=offload,
            is_vital=self._is_vital,
            careful=careful,
        )
        snapshot.step = step
        return snapshot

    def _is_vital(self, item: Item) -> bool:
        """Whether it must be finite; buffers only if they were there at first, and finite."""
        if item.part == "buffers":
            return item.name in self._known and item.name not in self._infinite
        return item.part in _VITAL and item.name not in self._infinite

    def restore(self, snapshot: Snapshot, *, rewind_loader: bool = True) -> None:
        """Put everything back in place; tensors stay the same objects with the same memory.

        A loader goes on from its old position when it is iterated anew; without
        `rewind_loader` it stays where it is. A non-finite snapshot is refused.
        """
        parts = PARTS if rewind_loader else [part for part in PARTS if part != "loader"]
        snapshot.restore(parts=parts)

    def mark(self) -> Mark:
        """Where a step begins: all but parameters, optimizer state and averages."""
        if self._marker is None:
            self._marker = Marker(self.members)
        return self._marker.mark()

    def go_back(self, mark: Mark) -> None:
        """As if the step had not begun; for steps whose update was vetoed."""
        mark.restore()

    def check_restore(self, step_fn: Callable[[], Any], *, parts: Collection[str] = PARTS) -> None:
        """Prove on this very job that a restore is exact; all is as before afterwards.

        Captures, calls `step_fn`, restores, calls it again, and compares bytes. SnapshotError
        names the first item that is not exact. `parts` are those that the capture keeps.
        """
        snapshot = self.capture(parts=parts)
        prove(self.members.census, lambda: self.restore(snapshot), step_fn)


def _may_be_bad(item: Item) -> bool:
    """Whether it holds Inf on purpose, as masks do: not finite before training, nor trained."""
    if item.tensor.requires_grad or item.part not in (*_VITAL, "buffers"):
        return False
    return item.part != "optimizer" and not all_finite([item.tensor])
