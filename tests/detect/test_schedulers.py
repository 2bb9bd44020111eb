"""Learning-rate schedulers go on as if nobody were watching, and do not complain."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from optimizer_variants import NAN, Recorder, fresh, image, step
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from stayfinite.detect.hooks import watch_steps

ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda epoch: 0.9**epoch},
    "MultiplicativeLR": {"lr_lambda": lambda _: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ConstantLR": {"total_iters": 3},
    "LinearLR": {"total_iters": 4},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "ReduceLROnPlateau": {"patience": 1},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
    "PolynomialLR": {"total_iters": 5},
}
NESTED = {"SequentialLR", "ChainedScheduler"}


def schedulers() -> set[str]:
    found = {name: c for name, c in vars(lr_scheduler).items() if inspect.isclass(c)}
    base = lr_scheduler.LRScheduler
    known = {name for name, c in found.items() if issubclass(c, base) and not name.startswith("_")}
    return known - {"LRScheduler"}


def make_scheduler(name: str, optimizer: Optimizer) -> Any:
    if name not in NESTED:
        return getattr(lr_scheduler, name)(optimizer, **ARGUMENTS[name])
    parts: list[Any] = [
        lr_scheduler.ConstantLR(optimizer, total_iters=2),
        lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
    ]
    if name == "SequentialLR":
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def rates(name: str, cls: type[Optimizer], options: dict[str, Any], *, bad: set[int]) -> Any:
    """The learning rates of ten steps, and what the last one left behind."""
    optimizer, params = fresh(cls, **options)
    scheduler = make_scheduler(name, optimizer)
    seen = []
    for i in range(9):
        step(optimizer, params, bad=NAN if i in bad else None)
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        seen.append(optimizer.param_groups[0]["lr"])
    assert all(torch.isfinite(param).all() for param in params.used)
    return seen, image(optimizer)


def test_every_scheduler_of_torch_is_in_the_table() -> None:
    assert schedulers() == set(ARGUMENTS) | NESTED


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("cls", [SGD, Adam])
@pytest.mark.parametrize("name", sorted(schedulers()))
def test_scheduler_is_not_disturbed(name: str, cls: type[Optimizer], fused: bool) -> None:
    options = {"fused": fused}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = rates(name, cls, options, bad=set())
        with watch_steps(recorder := Recorder()):
            assert rates(name, cls, options, bad=set()) == plain
            vetoed, _ = rates(name, cls, options, bad={0, 3, 4})
    assert vetoed == plain[0]
    assert len(recorder.events) == 3


def test_step_is_still_the_one_that_the_scheduler_counts() -> None:
    optimizer, params = fresh()
    lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    counted = optimizer.step
    with watch_steps(Recorder()):
        step(optimizer, params)
        assert optimizer.step == counted
