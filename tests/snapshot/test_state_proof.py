"""check_restore: exact on a whole job, and each forgotten part is caught by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moments import Everything
from torch import nn

from stayfinite.errors import NonFiniteError, SnapshotError
from stayfinite.snapshot import TrainingState
from stayfinite.snapshot.walk import PARTS

FIRST_NAMED = {
    "parameters": "parameters.first.weight",
    "buffers": "buffers.seen",
    "attributes": "attributes.center",
    "gradients": "gradients.first.weight",
    "optimizer": "optimizer.first.weight.step",
    "param_groups": "param_groups.0.lr",
    "scheduler": "scheduler.last_epoch",
    "scaler": "scaler._growth_tracker",
    "ema": "ema.parameters.module.first.weight",
    "random": "random.python",
    "loader": "loader",
}


def job() -> tuple[Everything, TrainingState]:
    training = Everything()
    training.step()
    training.step()
    return training, TrainingState(training.model, training.optimizer, **training.members)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_whole_job_is_exact_and_as_before_afterwards(steps: int) -> None:
    training, state = job()
    for _ in range(steps):
        training.step()
    before = training.bytes()
    state.check_restore(training.step)
    assert training.bytes() == before


def test_every_part_has_its_turn() -> None:
    assert set(FIRST_NAMED) == set(PARTS)


@pytest.mark.parametrize("forgotten", PARTS)
def test_forgetting_any_one_part_is_caught_by_name(forgotten: str) -> None:
    training, state = job()
    kept = [part for part in PARTS if part != forgotten]
    with pytest.raises(SnapshotError) as caught:
        state.check_restore(training.step, parts=kept)
    assert str(caught.value).startswith(f"{FIRST_NAMED[forgotten]} is not as before")


@pytest.mark.parametrize("missing", ["scheduler", "scaler", "loader", "generators"])
def test_member_that_was_not_given_is_felt_in_the_next_step(missing: str) -> None:
    training, _ = job()
    members = {name: member for name, member in training.members.items() if name != missing}
    if missing == "scaler":
        training.scaler.update(2.0)  # so that the next growth is seen
        training.scaler._growth_tracker.fill_(1)  # type: ignore[union-attr]
    state = TrainingState(training.model, training.optimizer, **members)
    with pytest.raises(SnapshotError, match="differs when the same step is run again"):
        state.check_restore(training.step)


def test_step_that_is_not_deterministic_is_told() -> None:
    net = nn.Linear(1, 1)
    numbers = iter(range(100))

    def step() -> None:
        net.weight.data.fill_(next(numbers))

    with pytest.raises(SnapshotError, match=r"parameters\.weight differs .* not deterministic"):
        TrainingState(net).check_restore(step)


def test_all_is_as_before_when_the_step_fails() -> None:
    training, state = job()
    before = training.bytes()

    def step() -> None:
        training.step()
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        state.check_restore(step)
    assert training.bytes() == before


def test_bad_state_is_refused_before_anything_runs() -> None:
    training, state = job()
    training.model.first.weight.data[0, 0] = torch.nan
    calls: list[Any] = []
    with pytest.raises(NonFiniteError, match=r"parameters\.first\.weight"):
        state.check_restore(lambda: calls.append(1))
    assert calls == []


def test_flags_and_structure_count_too() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Dropout())

    def step() -> None:
        net[1].eval()

    state = TrainingState(net)
    state.check_restore(step)
    kept = [part for part in PARTS if part != "attributes"]
    with pytest.raises(SnapshotError, match=r"^attributes\.1\.training is not as before"):
        state.check_restore(step, parts=kept)


@pytest.mark.parametrize(
    "odd",
    [
        torch.eye(2).to_sparse(),
        torch.ones(2).expand(3, 2),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(0),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.float8_e5m2),
        nn.UninitializedBuffer(),
    ],
    ids=lambda odd: f"{type(odd).__name__}-{odd.dtype}",
)
def test_tensors_of_every_kind_can_be_compared(odd: Any) -> None:
    net = nn.Linear(1, 1)
    net.register_buffer("odd", odd)

    def step() -> None:
        net.weight.data.add_(1)

    TrainingState(net).check_restore(step)
