"""What is looked at in each step is walked again only when it holds something new."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moments import in_bytes
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from stayfinite.snapshot import TrainingState
from stayfinite.snapshot import mark as marks
from stayfinite.snapshot.walk import add_attributes

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def advance(scheduler: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the optimizer, which does not step here
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()


def told(optimizer: Optimizer, scheduler: Any) -> Any:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return in_bytes([groups, scheduler.state_dict()])


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_step_of_a_scheduler_goes_back(kind: str) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    state = TrainingState(None, optimizer, scheduler=scheduler)
    moments = []
    for _ in range(6):
        moments.append((told(optimizer, scheduler), state.mark()))
        advance(scheduler)
    for before, mark in reversed(moments):
        state.go_back(mark)
        assert told(optimizer, scheduler) == before


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_snapshots_of_a_scheduler_hold_after_later_ones(kind: str) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    state = TrainingState(None, optimizer, scheduler=scheduler)
    moments = []
    for _ in range(4):
        moments.append((told(optimizer, scheduler), state.capture()))
        advance(scheduler)
    for before, snapshot in reversed(moments):
        state.restore(snapshot)
        assert told(optimizer, scheduler) == before


class Holder:
    """An object with one attribute, in the place of a scheduler."""

    def __init__(self, value: Any) -> None:
        self.value = value


NEWS: dict[str, tuple[Any, Any]] = {
    "a tensor in a list of numbers": ([1.0], [torch.zeros(1)]),
    "a list in a list of numbers": ([1.0], [[2.0]]),
    "a longer list": ([1.0], [1.0, 2.0]),
    "an empty list": ([1.0], []),
    "a dict for a list": ([1.0], {"a": 1.0}),
    "another dict": ({"a": 1}, {"b": 2, "c": 3}),
    "a number for none": (None, 3.5),
    "a list for none": (None, [1]),
    "another tuple": ((0.9, 0.99), (0.8, 0.99)),
    "a tensor in a tuple": ((0.9,), (torch.zeros(1),)),
    "a tuple in a list": ([(1, 2)], [(3, 4)]),
}


def spoil(value: Any) -> None:
    """Change what can be changed in it."""
    if isinstance(value, torch.Tensor):
        value.add_(5)
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)
    elif isinstance(value, list):
        for item in value:
            spoil(item)
        value.append(99)
    elif isinstance(value, dict):
        value["new"] = 99


@pytest.mark.parametrize("kind", NEWS)
def test_what_was_put_in_between_two_marks_goes_back(kind: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    first, second = NEWS[kind]
    holder = Holder(first)
    state = TrainingState(None, optimizer, scheduler=holder)
    older, first_bytes = state.mark(), in_bytes(first)
    holder.value = second
    newer, second_bytes = state.mark(), in_bytes(second)
    spoil(second)
    holder.value = None
    state.go_back(newer)
    assert holder.value is second
    assert in_bytes(second) == second_bytes
    spoil(first)
    state.go_back(older)
    assert holder.value is first
    assert in_bytes(first) == first_bytes


def test_list_that_gets_a_tensor_is_walked_again() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    holder = Holder([1.0])
    state = TrainingState(None, optimizer, scheduler=holder)
    state.mark()
    holder.value.append(torch.zeros(2))
    mark = state.mark()
    holder.value[1].add_(1)
    state.go_back(mark)
    assert holder.value[1].tolist() == [0.0, 0.0]


def test_module_in_the_place_of_another_is_seen() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = TrainingState(net)
    state.mark()
    net[1] = nn.BatchNorm1d(2)
    before, mark = in_bytes(list(net.buffers())), state.mark()
    net(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    assert in_bytes(list(net.buffers())) != before
    state.go_back(mark)
    assert in_bytes(list(net.buffers())) == before


def test_parameters_that_come_later_are_seen() -> None:
    first, later = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([first], lr=0.1)
    state = TrainingState(None, optimizer)
    state.mark()
    optimizer.add_param_group({"params": [later], "lr": 0.5})
    later.grad = torch.ones(1)
    mark = state.mark()
    later.grad = None
    later.requires_grad_(False)
    state.go_back(mark)
    assert later.grad is not None
    assert later.requires_grad


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.pair, self.kept = 0, (0, 0), [1]

    def forward(self) -> None:
        self.count += 1
        self.pair = (self.count, self.count)


def test_modules_are_walked_again_only_for_new_things(monkeypatch: pytest.MonkeyPatch) -> None:
    net, walks = Counter(), 0

    def walked(*args: Any, **how: Any) -> None:
        nonlocal walks
        walks += 1
        add_attributes(*args, **how)

    monkeypatch.setattr(marks, "add_attributes", walked)
    state = TrainingState(net)
    for _ in range(4):
        state.mark()
        net()
    assert walks == 1  # constants may become others
    net.kept = [2]
    state.mark()
    assert walks == 2
