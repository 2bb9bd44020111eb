"""A lowered learning rate stays lowered, whatever schedule is in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from stayfinite.recover.actions import lower_rates, rates_of, schedulers_of

Make = Callable[[Optimizer], Any]


def sequential(optimizer: Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.01)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[5])


def chained(optimizer: Optimizer) -> Any:
    constant = lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=6)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    return lr_scheduler.ChainedScheduler([constant, decay])


SCHEDULERS: dict[str, Make] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95),
    "step": lambda o: lr_scheduler.StepLR(o, step_size=3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 8]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, factor=0.3, total_iters=7),
    "linear": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=10),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=12, power=2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6, eta_min=0.02),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4, eta_min=0.02),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=16),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, min_lr=0.02),
    "sequential": sequential,
    "chained": chained,
    "swa": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=8),
}


def optimizer_with(lr: float | torch.Tensor) -> Optimizer:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    for param in (first, second):
        param.grad = torch.zeros_like(param)
    other = lr * 2
    return SGD([{"params": [first]}, {"params": [second], "lr": other}], lr=lr, momentum=0.9)


def course(make: Make, *, tensors: bool, lowered_at: int | None, given: bool = True) -> list[float]:
    """The rates of the first group over 15 steps, halved once at the given step."""
    optimizer = optimizer_with(torch.tensor(0.1, dtype=torch.float64) if tensors else 0.1)
    scheduler = make(optimizer)
    seen = []
    for step in range(15):
        if step == lowered_at:
            schedulers = [scheduler] if given else schedulers_of(optimizer)
            lower_rates(optimizer, schedulers, 0.5)
        optimizer.step()
        seen.append(rates_of(optimizer)[0])
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if plateau else []))
        assert rates_of(optimizer) == pytest.approx([float(r) for r in scheduler.get_last_lr()])
    return seen


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("step", [0, 1, 4, 7])
def test_schedule_goes_on_at_half_the_height(name: str, step: int, tensors: bool) -> None:
    make = SCHEDULERS[name]
    untouched = course(make, tensors=tensors, lowered_at=None)
    lowered = course(make, tensors=tensors, lowered_at=step)
    expected = [rate if n < step else rate / 2 for n, rate in enumerate(untouched)]
    assert lowered == pytest.approx(expected, rel=1e-6)
    assert len(set(untouched)) > 1  # there is a schedule at all


@pytest.mark.parametrize("name", ["lambda", "onecycle", "sequential", "chained"])
def test_schedulers_are_found_where_nobody_gave_them(name: str) -> None:
    make = SCHEDULERS[name]
    given = course(make, tensors=False, lowered_at=4)
    assert course(make, tensors=False, lowered_at=4, given=False) == given


def test_schedulers_of_other_optimizers_are_left_alone() -> None:
    ours, theirs = optimizer_with(0.1), optimizer_with(0.1)
    own, foreign = SCHEDULERS["lambda"](ours), SCHEDULERS["lambda"](theirs)
    assert schedulers_of(ours) == (own,)
    lower_rates(ours, schedulers_of(ours), 0.5)
    assert foreign.base_lrs == [0.1, 0.2]
    assert rates_of(theirs) == [0.1, 0.2]


def test_without_a_scheduler_every_group_is_lowered() -> None:
    optimizer = optimizer_with(0.1)
    lower_rates(optimizer, (), 0.5)
    assert rates_of(optimizer) == pytest.approx([0.05, 0.1])


def test_tensor_that_is_the_rate_of_two_groups_is_lowered_once() -> None:
    shared = torch.tensor(0.1)
    params = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    optimizer = SGD([{"params": [param], "lr": shared} for param in params], lr=shared)
    lower_rates(optimizer, (), 0.5)
    assert optimizer.param_groups[0]["lr"] is shared
    assert float(shared) == pytest.approx(0.05)
