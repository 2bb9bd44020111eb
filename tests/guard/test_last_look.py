"""What is looked at when the script is over, and what is only said."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from torch import nn
from torch.optim import SGD

from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard import guard as looking
from stayfinite.guard.discover import recover_everything


def attached(on_nan: Any) -> Guard:
    guard = Guard(GuardSettings(on_nan=on_nan))
    guard.attach(*([recover_everything(guard)] if on_nan == "recover" else ()))
    return guard


def poison(tensor: torch.Tensor, value: float = math.nan) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] = value


@pytest.mark.parametrize("on_nan", ["stop", "warn", "recover"])
def test_weights_that_are_bad_at_the_end_are_an_incident_and_stay(on_nan: str) -> None:
    guard = attached(on_nan)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    poison(model.weight)
    guard.end({"model": model})
    guard.close()
    (incident,) = guard.incidents
    assert incident.outcome.strategy == "none"
    assert "when the script had ended" in incident.outcome.detail
    assert guard.stopped == (on_nan == "stop")
    assert guard.aftermath().bad_at_end == ("parameters.weight",)
    assert model.weight.isnan().any()


@pytest.mark.parametrize("on_nan", ["stop", "warn", "recover"])
def test_weights_that_are_updated_by_hand_are_looked_at(on_nan: str) -> None:
    guard = attached(on_nan)
    weight = torch.ones(3, requires_grad=True)
    for _ in range(3):
        weight.sum().backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
    poison(weight)
    guard.end({})
    guard.close()
    assert [incident.step for incident in guard.incidents] == [3]
    assert guard.aftermath().bad_at_end == ("parameters.0",)


def test_averaged_weights_are_mentioned_and_no_incident() -> None:
    guard = attached("stop")
    model, average = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    poison(average.bias, math.inf)
    guard.end({"model": model, "average": average})
    guard.close()
    assert guard.incidents == []
    assert guard.aftermath().bad_at_end == ("average.bias",)


def test_a_buffer_may_hold_an_inf_on_purpose() -> None:
    guard = attached("stop")
    model = nn.Linear(3, 1)
    model.register_buffer("mask", torch.full((3,), -math.inf))
    unused = nn.Module()
    unused.register_buffer("memory", torch.full((3,), math.nan))
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    guard.end({"model": model, "unused": unused})
    assert guard.aftermath().bad_at_end == ()
    poison(model.mask)
    again = looking.LastLook(guard.evidence)
    list(again.take({"model": model}))
    assert again.bad == ["model.mask"]
    guard.close()


def test_a_look_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = attached("warn")
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()

    def fails(*_: Any) -> bool:
        raise RuntimeError("device lost")

    monkeypatch.setattr(looking, "all_finite", fails)
    guard.end({})
    monkeypatch.undo()
    guard.close()
    assert guard.aftermath().unseen == "RuntimeError: device lost"
