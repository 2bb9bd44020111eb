"""Gradients of updates that no torch optimizer makes are judged before the update."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stayfinite.errors import TrainingAbortedError
from stayfinite.guard.guard import Guard
from stayfinite.settings import GuardSettings


def in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight -= 0.01 * weight.grad
        weight.grad = None


def by_data(weight: Tensor) -> None:
    weight.data -= 0.01 * weight.grad
    weight.grad.zero_()


def train(update: Callable[[Tensor], None], *, bad_at: tuple[int, ...] = (5,)) -> Tensor:
    weight = torch.ones(3, requires_grad=True)
    for step in range(9):
        inputs = torch.full((3,), 0.0 if step in bad_at else 1.0)
        loss = torch.sqrt(weight * inputs).sum()
        loss.backward()
        update(weight)
    return weight


def watched(on_nan: Any, script: Callable[[], Any]) -> tuple[Guard, Any]:
    guard, result = Guard(GuardSettings(on_nan=on_nan, folder=None)), None
    guard.attach()
    try:
        result = script()
    except TrainingAbortedError:
        assert on_nan == "stop"
    guard.close()
    return guard, result


@pytest.mark.parametrize("update", [in_place, by_data])
@pytest.mark.parametrize("on_nan", ["stop", "recover"])
def test_a_bad_gradient_is_noticed_before_the_update_at_its_line(
    update: Callable[[Tensor], None], on_nan: str
) -> None:
    kept: list[Tensor] = []

    def keeping(weight: Tensor) -> None:
        kept.append(weight)
        update(weight)

    guard, _ = watched(on_nan, lambda: train(keeping))
    (incident,) = guard.incidents
    lines, first = inspect.getsourcelines(train)
    line = first + next(n for n, each in enumerate(lines) if "torch.sqrt" in each)
    assert (incident.step, incident.origin.line, incident.origin.exact) == (5, line, True)
    assert incident.origin.file == sys.modules[__name__].__file__
    assert incident.diagnosis.cause == "sqrt_grad_at_zero"
    assert kept[-1].isfinite().all()


@pytest.mark.parametrize("update", [in_place, by_data])
def test_recovery_leaves_the_weights_as_they_would_be_without_the_bad_steps(
    update: Callable[[Tensor], None],
) -> None:
    def skipping(weight: Tensor) -> None:
        if weight.grad.isfinite().all():
            update(weight)
        else:
            weight.grad = None

    expected = train(skipping, bad_at=(4, 7))
    guard, weight = watched("recover", lambda: train(update, bad_at=(4, 7)))
    assert torch.equal(weight, expected)
    assert [each.step for each in guard.incidents] == [4, 7]
    assert {each.outcome.strategy for each in guard.incidents} == {"skip"}
    assert "gradients of 0" in guard.incidents[0].outcome.detail
    after = guard.aftermath()
    assert (after.updates, after.bad_updates, after.bad_at_end) == (9, 2, ())


def test_gradients_that_nobody_trains_on_are_none_of_ours() -> None:
    def look_at_saliency() -> None:
        weight = torch.ones(3, requires_grad=True)
        for _ in range(4):
            torch.sqrt(weight * 0).sum().backward()
            weight.grad = None

    guard, _ = watched("stop", look_at_saliency)
    assert guard.incidents == []


def test_an_overflow_of_a_loss_scale_by_hand_is_none_of_ours() -> None:
    """In float16 the script has to look at the gradients itself."""

    def scaled() -> Tensor:
        weight, scale = torch.ones(3, requires_grad=True), 2.0**20
        for _ in range(9):
            loss = (weight.half() * 3).sum().float() * scale
            loss.backward()
            if weight.grad.isfinite().all():
                weight.data -= 1e-3 * weight.grad / scale
            else:
                scale /= 4
            weight.grad = None
            if scale < 2**14:
                scale = 2.0**20
        return weight

    guard, weight = watched("stop", scaled)
    assert guard.incidents == []
    assert weight.isfinite().all()


def test_what_a_transform_differentiates_is_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    kept = []

    def energy(place: Tensor) -> Tensor:
        kept.append(place)  # it outlives its transform, as in a cycle of references
        return place.square().sum()

    def script() -> None:
        for _ in range(3):
            torch.func.vmap(torch.func.grad(energy))(torch.ones(4, 3))
            train(in_place, bad_at=())

    watched("stop", script)
    assert kept
    assert not caplog.records
