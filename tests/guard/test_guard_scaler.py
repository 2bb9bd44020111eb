"""Under a GradScaler: what it absorbs is counted, what it cannot absorb is an incident."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from scenes import guarded
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam

import stayfinite
from stayfinite.errors import TrainingAbortedError


class Amplified(torch.autograd.Function):
    """Its gradient overflows at any scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3e38 * 3e38


class Training:
    """A weight whose scaled gradient overflows in the given steps."""

    def __init__(self, *, scale: float, fused: bool = False, growth: int = 1000) -> None:
        self.weight = nn.Parameter(torch.ones(3))
        self.optimizer = Adam([self.weight], fused=True) if fused else SGD([self.weight], lr=0.01)
        self.scaler = GradScaler("cpu", init_scale=scale, growth_interval=growth)

    def step(self, *, overflow: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = (self.weight * 0.1).sum()
        if overflow:
            loss = Amplified.apply(loss)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("trace", ["never", "start"])
@pytest.mark.parametrize("fused", [True, False])
def test_overflow_that_the_scaler_absorbs_is_counted(fused: bool, trace: str) -> None:
    training = Training(scale=1024.0, fused=fused)
    with guarded(trace=trace) as guard:
        for step in range(12):
            training.step(overflow=step in (0, 1, 7))
    assert guard.incidents == []
    assert guard.scaler_skips == 3
    assert guard.steps == 12
    assert torch.isfinite(training.weight).all()


def test_more_skips_in_a_row_than_allowed_are_an_incident() -> None:
    training = Training(scale=2.0**30)
    with guarded(max_scaler_skips=4) as guard:
        for _ in range(4):
            training.step(overflow=True)
        with pytest.raises(TrainingAbortedError):
            training.step(overflow=True)
    assert guard.scaler_skips == 5
    assert guard.incidents[0].step == 4
    assert guard.incidents[0].reports[0].location == "gradients.0"


def test_skips_with_good_steps_between_them_are_no_incident() -> None:
    training = Training(scale=2.0**30)
    with guarded(max_scaler_skips=2) as guard:
        for step in range(20):
            training.step(overflow=step % 3 != 0)
    assert guard.incidents == []


def test_overflow_again_at_a_scale_of_one_is_an_incident() -> None:
    training = Training(scale=1.0)
    with guarded() as guard:
        training.step(overflow=True)
        assert guard.incidents == []
        with pytest.raises(TrainingAbortedError):
            training.step(overflow=True)
    assert guard.incidents[0].step == 1


def test_cause_of_a_collapsed_scale_is_named_when_traced() -> None:
    training = Training(scale=0.5)
    with guarded(trace="start", on_nan="warn") as guard:
        for _ in range(2):
            training.step(overflow=True)
    assert guard.incidents[0].diagnosis.cause == "loss_scale_collapse"


def test_cause_of_endless_skips_is_named_when_traced() -> None:
    training = Training(scale=2.0**30)
    with guarded(trace="start", on_nan="warn", max_scaler_skips=2) as guard:
        for _ in range(3):
            training.step(overflow=True)
    assert guard.incidents[0].diagnosis.cause == "loss_scale_overflow"


def test_unscaled_loss_that_is_not_finite_is_an_incident() -> None:
    training = Training(scale=1024.0)
    loss = (training.weight * math.nan).sum()
    with guarded(), pytest.raises(TrainingAbortedError, match="loss is not finite"):
        training.scaler.scale(loss).backward()


def test_scaled_loss_that_overflows_is_not() -> None:
    weight = nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu", init_scale=2.0**17)
    with guarded() as guard:
        scaled = scaler.scale((weight * 1e35).sum())
        assert not torch.isfinite(scaled)
        scaled.backward()
    assert guard.incidents == []


@pytest.mark.parametrize("make", [list, tuple])
def test_losses_that_are_scaled_together_are_each_judged(make: Any) -> None:
    training = Training(scale=4.0)
    losses = make([training.weight.sum(), training.weight.sum() * math.nan])
    with guarded(), pytest.raises(TrainingAbortedError):
        torch.autograd.backward(list(training.scaler.scale(losses)))


def test_disabled_scaler_changes_nothing() -> None:
    training = Training(scale=1024.0)
    training.scaler = GradScaler("cpu", enabled=False)
    with guarded() as guard:
        training.step()
        with pytest.raises(TrainingAbortedError, match="gradients"):
            training.step(overflow=True)
    assert guard.scaler_skips == 0
    assert torch.isfinite(training.weight).all()


def test_gradient_that_goes_bad_after_unscaling_is_vetoed() -> None:
    training = Training(scale=8.0)
    before = training.weight.detach().clone()
    with guarded():
        training.scaler.scale(training.weight.sum()).backward()
        training.scaler.unscale_(training.optimizer)
        training.weight.grad.mul_(math.nan)
        with pytest.raises(TrainingAbortedError):
            training.scaler.step(training.optimizer)
    assert torch.equal(training.weight, before)


def test_loop_goes_on_to_its_scaler_after_a_bad_loss() -> None:
    training = Training(scale=8.0)
    model = nn.Linear(2, 1)
    optimizer = Adam(model.parameters())
    config = stayfinite.RecoveryConfig(primary_strategy="skip")
    watched = stayfinite.watch(model, optimizer, scaler=training.scaler, config=config, sinks=[])
    with watched as guard:
        for value in (1.0, math.nan, 1.0):
            optimizer.zero_grad()
            training.scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
            training.scaler.step(optimizer)
            training.scaler.update()
    assert [incident.step for incident in guard.incidents] == [1]
    assert training.scaler.get_scale() == 8.0
    assert torch.isfinite(model.weight).all()
