"""Weights that were bad in the file, data that was bad in the batch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from scenes import Net, guarded
from torch.optim import Adam

from stayfinite.errors import TrainingAbortedError


def bad_file(path: Path) -> Path:
    state = Net().state_dict()
    state["first.bias"][1] = math.inf
    state["second.weight"][0, 0] = math.nan
    torch.save(state, path)
    return path


@pytest.mark.parametrize("assign", [True, False])
def test_checkpoint_with_bad_keys_is_named_with_them(tmp_path: Path, assign: bool) -> None:
    path = bad_file(tmp_path / "last.pt")
    net = Net()
    with guarded(trace="start") as guard:
        net.load_state_dict(torch.load(path, weights_only=True), assign=assign)
        with pytest.raises(TrainingAbortedError):
            net(torch.ones(2, 3)).mean().backward()
    (incident,) = guard.incidents
    assert incident.origin.phase == "checkpoint"
    assert incident.diagnosis.cause == "checkpoint_corrupt"
    assert "first.bias, second.weight" in incident.diagnosis.why


def test_optimizer_state_that_was_bad_in_the_file_is_named() -> None:
    net = Net()
    optimizer = Adam(net.parameters())
    net(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] * math.nan
    with guarded(trace="start") as guard:
        optimizer.load_state_dict(state)
        net(torch.ones(2, 3)).mean().backward()
        with pytest.raises(TrainingAbortedError):
            optimizer.step()
    (incident,) = guard.incidents
    assert incident.reports[0].location == "parameters.first.weight"
    assert incident.diagnosis.cause == "checkpoint_corrupt"
    assert "state.0.exp_avg" in incident.diagnosis.why


def test_healthy_checkpoint_is_loaded_as_ever() -> None:
    net, other = Net(), Net()
    with guarded(trace="start") as guard:
        result = net.load_state_dict(state_dict=other.state_dict(), strict=True)
    assert result.missing_keys == []
    assert torch.equal(net.first.weight, other.first.weight)
    assert guard.incidents == []


def test_bad_input_of_the_model_is_reported_beside_the_loss() -> None:
    net, batch = Net(), torch.ones(4, 3)
    batch[3, 2] = math.nan
    with guarded(trace="start") as guard, pytest.raises(TrainingAbortedError):
        net(batch).mean().backward()
    (incident,) = guard.incidents
    assert [report.location for report in incident.reports] == ["loss", "inputs.0"]
    assert incident.origin.phase == "data"
    assert incident.diagnosis.cause == "bad_input_data"
    assert "[3, 2]" in incident.diagnosis.why


def test_weight_that_was_bad_before_the_watch_is_no_bad_data() -> None:
    net = Net()
    net.first.weight.data[0, 0] = math.nan
    with guarded(trace="start") as guard, pytest.raises(TrainingAbortedError):
        net(torch.ones(2, 3)).mean().backward()
    assert guard.incidents[0].origin.phase == "init"
    assert guard.incidents[0].diagnosis.cause == "bad_init"
