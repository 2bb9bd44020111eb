"""One bad step has one number and one incident, whoever notices it and in whichever mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from torch import nn
from torch.optim import SGD

from stayfinite.errors import TrainingAbortedError
from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard.discover import recover_everything

NAN = math.nan
MODES = [("stop", "never"), ("stop", "start"), ("warn", "never"), ("recover", "never")]


def bad_loss() -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(9):
        optimizer.zero_grad()
        (model(torch.ones(2, 3)).sum() * (NAN if step == 5 else 1.0)).backward()
        optimizer.step()


def bad_gradient() -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(9):
        optimizer.zero_grad()
        out = model(torch.ones(2, 3))
        loss = out.square().mean()
        if step == 5:
            loss = loss + torch.sqrt(out.sum() * 0)
        loss.backward()
        optimizer.step()


def bad_update() -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(9):
        optimizer.zero_grad()
        (100 * model(torch.ones(2, 3)).square().mean()).backward()
        optimizer.param_groups[0]["lr"] = 3e38 if step == 5 else 1e-4
        optimizer.step()


def accumulated() -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    for number in range(36):
        (model(torch.ones(2, 3)).sum() * (NAN if number == 22 else 0.25)).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def scaled() -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(9):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum() * (NAN if step == 5 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


def by_hand() -> None:
    weight = torch.ones(3, requires_grad=True)
    for step in range(9):
        (weight.square().sum() * (NAN if step == 5 else 1.0)).backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None


def generator_of_two() -> None:
    """The discriminator steps three times as often, and the generator's loss reaches it too."""
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
    ours = SGD(generator.parameters(), lr=0.01)
    theirs = SGD(discriminator.parameters(), lr=0.01)
    for step in range(9):
        for _ in range(3):
            theirs.zero_grad()
            discriminator(generator(torch.ones(2, 2)).detach()).square().mean().backward()
            theirs.step()
        ours.zero_grad()
        factor = NAN if step == 5 else 1.0
        (discriminator(generator(torch.ones(2, 2))).square().mean() * factor).backward()
        ours.step()


@pytest.mark.parametrize(("on_nan", "trace"), MODES)
@pytest.mark.parametrize(
    "script",
    [bad_loss, bad_gradient, bad_update, accumulated, scaled, by_hand, generator_of_two],
)
def test_the_first_bad_step_has_the_same_number_in_every_mode(
    script: Callable[[], None], on_nan: Any, trace: Any
) -> None:
    torch.manual_seed(0)
    guard = Guard(GuardSettings(on_nan=on_nan, trace=trace))
    guard.attach(*([recover_everything(guard)] if on_nan == "recover" else ()))
    try:
        script()
    except TrainingAbortedError:
        assert on_nan == "stop"
    guard.close()
    steps = [incident.step for incident in guard.incidents]
    assert steps[0] == 5
    if script is not generator_of_two:  # there, two optimizers have their own numbers
        assert len(steps) == len(set(steps))
    if on_nan == "recover":
        assert steps == [5]


def test_recover_where_an_update_has_no_gradients_of_ours_warns_and_says_why_once() -> None:
    guard = Guard(GuardSettings(on_nan="recover"))
    guard.attach(recover_everything(guard))
    weight = torch.ones(3, requires_grad=True)
    for step in range(9):
        loss = weight.square().sum() * (NAN if step == 5 else 1.0)
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= 0.01 * gradient
    guard.close()
    first, *later = guard.incidents
    assert first.outcome.strategy == "warn"
    assert first.outcome.detail.startswith("no torch optimizer makes this update")
    assert {each.outcome.detail for each in later} == {"nothing was changed"}
    after = guard.aftermath()
    assert (after.updates, after.bad_updates, after.is_last_loss_bad) == (9, 4, True)


def test_the_share_of_bad_updates_is_that_of_the_worst_optimizer() -> None:
    guard = Guard(GuardSettings(on_nan="recover"))
    guard.attach(recover_everything(guard))
    generator_of_two()
    bad_loss()
    guard.close()
    after = guard.aftermath()
    assert (after.updates, after.bad_updates) == (9, 1)
    assert after.loss_before is not None
    assert after.loss_after is not None


def test_warnings_beyond_the_most_that_are_kept_are_still_counted() -> None:
    guard = Guard(GuardSettings(on_nan="warn"))
    guard.attach()
    weight = torch.ones(3, requires_grad=True)
    for _ in range(70):
        (weight.sum() * NAN).backward()
    guard.close()
    assert (len(guard.incidents), guard.aftermath().bad_updates) == (50, 70)
