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

    A step that is not looked at may spoil the weights; they are looked at before the next one
    that is, and put back from a snapshot.
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
        self._may_be_spoiled = False

    @property
    def is_due(self) -> bool:
        """Whether the step that is under way, or comes next, is looked at."""
        return self._evidence.count(self._optimizer) % self._checks.detection_interval == 0

    @property
    def looks_at_loss(self) -> bool:
        return self.is_due and self._checks.check_loss

    def begin_step(self, job: Job) -> None:
        """A step begins: what may have gone bad unseen is found first."""
        if self._may_be_spoiled and self.is_due:
            with self._aside():
                self._check_parameters([self._optimizer], everything=True)
            self._may_be_spoiled = False
        super().begin_step(job)

    def judge(
        self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool
    ) -> Tensor | None:
        """True where this update must not happen."""
        looks = self.is_due and self._checks.check_gradients
        self._may_be_spoiled |= not looks
        return super().judge(optimizer, gradients if looks else [], on_device=on_device)

    def _judge_loss(self, root: Tensor) -> None:
        if self.looks_at_loss:
            super()._judge_loss(root)

    def _check_parameters(self, optimizers: list[Optimizer], *, everything: bool) -> None:
        looks_closely = self._checks.check_parameters and self.is_due
        super()._check_parameters(optimizers, everything=everything or looks_closely)


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
