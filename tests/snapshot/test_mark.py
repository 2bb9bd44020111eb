"""The beginning of a step comes back: all but parameters, optimizer state and averages."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from moments import Everything, in_bytes, random_bytes, seed_everything
from torch import Tensor, nn
from torch.optim import lr_scheduler

from stayfinite.snapshot import TrainingState
from stayfinite.snapshot.mark import SMALL

UNTOUCHED = ("parameters", "optimizer", "ema", "loader")


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_step_that_was_vetoed_has_not_begun(steps: int) -> None:
    training = Everything()
    state = TrainingState(training.model, training.optimizer, **training.members)
    for _ in range(steps):
        state.mark()
        training.step()
    before = training.bytes()
    mark = state.mark()
    for _ in range(2):
        training.step()
        training.model.eval()
        after = training.bytes()
        state.go_back(mark)
        again = training.bytes()
        assert [n for n in before if n not in UNTOUCHED and again[n] != before[n]] == []
        assert [n for n in UNTOUCHED if again[n] != after[n]] == []


def test_mark_of_every_step_holds_although_later_ones_were_made() -> None:
    training = Everything()
    state = TrainingState(training.model, training.optimizer, **training.members)
    marks, moments = [], []
    for _ in range(5):
        moments.append(training.bytes())
        marks.append(state.mark())
        training.step()
    for mark, moment in reversed(list(zip(marks, moments, strict=True))):
        state.go_back(mark)
        now = training.bytes()
        assert [n for n in moment if n not in UNTOUCHED and now[n] != moment[n]] == []


@dataclass
class Record:
    count: int = 0


class Held(nn.Module):
    """One attribute that a step changes in a way of its own."""

    def __init__(self, value: Any, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.value, self._change = value, change
        self.other = 3

    def forward(self) -> None:
        changed = self._change(self)
        if changed is not None:
            self.value = changed


def record_up(held: Any) -> None:
    held.value.count += 1


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "counter": (0, lambda m: m.value + 1),
    "text": ("a", lambda m: m.value + "b"),
    "none to list": (None, lambda m: [*(m.value or []), 1]),
    "list appended": ([1], lambda m: m.value.append(len(m.value))),
    "list item": ([1, 2], lambda m: m.value.__setitem__(0, m.value[0] + 1)),
    "inner list": ([[1], [2]], lambda m: m.value[0].append(5)),
    "inner dict": ({"a": {"b": 1}}, lambda m: m.value["a"].update(b=m.value["a"]["b"] + 1)),
    "dict key": ({}, lambda m: m.value.update({len(m.value): 1})),
    "set": ({1}, lambda m: m.value.add(len(m.value) + 1)),
    "tuple of lists": (([1],), lambda m: m.value[0].append(2)),
    "record": (Record(), record_up),
    "tensor replaced": (torch.zeros(2), lambda m: m.value + 1),
    "tensor in place": (torch.zeros(2), lambda m: (m.value.add_(1), None)[1]),
    "tensor by data": (torch.zeros(2), lambda m: (m.value.data.add_(1), None)[1]),
    "tensor in list": ([torch.zeros(2)], lambda m: (m.value[0].add_(1), None)[1]),
    "tensor in list replaced": (
        [torch.zeros(2)],
        lambda m: m.value.__setitem__(0, m.value[0] + 1),
    ),
    "large in place": (torch.zeros(SMALL), lambda m: (m.value.add_(1), None)[1]),
    "large by data": (torch.zeros(SMALL), lambda m: (m.value.data.add_(1), None)[1]),
    "large replaced": (torch.zeros(SMALL), lambda m: m.value + 1),
    "another attribute": (0, lambda m: m.__dict__.update({f"n{len(m.__dict__)}": 1})),
    "deleted": (0, lambda m: m.__dict__.pop("other", None) and None),
}


def held_bytes(net: Held) -> Any:
    held = {k: v for k, v in vars(net).items() if k in ("value", "other") or k.startswith("n")}
    return in_bytes({k: vars(v) if isinstance(v, Record) else v for k, v in held.items()})


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("steps", [0, 1, 5, 70])
def test_attribute_goes_back(kind: str, steps: int) -> None:
    value, change = CHANGES[kind]
    net = Held(copy.deepcopy(value), change)
    state = TrainingState(net)
    for _ in range(steps):
        state.mark()
        net()
    before, held, mark = held_bytes(net), net.value, state.mark()
    net()
    assert held_bytes(net) != before or (kind == "deleted" and steps)
    state.go_back(mark)
    assert held_bytes(net) == before
    assert net.value is held


def test_large_buffer_that_does_not_change_is_not_copied_each_time() -> None:
    net = nn.Linear(1, 1)
    net.register_buffer("mask", torch.full((SMALL,), -math.inf))
    state = TrainingState(net)
    marks = [state.mark() for _ in range(6)]
    memories = {id(mark._tensors._single[0][1]) for mark in marks if mark._tensors}
    assert len(memories) == 1
    net.mask[0] = 1.0
    state.go_back(marks[-1])
    assert net.mask[0] == -math.inf


def test_batch_norm_and_replaced_buffers_go_back() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = TrainingState(net)
    held = list(net.buffers())
    before, mark = in_bytes(held), state.mark()
    net(torch.randn(4, 2))
    net[1].running_mean = torch.ones(2)
    net[1].register_buffer("late", torch.ones(1))
    state.go_back(mark)
    assert all(a is b for a, b in zip(held, net.buffers(), strict=True))
    assert in_bytes(list(net.buffers())) == before


def test_modules_that_come_later_are_seen() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    state = TrainingState(net)
    state.mark()
    net.append(nn.BatchNorm1d(2))
    before, mark = in_bytes(list(net.buffers())), state.mark()
    net(torch.randn(4, 2))
    state.go_back(mark)
    assert in_bytes(list(net.buffers())) == before


def test_tensors_of_a_graph_stay_what_they_are() -> None:
    net = nn.Linear(2, 2)
    net.auxiliary = net(torch.ones(1, 2)).sum()
    held = net.auxiliary
    state = TrainingState(net)
    mark, snapshot = state.mark(), state.capture()
    net.auxiliary = None
    state.go_back(mark)
    assert net.auxiliary is held
    state.restore(snapshot)
    assert held.requires_grad
    assert held.grad_fn is not None


def backward(net: nn.Module) -> None:
    net(torch.ones(1, 2)).sum().backward()


def zeroed(net: nn.Module) -> None:
    net.zero_grad(set_to_none=False)
    backward(net)


def dropped(net: nn.Module) -> None:
    net.zero_grad()
    backward(net)


@pytest.mark.parametrize("step", [backward, zeroed, dropped])
@pytest.mark.parametrize("steps", [0, 1, 2, 8])
def test_leftover_gradients_go_back(step: Callable[[nn.Module], None], steps: int) -> None:
    net = nn.Linear(2, 2)
    state = TrainingState(net)
    for _ in range(steps):
        state.mark()
        step(net)
        net.weight.data.mul_(0.9)
    gradients = [p.grad for p in net.parameters()]
    before, mark = in_bytes(gradients), state.mark()
    step(net)
    state.go_back(mark)
    again = [p.grad for p in net.parameters()]
    assert all(a is b for a, b in zip(again, gradients, strict=True))
    assert in_bytes(again) == before


def test_gradients_that_are_parts_of_one_memory_are_copied() -> None:
    net = nn.Linear(2, 2, bias=False)
    bucket = torch.ones(8)
    net.weight.grad = bucket[:4].view(2, 2)
    state = TrainingState(net)
    for _ in range(5):
        mark = state.mark()
    net.zero_grad()
    bucket.zero_()
    state.go_back(mark)
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_gradients_that_steps_drop_are_not_copied() -> None:
    net = nn.Linear(2, 2)
    state = TrainingState(net)
    for _ in range(6):
        mark = state.mark()
        dropped(net)
    assert state.mark()._gradients._values == []
    assert mark is not None


def test_marks_leave_no_trace() -> None:
    seed_everything(4)
    training = Everything()
    training.step()
    state = TrainingState(training.model, training.optimizer, **training.members)
    before, attributes = training.bytes(), set(vars(training.model))
    for _ in range(3):
        state.mark()
    assert training.bytes() == before
    assert set(vars(training.model)) == attributes


def test_normal_numbers_that_come_in_pairs_are_remembered() -> None:
    state = TrainingState(nn.Linear(1, 1))
    for _ in range(4):
        random.gauss(0, 1)
        np.random.randn()
        before, mark = random_bytes(), state.mark()
        random.gauss(0, 1)
        np.random.randn()
        state.go_back(mark)
        assert random_bytes() == before
        random.gauss(0, 1)
        np.random.randn()


def test_scheduler_of_a_vetoed_step_does_not_advance() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = TrainingState(None, optimizer, scheduler=scheduler)
    rates = []
    for number in range(4):
        mark = state.mark()
        optimizer.step()
        scheduler.step()
        if number == 2:
            state.go_back(mark)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.25, 0.125]


def test_inference_tensors_are_no_obstacle() -> None:
    net = nn.Linear(1, 1)
    with torch.inference_mode():
        net.register_buffer("fixed", torch.ones(2))
    state = TrainingState(net)
    held: Tensor = net.fixed
    mark, snapshot = state.mark(), state.capture()
    state.go_back(mark)
    state.restore(snapshot)
    assert net.fixed is held


def test_large_tensors_that_each_step_replaces_are_not_copied() -> None:
    net = nn.Linear(1, 1)
    net.map = torch.zeros(SMALL)
    state = TrainingState(net)
    for number in range(4):
        mark = state.mark()
        kept = mark._tensors
        assert kept is not None
        assert bool(kept._single[0][1]) == (number == 0)
        net.map = torch.full((SMALL,), float(number))
    state.go_back(mark)
    assert net.map[0] == 2.0
