"""RESET_MODEL from a checkpoint on disk: all of it or nothing, and only where memory has none."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import NAN, SmallJob, report
from moments import memory_of
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel

import stayfinite
from stayfinite import RecoveryConfig, TrainingAbortedError, save_checkpoint
from stayfinite.recover.actions import Cannot, Done, Situation, Trouble, act
from stayfinite.recover.config import RecoveryStrategy
from stayfinite.recover.manager import NaNRecoveryManager

RESET, SKIP, ABORT = (
    RecoveryStrategy.RESET_MODEL,
    RecoveryStrategy.SKIP_STEP,
    RecoveryStrategy.ABORT,
)


def manager_at(place: Path, **options: Any) -> NaNRecoveryManager:
    return NaNRecoveryManager(
        RecoveryConfig(primary_strategy=RESET, checkpoint_path=place, **options)
    )


def poison(job: SmallJob) -> None:
    """Bad weights and bad moments."""
    with torch.no_grad():
        job.model[0].weight.fill_(NAN)
    job.optimizer.state[job.model[0].weight]["exp_avg"].fill_(NAN)


def recovered(manager: NaNRecoveryManager, job: SmallJob, step: int = 5) -> bool:
    return manager.recover(report(), job.model, job.optimizer, job.scaler, step)


def test_weights_and_optimizer_state_come_back_from_the_file(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "good.ckpt"
    save_checkpoint(file, model=job.model, optimizer=job.optimizer, step=12)
    good = job.state()
    job.backward(NAN)
    job.update()
    random = torch.get_rng_state()
    manager = manager_at(file)
    assert recovered(manager, job)
    assert job.state() == good
    assert job.gradients() == []
    assert torch.equal(torch.get_rng_state(), random)
    (recovery,) = manager.get_recovery_history()
    assert (recovery.strategy, recovery.checkpoint) == (RESET, str(file))
    assert recovery.detail == f"back at the checkpoint {file} of step 12"
    job.backward()
    job.update()
    assert job.is_finite()


def test_snapshot_in_memory_is_the_first_choice(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "older.ckpt"
    save_checkpoint(file, model=job.model, optimizer=job.optimizer)
    job.backward()
    job.update()
    manager = manager_at(file)
    manager.snapshot(job.model, job.optimizer, step=2)
    newer = job.state()
    poison(job)
    assert recovered(manager, job)
    assert job.state() == newer
    assert manager.get_recovery_history()[0].checkpoint is None


def test_file_is_loaded_where_the_snapshot_cannot_be_used(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "good.ckpt"
    save_checkpoint(file, model=job.model, optimizer=job.optimizer)
    good, manager = job.state(), manager_at(file)
    kept = manager.snapshot(job.model, job.optimizer)
    memory_of(kept, "parameters.0.weight").fill_(NAN)
    poison(job)
    assert recovered(manager, job)
    assert job.state() == good


def missing(file: Path, job: SmallJob) -> None:
    pass


def empty_folder(file: Path, job: SmallJob) -> None:
    file.mkdir()


def cut_short(file: Path, job: SmallJob) -> None:
    save_checkpoint(file, model=job.model, optimizer=job.optimizer)
    file.write_bytes(file.read_bytes()[:-20])


def flipped_bit(file: Path, job: SmallJob) -> None:
    save_checkpoint(file, model=job.model, optimizer=job.optimizer)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))


def bad_values(file: Path, job: SmallJob) -> None:
    state = {name: torch.full_like(value, NAN) for name, value in job.model.state_dict().items()}
    torch.save(state, file)


def another_model(file: Path, job: SmallJob) -> None:
    save_checkpoint(file, model=nn.Linear(5, 5))


def another_optimizer(file: Path, job: SmallJob) -> None:
    save_checkpoint(file, model=job.model, optimizer=SGD(job.model.parameters(), lr=0.1))


def no_checkpoint(file: Path, job: SmallJob) -> None:
    file.write_text("weights")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (missing, "no such file"),
        (empty_folder, "without a checkpoint"),
        (cut_short, "was not loaded|cannot be"),
        (flipped_bit, "was not loaded|cannot be"),
        (bad_values, "was not loaded.*NaN"),
        (another_model, "was not loaded"),
        (another_optimizer, "was saved from SGD"),
        (no_checkpoint, "cannot be"),
    ],
)
def test_file_that_cannot_be_used_is_a_reason_and_the_fallback_follows(
    make: Callable[[Path, SmallJob], None], said: str, tmp_path: Path
) -> None:
    job, file = SmallJob(), tmp_path / "last.ckpt"
    make(file, job)
    job.backward()
    job.update()
    before, manager = job.state(), manager_at(file)
    job.backward(NAN)
    assert recovered(manager, job)
    (recovery,) = manager.get_recovery_history()
    assert recovery.strategy is SKIP
    ((strategy, reason),) = recovery.tried
    assert strategy is RESET
    assert reason.startswith("there is no snapshot, and ")
    assert "\n" not in reason
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(reason)
    assert job.state() == before
    job.update()
    assert job.state() == before


def test_newest_good_one_of_a_folder_is_loaded(tmp_path: Path) -> None:
    job = SmallJob()
    states = []
    for number in range(3):
        file = tmp_path / f"step-{number}.ckpt"
        save_checkpoint(file, model=job.model, optimizer=job.optimizer, step=number)
        states.append(job.state())
        job.backward()
        job.update()
    newest = tmp_path / "step-2.ckpt"
    newest.write_bytes(newest.read_bytes()[:200])
    manager = manager_at(tmp_path)
    poison(job)
    assert recovered(manager, job)
    assert job.state() == states[1]
    assert manager.get_recovery_history()[0].checkpoint == str(tmp_path / "step-1.ckpt")


def test_folder_of_bad_ones_says_what_is_wrong_with_each(tmp_path: Path) -> None:
    job = SmallJob()
    for name in ("a.ckpt", "b.ckpt"):
        flipped_bit(tmp_path / name, job)
    manager = manager_at(tmp_path)
    job.backward(NAN)
    assert recovered(manager, job)
    ((_, reason),) = manager.get_recovery_history()[0].tried
    assert reason.index("b.ckpt") < reason.index("a.ckpt")  # the newest first


def test_file_of_weights_alone_leaves_a_good_optimizer_as_it_is(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "weights.pt"
    torch.save(job.model.state_dict(), file)
    weights = [param.detach().clone() for param in job.model.parameters()]
    job.backward()
    job.update()
    moments = {name: value for name, value in job.state().items() if name.startswith("optimizer")}
    with torch.no_grad():
        job.model[0].weight.fill_(NAN)
    manager = manager_at(file)
    assert recovered(manager, job)
    assert all(map(torch.equal, weights, job.model.parameters()))
    assert {name: job.state()[name] for name in moments} == moments
    assert "the optimizer's state is not in it" in manager.get_recovery_history()[0].detail


def test_file_of_weights_alone_cannot_mend_a_bad_optimizer(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "weights.pt"
    torch.save(job.model.state_dict(), file)
    poison(job)
    before, manager = job.state(), manager_at(file)
    assert not recovered(manager, job)
    (recovery,) = manager.get_recovery_history()
    assert recovery.strategy is ABORT
    assert "has no state of the optimizer, whose own is bad" in recovery.tried[0][1]
    assert job.state() == before


def test_failure_halfway_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, file = SmallJob(GradScaler("cpu", init_scale=64.0)), tmp_path / "good.ckpt"
    save_checkpoint(file, model=job.model, optimizer=job.optimizer, scaler=job.scaler)
    job.backward()
    job.update()
    before = job.state()

    def refuse(state: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(job.scaler, "load_state_dict", refuse)
    job.backward(NAN)
    manager = manager_at(file)
    assert recovered(manager, job)
    assert manager.get_recovery_history()[0].strategy is SKIP
    assert job.state() == before


def test_scaler_schedule_and_average_come_back_with_it(tmp_path: Path) -> None:
    job, file = SmallJob(GradScaler("cpu", init_scale=64.0)), tmp_path / "good.ckpt"
    schedule = ExponentialLR(job.optimizer, 0.5)
    average = AveragedModel(job.model)
    more = {"scheduler": schedule, "ema": average, "scaler": job.scaler}
    save_checkpoint(file, model=job.model, optimizer=job.optimizer, **more)
    averaged = average.module[0].weight.detach().clone()
    config = RecoveryConfig(checkpoint_path=file)
    job.backward()
    job.update()
    schedule.step()
    job.scaler._scale.fill_(1.0)
    with torch.no_grad():
        average.module[0].weight.fill_(NAN)
    situation = Situation(
        model=job.model,
        optimizer=job.optimizer,
        scaler=job.scaler,
        schedulers=(schedule,),
        averages=(average,),
    )
    assert isinstance(act(RESET, situation, config, Trouble()), Done)
    assert job.scaler.get_scale() == 64.0
    assert (schedule.last_epoch, schedule.get_last_lr()) == (0, [0.01])
    assert job.optimizer.param_groups[0]["lr"] == 0.01
    assert torch.equal(average.module[0].weight, averaged)


def test_rate_stays_where_the_file_has_no_schedule(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "good.ckpt"
    save_checkpoint(file, model=job.model, optimizer=job.optimizer)
    job.optimizer.param_groups[0]["lr"] = 0.002
    poison(job)
    assert recovered(manager_at(file), job)
    assert job.optimizer.param_groups[0]["lr"] == 0.002


def test_bad_parameters_that_are_not_the_models_are_not_mended_by_its_file(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "good.ckpt"
    save_checkpoint(file, model=job.model)
    other = nn.Parameter(torch.tensor([NAN]))
    optimizer = SGD([*job.model.parameters(), other], lr=0.1)
    situation = Situation(model=job.model, optimizer=optimizer)
    answer = act(RESET, situation, RecoveryConfig(checkpoint_path=file), Trouble())
    assert isinstance(answer, Cannot)
    assert "bad parameters that are not the model's" in answer.reason
    without = act(
        RESET,
        Situation(model=None, optimizer=job.optimizer),
        RecoveryConfig(checkpoint_path=file),
        Trouble(),
    )
    assert isinstance(without, Cannot)


def test_giving_up_leaves_the_weights_of_the_file_rather_than_bad_ones(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "good.ckpt"
    save_checkpoint(file, model=job.model, optimizer=job.optimizer)
    good = job.state()
    poison(job)
    manager = NaNRecoveryManager(RecoveryConfig(primary_strategy=ABORT, checkpoint_path=file))
    assert not recovered(manager, job)
    assert job.state() == good
    assert manager.get_recovery_history()[0].detail.startswith(
        "training stops here; back at the checkpoint"
    )


def test_same_file_is_not_loaded_for_ever(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "good.ckpt"
    save_checkpoint(file, model=job.model, optimizer=job.optimizer)
    manager = manager_at(file, max_consecutive_nans=3)
    for step in range(3):
        job.backward(NAN)
        assert recovered(manager, job, step)
        manager.record_good_step()
    job.backward(NAN)
    assert recovered(manager, job, 3)
    manager.record_good_step()
    strategies = [each.strategy for each in manager.get_recovery_history()]
    assert strategies == [RESET, RESET, RESET, SKIP]
    assert "was loaded 3 times" in manager.get_recovery_history()[-1].tried[0][1]
    later = os.stat(file).st_mtime_ns + 10**9
    os.utime(file, ns=(later, later))  # as a newer one would have
    job.backward(NAN)
    assert recovered(manager, job, 4)
    assert manager.get_recovery_history()[-1].strategy is RESET


def good_steps(model: nn.Module, optimizer: Any, count: int = 3) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("is_ours", [False, True])
def test_guarded_loop_that_begins_with_bad_weights_goes_on_from_the_file(
    is_ours: bool, tmp_path: Path
) -> None:
    job, file = SmallJob(), tmp_path / "good.ckpt"
    save_checkpoint(file, model=job.model, optimizer=job.optimizer, step=40)
    with torch.no_grad():
        job.model[0].weight.fill_(NAN)
    config = RecoveryConfig(primary_strategy=RESET, checkpoint_path=file)

    def step(x: torch.Tensor) -> float:
        job.optimizer.zero_grad()
        loss = job.model(x).pow(2).mean()
        loss.backward()
        job.optimizer.step()
        return loss.item()

    with stayfinite.watch(job.model, job.optimizer, config=config, sinks=[]) as guard:
        losses = []
        for number in range(6):
            x = torch.randn(4, 3)
            if number == 4:
                x[0, 0] = math.inf
            losses.append(guard.step(step, x) if is_ours else step(x))
        (job_of_guard,) = guard.jobs.values()
        assert len(job_of_guard.ring) > 0
        first = guard.incidents[0].outcome
        assert (first.strategy, "good.ckpt of step 40" in first.detail) == ("reset", True)
        assert len(guard.incidents) == 2
        assert guard.incidents[1].outcome.detail.startswith("back at the snapshot")
    assert job.is_finite()
    assert all(math.isfinite(losses[number] or math.nan) for number in (1, 2, 3, 5))


def test_guarded_loop_with_a_bad_file_stops_before_anything_is_half_loaded(tmp_path: Path) -> None:
    job, file = SmallJob(), tmp_path / "bad.ckpt"
    bad_values(file, job)
    with torch.no_grad():
        job.model[0].weight.fill_(NAN)
    before = job.state()
    config = RecoveryConfig(primary_strategy=RESET, checkpoint_path=file)
    with (
        stayfinite.watch(job.model, job.optimizer, config=config, sinks=[]) as guard,
        pytest.raises(TrainingAbortedError, match="no snapshot to go back to"),
    ):
        good_steps(job.model, job.optimizer)
    assert job.state() == before
    (recovery,) = guard.manager.get_recovery_history()
    assert "bad.ckpt was not loaded" in recovery.tried[0][1]
