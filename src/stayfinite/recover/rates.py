"""Learning rates: lowered so that no scheduler brings the old ones back."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# Where optimizers and schedulers keep learning rates, a number or a list of numbers each.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr")
_IN_SCHEDULERS = (
    "base_lrs",
    "max_lrs",
    "min_lrs",
    "_last_lr",
    "eta_min",
    "min_lr",
    "max_lr",
    "default_min_lr",
)


def rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rate of each group that has one."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def height_of(optimizer: Optimizer) -> float:
    """The largest learning rate that the schedules start from, wherever on them we are."""
    rates = [group.get("initial_lr", group.get("lr", 0.0)) for group in optimizer.param_groups]
    return max(map(float, rates), default=0.0)


def schedulers_of(optimizer: Optimizer) -> tuple[LRScheduler, ...]:
    """The living schedulers that set this optimizer's learning rates; looks through the heap."""
    # issubclass: isinstance would wake up proxies and lazy objects.
    found = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    return tuple(each for each in found if vars(each).get("optimizer") is optimizer)


@torch.no_grad()
def lower_rates(optimizer: Optimizer, schedulers: Iterable[Any], factor: float) -> None:
    """Multiply all learning rates, now and those that the schedulers will set, by the factor."""
    done: set[int] = set()
    for group in optimizer.param_groups:
        _multiply(group, _IN_GROUPS, factor, done)
    for scheduler in _with_inner(schedulers):
        _multiply(vars(scheduler), _IN_SCHEDULERS, factor, done)


def _with_inner(schedulers: Iterable[Any]) -> Iterable[Any]:
    """Each scheduler once, and those that it drives."""
    seen: dict[int, Any] = {}
    waiting = [each for each in schedulers if hasattr(each, "__dict__")]
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) not in seen:
            seen[id(scheduler)] = scheduler
            for value in vars(scheduler).values():
                inner = value if isinstance(value, (list, tuple)) else [value]
                waiting += [each for each in inner if isinstance(each, LRScheduler)]
    return seen.values()


def _multiply(own: dict[str, Any], names: tuple[str, ...], factor: float, done: set[int]) -> None:
    for name in names:
        if own.get(name) is not None:
            own[name] = _times(own[name], factor, done)


def _times(value: Any, factor: float, done: set[int]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_times(each, factor, done) for each in value)
    if not isinstance(value, Tensor):
        return value * factor
    if id(value) not in done:  # in place, because a captured graph reads this very tensor
        done.add(id(value))
        value.mul_(factor)
    return value
