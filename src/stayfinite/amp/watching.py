"""A guard that looks at what a config asks for, and as often."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.amp.config import NaNDetectionConfig
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.records import Incident
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.settings import GuardSettings


class ChosenGuard(Guard):
    """Looks at loss, gradients and parameters as chosen, in every n-th step.

    A step that is not looked at may spoil the weights. The next one that is cannot be finite
    then, and they are put back from a snapshot.
    """

    def __init__(
        self,
        checks: NaNDetectionConfig,
        *,
        on_incident: Callable[[Incident], None],
        only: Optimizer,
    ) -> None:
        settings = GuardSettings(on_nan="recover", folder=os.getcwd())
        super().__init__(settings, on_incident=on_incident, only=only)
        self._checks = checks
        self._optimizer = only
        self._looks_at_parameters = True

    @property
    def is_due(self) -> bool:
        """Whether the step that is under way, or comes next, is looked at."""
        return self._evidence.count(self._optimizer) % self._checks.detection_interval == 0

    @property
    def looks_at_loss(self) -> bool:
        return self.is_due and self._checks.check_loss

    def judge(
        self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool
    ) -> Tensor | None:
        """True where this update must not happen."""
        looks = self.is_due and self._checks.check_gradients
        return super().judge(optimizer, gradients if looks else [], on_device=on_device)

    def _judge_loss(self, root: Tensor) -> None:
        if self.looks_at_loss:
            super()._judge_loss(root)

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        """An update was attempted."""
        self._looks_at_parameters = self.is_due and self._checks.check_parameters
        super().stepped(optimizer, vetoed=vetoed)
        self._looks_at_parameters = True  # when a step is bad, whatever the config says

    def mended_harm(self, job: Job) -> bool:
        """Whether parameters were bad; they have been put back then."""
        return self._looks_at_parameters and super().mended_harm(job)


def watch_chosen(
    model: nn.Module,
    optimizer: Optimizer,
    checks: NaNDetectionConfig,
    *,
    scaler: Any,
    schedulers: Sequence[Any],
    ema: Any,
    on_incident: Callable[[Incident], None],
) -> ChosenGuard:
    """The guard, attached."""
    guard = ChosenGuard(checks, on_incident=on_incident, only=optimizer)
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
