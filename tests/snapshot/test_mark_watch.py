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
from stayfinite.snapshot.mark import Form, Watch
from stayfinite.snapshot.walk import Census, add_object, add_param_groups

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
def test_scheduler_is_walked_once_and_every_step_of_it_goes_back(kind: str) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    looks = 0

    def look() -> Census:
        nonlocal looks
        looks += 1
        census = Census()
        add_param_groups(census, optimizer)
        add_object(census, scheduler, "scheduler", "scheduler")
        return census

    watch = Watch(look)
    moments = []
    for _ in range(6):
        moments.append((told(optimizer, scheduler), watch.contents()[0]))
        advance(scheduler)
    # One that hands over to the next may be walked once more.
    assert looks <= 2
    for before, (cells, contents) in reversed(moments):
        for cell, content in zip(cells, contents, strict=True):
            cell.put_back(content)
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


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        ([1, "a", None], [2, "b", None], True),
        ([1, None], [None, 2.5], True),
        ([1], [1, 2], False),
        ([(1, 2)], [(1, 3)], True),
        ([(1, [])], [(1, [])], False),
        ([[1]], [[1]], False),
        ([1], [[1]], False),
    ],
)
def test_form_fits_where_only_constants_differ(first: Any, second: Any, fits: bool) -> None:
    Census().value([1, "a", None, 2.5], "", "")  # types of constants are learnt by walking
    form = Form(first)
    assert form.fits(first)
    assert form.fits(second) == fits
    assert form.fits(first)
