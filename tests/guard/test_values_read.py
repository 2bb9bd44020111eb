"""Which values that the script reads are its results."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from torch import nn

from stayfinite.detect.hooks import watch_numbers
from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard.read_values import ValuesRead
from stayfinite.records import ReadValue

BAD = torch.tensor(math.nan)


def reading(script: Callable[[], object], guard: Guard | None = None) -> tuple[ReadValue, ...]:
    read = ValuesRead(steps=lambda: 5, folder=None)
    if guard is not None:
        guard.past.on_bad_loss = read.trains_on
        guard.attach()
    with watch_numbers(read.saw):
        script()
    if guard is not None:
        guard.close()
    return read.told()


def test_a_loss_in_evaluation_is_noted_once_for_its_line() -> None:
    def script() -> None:
        for _ in range(3):
            with torch.no_grad():
                test_loss = BAD + 1
                test_loss.item()

    (value,) = reading(script)
    assert (value.times, value.step, value.is_loss, value.in_evaluation) == (3, 5, True, True)
    assert value.code == "test_loss.item()"
    assert value.file == __file__


def test_a_loss_without_a_graph_that_is_read_later_is_noted() -> None:
    def script() -> str:
        with torch.no_grad():
            test_loss = BAD + 1
        return f"{test_loss:.3f}"

    (value,) = reading(script)
    assert (value.is_loss, value.in_evaluation, value.is_certain) == (True, True, False)


def test_a_metric_in_evaluation_is_no_loss() -> None:
    def script() -> None:
        with torch.inference_mode():
            (BAD + 0).item()

    (value,) = reading(script)
    assert not value.is_loss


def test_a_norm_that_overflowed_is_no_result() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), math.inf)

    def script() -> None:
        norm = nn.utils.clip_grad_norm_([parameter], 1.0)
        norm.item()

    assert reading(script) == ()


@pytest.mark.parametrize("when", ["before", "after", "shown", "detached"])
def test_a_loss_that_training_begins_from_is_not_noted(when: str) -> None:
    weight = nn.Parameter(torch.ones(3))

    def script() -> None:
        loss = (weight * math.nan).sum()
        if when == "before":
            loss.item()
        if when == "shown":
            f"{loss}"
        if when == "detached":
            loss.detach().item()
        loss.backward()
        if when == "after":
            loss.item()

    assert reading(script, Guard(GuardSettings(on_nan="warn"))) == ()


def test_a_loss_with_a_graph_that_nobody_trains_on_is_noted() -> None:
    weight = nn.Parameter(torch.ones(3))

    def script() -> None:
        loss = (weight * math.nan).sum()
        loss.item()

    (value,) = reading(script)
    assert not value.in_evaluation


def test_what_an_optimizer_reads_is_not_noted() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([weight], lr=1e20, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**8).sum()
        loss.backward()
        return loss

    assert reading(lambda: optimizer.step(closure)) == ()


def test_what_an_optimizer_of_the_users_reads_is_not_noted() -> None:
    class Mine(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            (0.0 / torch.zeros(1)).item()

    net = nn.Linear(2, 1)
    assert reading(Mine(net.parameters(), {}).step) == ()
