"""What an action may work on, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stayfinite.records import NaNReport

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from stayfinite.snapshot import SnapshotRing


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What an action may work on.

    `module` is the dotted name of the guilty module, when it is known. `averages` are those of
    the weights, such as an EMA. `will_rerun` says that the step has been undone and can be run
    again, so there are no gradients of it now. `autocast` says whether the step runs under
    autocast, and `good_steps` how many the weights have come, in the count of the snapshots; None
    when that is not known.
    """

    model: nn.Module | None
    optimizer: Optimizer
    scaler: Any = None
    schedulers: tuple[Any, ...] = ()
    averages: tuple[Any, ...] = ()
    snapshots: SnapshotRing | None = None
    module: str | None = None
    will_rerun: bool = False
    autocast: bool | None = None
    good_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """The bad step: what was seen, at which step, and the slug of its cause when it is known."""

    reports: tuple[NaNReport, ...] = ()
    step: int = 0
    cause: str | None = None

    @property
    def report(self) -> NaNReport | None:
        return self.reports[0] if self.reports else None


@dataclass(frozen=True)
class Done:
    """The action has been taken.

    `went_back_to` is the step of the snapshot that was restored, `loaded_from` the checkpoint
    that was loaded; `undo` takes the action back, where it lasts and can be taken back.
    """

    detail: str
    went_back_to: int | None = None
    loaded_from: str | None = None
    undo: Callable[[], None] | None = None


@dataclass(frozen=True)
class Cannot:
    """The action would not help here, and nothing was changed."""

    reason: str


Answer = Done | Cannot
