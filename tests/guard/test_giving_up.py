"""A bug that no recovery helps against: the run ends with its reason and its last good weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import answers
from torch import Tensor, nn

import stayfinite
from stayfinite import NaNRecoveryManager, RecoveryConfig, Rung, TrainingAbortedError

LADDER = RecoveryConfig(
    ladder=[Rung("skip", budget=50, in_a_row=2), Rung("lower_lr"), Rung("rewind", budget=2)],
    max_consecutive_nans=8,
    snapshot_every=5,
    rewind_snapshots=0,
    rewind_skip_batches=2,
)


class Training:
    """Good up to batch `bug`, and bad from there on, but for those batches that are `fine`."""

    def __init__(self, bug: int, fine: tuple[int, ...] = ()) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.bug, self.fine = bug, fine
        self.good: list[Tensor] = [self.weight()]

    def weight(self) -> Tensor:
        return self.model.weight.detach().clone()

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        torch.manual_seed(number)
        target = torch.ones(4, 1)
        if number >= self.bug and number not in self.fine:
            target = target / (target * 0)
        (self.model(torch.randn(4, 3)) - target).square().mean().backward()
        self.optimizer.step()

    def run(self, call: Callable[[int], object]) -> None:
        for number in range(60):
            before = self.weight()
            call(number)
            if not torch.equal(before, self.weight()):
                self.good.append(self.weight())


def given_up(
    training: Training, *, ours: bool, config: RecoveryConfig = LADDER
) -> tuple[TrainingAbortedError, stayfinite.Guard]:
    guard = stayfinite.watch(training.model, training.optimizer, config=config, sinks=[])
    with pytest.raises(TrainingAbortedError) as stopped, guard:
        training.run((lambda number: guard.step(training.step, number)) if ours else training.step)
    return stopped.value, guard


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("bug", [9, 10, 14])
def test_the_weights_of_the_last_good_step_are_left(ours: bool, bug: int) -> None:
    training = Training(bug)
    error, guard = given_up(training, ours=ours)
    outcomes = [incident.outcome for incident in guard.incidents]
    assert [each.strategy for each in outcomes if each][-2:] == ["rewind", "abort"]
    assert "rewind is not repeated, because the same step was bad again" in str(outcomes[-1])
    newest = bug - bug % 5
    assert f"back at the snapshot of step {newest};" in str(outcomes[-2])
    plain = Training(bug)
    for number in range(bug):
        plain.step(number)
    assert torch.equal(training.weight(), plain.weight())
    lost = "with the weights from before it went back"
    assert (lost if bug > newest else "those of the last good step") in str(error)


def test_the_error_names_cause_and_line() -> None:
    error, _ = given_up(Training(9), ours=True)
    assert "division_by_zero at " in str(error)
    assert "test_giving_up.py:" in str(error)
    assert "\n" not in str(error)


def test_without_going_back_the_words_are_those_of_the_last_good_step() -> None:
    training = Training(9)
    config = RecoveryConfig(primary_strategy="skip", max_consecutive_nans=3)
    error, _ = given_up(training, ours=True, config=config)
    assert "training stops here; the weights are those of the last good step; " in str(error)
    assert "3 of 12 steps (25%) were bad, 3 of them by division_by_zero" in str(error)
    assert "; next: Division by zero" in str(error)
    assert torch.equal(training.weight(), training.good[9])


def test_what_was_left_is_forgotten_when_training_has_come_as_far_again() -> None:
    training = Training(9, fine=tuple(range(12, 24)))  # one rewind helps: 12 good steps follow
    config = RecoveryConfig(
        ladder=[Rung("rewind")],
        snapshot_every=5,
        rewind_snapshots=0,
        rewind_skip_batches=2,
        deescalate_after=1000,
    )
    error, guard = given_up(training, ours=True, config=config)
    outcomes = [incident.outcome.strategy for incident in guard.incidents if incident.outcome]
    assert outcomes == ["rewind", "abort"]
    assert torch.equal(training.weight(), training.good[-1])
    assert "; the weights are those of the last good step; " in str(error)


def test_a_detour_that_is_given_up_early_gives_the_farther_weights_back() -> None:
    training = Training(9, fine=(12, 13))
    config = RecoveryConfig(
        ladder=[Rung("rewind")],
        snapshot_every=5,
        rewind_snapshots=0,
        rewind_skip_batches=2,
        deescalate_after=1000,
    )
    given_up(training, ours=True, config=config)
    plain = Training(9)
    for number in range(9):
        plain.step(number)
    assert torch.equal(training.weight(), plain.weight())


def test_a_manager_alone_gives_them_back_too() -> None:
    training = Training(9)
    manager = NaNRecoveryManager(
        RecoveryConfig(primary_strategy="rewind", rewind_snapshots=0, max_consecutive_nans=2)
    )
    for number in range(9):
        if number % 4 == 0:
            manager.snapshot(training.model, training.optimizer, step=number)
        training.step(number)
        manager.record_good_step()
    best = training.weight()
    bad = stayfinite.NaNReport(
        has_nan=True, nan_type=stayfinite.NaNType.NAN, location="loss", tensor_shape=()
    )
    assert manager.recover(bad, training.model, training.optimizer, step=9)
    assert not torch.equal(training.weight(), best)
    assert not manager.recover(bad, training.model, training.optimizer, step=10)
    assert torch.equal(training.weight(), best)


RANKS = """
import stayfinite
from stayfinite import RecoveryConfig, Rung
from torch.nn.parallel import DistributedDataParallel

CONFIG = RecoveryConfig(
    ladder=[Rung("skip", budget=50, in_a_row=2), Rung("lower_lr"), Rung("rewind", budget=2)],
    max_consecutive_nans=8, snapshot_every=5, rewind_snapshots=0, rewind_skip_batches=2,
)

def run(bad):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(number):
        optimizer.zero_grad()
        target = torch.ones(4, 1)
        if number >= 9 and me in bad:
            target = target / (target * 0)
        (model(torch.randn(4, 3)) - target).square().mean().backward()
        optimizer.step()

    weights, error = [], ""
    guard = stayfinite.watch(model, optimizer, config=CONFIG, sinks=[])
    try:
        with guard:
            for number in range(60):
                guard.step(step, number)
                weights.append(model.module.weight.tolist())
    except stayfinite.TrainingAbortedError as stopped:
        error = str(stopped)
    return {
        "error": error,
        "done": [i.outcome.detail for i in guard.incidents],
        "is_last_good": model.module.weight.tolist() == weights[8],
        "weights": model.module.weight.tolist(),
    }

said = [run([0, 1]), run([1])]
"""


def test_ranks_give_up_together_with_their_last_good_weights(tmp_path: Path) -> None:
    for first, second in zip(*answers(tmp_path, RANKS), strict=True):
        assert first["weights"] == second["weights"]
        for said in (first, second):
            assert said["is_last_good"]
            assert any("back at the snapshot of step 5;" in done for done in said["done"])
            assert "the weights from before it went back" in said["error"]
            assert " on rank " in said["error"]
            assert "(division_by_zero at " in said["error"]
