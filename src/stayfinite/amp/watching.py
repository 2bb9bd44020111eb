"""A guard that looks at what a config asks for, and as often."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stayfinite.amp.config import NaNDetectionConfig
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.records import Incident
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.settings import GuardSettings


def watch_chosen(
    model: nn.Module,
    optimizer: Optimizer,
    checks: NaNDetectionConfig,
    *,
    scaler: Any,
    schedulers: Sequence[Any],
    ema: Any,
    on_incident: Callable[[Incident], None],
) -> Guard:
    """The guard, attached."""
    settings = GuardSettings(
        on_nan="recover",
        folder=os.getcwd(),
        check_loss=checks.check_loss,
        check_gradients=checks.check_gradients,
        check_parameters=checks.check_parameters,
        check_every=checks.detection_interval,
    )
    guard = Guard(settings, on_incident=on_incident, only=optimizer)
    parts = Parts(
        optimizer=optimizer,
        modules=(model,),
        schedulers=tuple(schedulers),
        scaler=scaler,
        emas=() if ema is None else (ema,),
    )
    guard.add(Job(parts, checks.recovery, NaNRecoveryManager(checks.recovery)))
    guard.attach()
    return guard
