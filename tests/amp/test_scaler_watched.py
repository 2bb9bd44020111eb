"""DynamicLossScaler while others watch: they are told of each skip, and change nothing."""

from __future__ import annotations

import math
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from scaling import Training, gradient
from scenes import guarded
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from stayfinite.amp.scaler import DynamicLossScaler
from stayfinite.detect.hooks import StepListener, watch_scalers, watch_steps
from stayfinite.errors import TrainingAbortedError

sys.path.insert(0, str(Path(__file__).parents[1] / "detect"))  # for optimizer_variants

from optimizer_variants import Recorder, image, make, variants

amp_variants = pytest.mark.parametrize(
    ("cls", "options"), [v for v in variants() if v.values[0] is not torch.optim.LBFGS]
)


class Counter(Recorder):
    """Also remembers the steps that it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        self.steps += 1


def watched(listener: StepListener) -> ExitStack:
    both = ExitStack()
    both.enter_context(watch_steps(listener))
    both.enter_context(watch_scalers(listener))
    return both


@amp_variants
@pytest.mark.parametrize("bad_step", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])  # it is unscaled
def test_each_skip_is_told_once(
    cls: type[Optimizer], options: dict[str, Any], bad_step: int, when: str
) -> None:
    optimizer, params = make(cls, options)
    scaler = DynamicLossScaler("cpu", init_scale=4.0)
    counter = Counter()
    with watched(counter):
        for number in range(4):
            scaler.scale(torch.ones(()))
            params.fill(bad=math.inf if (number, when) == (bad_step, "before") else None)
            scaler.unscale_(optimizer)
            if (number, when) == (bad_step, "after"):
                gradient(params.used[0]).mul_(math.nan)
            before = image(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert (image(optimizer) == before) == (number == bad_step)
    assert counter.events == ["scaler"]
    assert counter.steps == 4
    assert scaler.get_scale() == 2.0


def spoil(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    gradient(optimizer.param_groups[0]["params"][0]).mul_(math.nan)


@pytest.mark.parametrize("fused", [True, False])
def test_gradient_that_a_hook_spoils_is_told_as_a_skip(fused: bool) -> None:
    training = Training(DynamicLossScaler("cpu"), Adam([nn.Parameter(torch.ones(3))], fused=fused))
    with watched(counter := Counter()):
        training.step()
        handle = training.optimizer.register_step_pre_hook(spoil)
        training.step()
        handle.remove()
        training.step()
    assert counter.events == ["scaler"]
    assert counter.steps == 3
    assert training.is_finite()


def test_skip_is_told_to_every_listener_and_to_none_that_has_left() -> None:
    first, second = Counter(), Counter()
    training = Training(DynamicLossScaler("cpu"))
    with watched(first):
        with watched(second):
            training.step("late")
        training.step("late")
    training.step("late")
    assert (len(first.events), len(second.events)) == (2, 1)


class Harmless(StepListener):
    """Watches with all the defaults."""


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_watched_training_ends_as_an_unwatched_one(kind: Any, fused: bool) -> None:
    ends = []
    for watch in (False, True):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2, 2))]
        training = Training(
            DynamicLossScaler("cpu", growth_interval=2, hysteresis=2),
            kind(weights, lr=0.1, fused=fused, **({"momentum": 0.9} if kind is SGD else {})),
        )
        dice = random.Random(1)
        with watched(Harmless()) if watch else ExitStack():
            for _ in range(60):
                training.step(dice.choice(("good", "good", "inf", "late", "none")))
        ends.append((image(training.optimizer), training.scaler.state_dict()))
    assert ends[0] == ends[1]


def train(fused: bool, *, trace: str | None) -> Any:
    """Weights, optimizer and scaler after good and bad steps, under a guard if it may trace."""
    torch.manual_seed(0)
    optimizer = Adam([nn.Parameter(torch.randn(4))], lr=0.1, fused=fused)
    training = Training(DynamicLossScaler("cpu", growth_interval=2), optimizer)
    with guarded(trace=trace) if trace else ExitStack() as guard:
        for event in ("late", "good", "inf", "good", "good", "late", "none", "good", "inf"):
            training.step(event)
    if trace:
        assert guard.incidents == []
        assert guard.steps == 9
    return image(optimizer), training.scaler.state_dict()


@pytest.mark.parametrize("trace", ["never", "start"])
@pytest.mark.parametrize("fused", [True, False])
def test_guarded_training_ends_as_an_unguarded_one(fused: bool, trace: str) -> None:
    assert train(fused, trace=trace) == train(fused, trace=None)


def test_overflows_at_the_floor_become_an_incident_of_the_guard() -> None:
    training = Training(DynamicLossScaler("cpu", init_scale=4.0))
    with guarded() as guard:
        for _ in range(2):
            training.step("inf")
        with pytest.raises(TrainingAbortedError):
            training.step("inf")
    assert guard.incidents[0].step == 2
    assert training.weight.tolist() == [1.0] * 3


def test_unscaled_loss_that_is_not_finite_is_an_incident_of_the_guard() -> None:
    training = Training(DynamicLossScaler("cpu"))
    with guarded(), pytest.raises(TrainingAbortedError, match="loss is not finite"):
        training.scaler.scale((training.weight * math.nan).sum()).backward()


@pytest.mark.parametrize("fused", [True, False])
def test_aborted_step_leaves_the_scaler_usable(fused: bool) -> None:
    class Stop(StepListener):
        def judge(self, *_: Any, **__: Any) -> bool:
            raise TrainingAbortedError("enough")

    optimizer = Adam([nn.Parameter(torch.ones(3))], lr=0.1, fused=fused)
    training = Training(DynamicLossScaler("cpu"), optimizer)
    training.step()
    state = training.scaler.state_dict()
    before = image(optimizer)
    with watch_steps(Stop()), pytest.raises(TrainingAbortedError):
        training.attempt()
    assert image(optimizer) == before
    assert "grad_scale" not in vars(optimizer)
    training.scaler.load_state_dict(state)
    training.step()
    assert image(optimizer) != before
