"""An optimizer has one guard, whoever asked for it first."""

from __future__ import annotations

from torch.optim import Optimizer

from stayfinite.detect.hooks import listeners
from stayfinite.guard.guard import Guard


def guard_of(optimizer: Optimizer) -> Guard | None:
    """The guard that recovers this optimizer's steps already, such as that of `stayfinite run`."""
    guards = (listener for listener in listeners() if isinstance(listener, Guard))
    return next((guard for guard in guards if id(optimizer) in guard.jobs), None)
