"""NaNRecoveryManager in a plain loop: streaks, fallbacks, snapshots, and what it remembers."""

from __future__ import annotations

import dataclasses
import doctest
import logging
from types import ModuleType
from typing import Any

import pytest
import torch
from jobs import INF, NAN, SmallJob, report
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from stayfinite import NonFiniteError, clip
from stayfinite.recover import config, policy
from stayfinite.recover import manager as manager_module
from stayfinite.recover.actions import Situation
from stayfinite.recover.advice import Recovery
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy, Rung
from stayfinite.recover.float32 import is_raised
from stayfinite.recover.manager import NaNRecoveryManager

SKIP, SCALE = RecoveryStrategy.SKIP_STEP, RecoveryStrategy.REDUCE_SCALE
CLIP, RESET = RecoveryStrategy.CLIP_GRADIENTS, RecoveryStrategy.RESET_MODEL
LOWER, REWIND = RecoveryStrategy.LOWER_LR, RecoveryStrategy.REWIND
RAISE, ABORT = RecoveryStrategy.RAISE_PRECISION, RecoveryStrategy.ABORT


def bad_step(manager: NaNRecoveryManager, job: SmallJob, step: int = 0) -> bool:
    job.backward(NAN)
    return manager.recover(report(), job.model, job.optimizer, job.scaler, step)


def manager_with(primary: RecoveryStrategy, **options: Any) -> NaNRecoveryManager:
    return NaNRecoveryManager(RecoveryConfig(primary_strategy=primary, **options))


def chosen(manager: NaNRecoveryManager) -> list[RecoveryStrategy]:
    return [recovery.strategy for recovery in manager.get_recovery_history()]


def test_streak_reaches_its_limit_and_ends_harmlessly() -> None:
    job, manager = SmallJob(), NaNRecoveryManager()
    before = job.state()
    answers = []
    for step in range(5):
        assert not manager.should_abort()
        answers.append(bad_step(manager, job, step))
        job.update()
    assert answers == [True, True, True, True, False]
    assert manager.should_abort()
    assert job.state() == before


def test_good_step_ends_the_streak_and_takes_the_abort_back() -> None:
    job, manager = SmallJob(), manager_with(SKIP, max_consecutive_nans=2)
    assert bad_step(manager, job)
    manager.record_good_step()
    assert bad_step(manager, job)
    assert not bad_step(manager, job)
    assert not bad_step(manager, job)
    assert manager.should_abort()
    manager.record_good_step()
    assert not manager.should_abort()
    assert bad_step(manager, job)


def test_strategy_that_cannot_help_falls_back_and_says_why() -> None:
    job, manager = SmallJob(), NaNRecoveryManager()
    assert bad_step(manager, job, step=12)
    (recovery,) = manager.get_recovery_history()
    assert recovery.strategy is SKIP
    assert recovery.tried == ((SCALE, "there is no enabled loss scaler"),)
    assert (recovery.step, recovery.location) == (12, "gradients.0.weight")
    assert recovery.succeeded


def test_nothing_left_to_try_is_a_clean_stop() -> None:
    job, manager = SmallJob(), manager_with(RESET, fallback_strategy=REWIND)
    before = job.state()
    assert not bad_step(manager, job)
    (recovery,) = manager.get_recovery_history()
    assert recovery.strategy is ABORT
    assert not recovery.succeeded
    assert [strategy for strategy, _ in recovery.tried] == [RESET, REWIND]
    job.update()
    assert job.state() == before


def test_first_bad_step_gets_the_primary_strategy_and_the_next_the_fallback() -> None:
    job, manager = SmallJob(GradScaler("cpu")), NaNRecoveryManager()
    for _ in range(3):
        bad_step(manager, job)
    manager.record_good_step()
    bad_step(manager, job)
    assert chosen(manager) == [SCALE, SKIP, SKIP, SCALE]


def test_ladder_is_climbed_and_left_again() -> None:
    ladder = (Rung(SKIP, 2), Rung(CLIP), Rung(LOWER))
    config = RecoveryConfig(ladder=ladder, deescalate_after=2, max_consecutive_nans=9)
    job, manager = SmallJob(), NaNRecoveryManager(config)
    for _ in range(4):
        bad_step(manager, job)
    manager.record_good_step()
    manager.record_good_step()
    bad_step(manager, job)
    bad_step(manager, job)
    assert not bad_step(manager, job)
    assert chosen(manager) == [SKIP, SKIP, CLIP, LOWER, CLIP, LOWER, ABORT]


def test_history_is_a_list_of_frozen_records() -> None:
    job, manager = SmallJob(GradScaler("cpu", init_scale=64.0)), NaNRecoveryManager()
    assert manager.get_recovery_history() == []
    bad_step(manager, job, step=4)
    history = manager.get_recovery_history()
    (recovery,) = history
    assert isinstance(recovery, Recovery)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recovery.step = 5  # type: ignore[misc]
    history.clear()
    assert len(manager.get_recovery_history()) == 1
    assert (recovery.lr, recovery.scale, recovery.dtype) == (0.01, 64.0, "float32")
    assert recovery.bad_in_a_row == 1


def test_cause_and_module_are_remembered() -> None:
    job, manager = SmallJob(), manager_with(SKIP)
    situation = Situation(model=job.model, optimizer=job.optimizer, module="0")
    recovery = manager.respond([report("loss")], situation, step=3, cause="log_of_zero")
    assert (recovery.cause, recovery.module, recovery.location) == ("log_of_zero", "0", "loss")


def test_no_report_is_needed() -> None:
    job, manager = SmallJob(), manager_with(SKIP)
    assert manager.recover(None, job.model, job.optimizer)
    assert manager.get_recovery_history()[0].location == ""


def test_report_that_all_is_well_is_no_bad_step() -> None:
    job, manager = SmallJob(), manager_with(SKIP)
    job.backward()
    clean = dataclasses.replace(report(), has_nan=False)
    assert manager.recover(clean, job.model, job.optimizer)
    assert manager.get_recovery_history() == []
    assert job.gradients()


@pytest.mark.parametrize("module", [clip, config, manager_module, policy])
def test_examples_are_true(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_snapshot_feeds_reset() -> None:
    job, manager = SmallJob(), manager_with(RESET)
    manager.snapshot(job.model, job.optimizer, step=1)
    good = job.state()
    job.backward()
    job.update()
    assert bad_step(manager, job)
    assert chosen(manager) == [RESET]
    assert job.state() == good


def test_snapshot_feeds_rewind_and_batches_are_skipped() -> None:
    job = SmallJob()
    manager = manager_with(REWIND, rewind_skip_batches=3, rewind_snapshots=1)
    manager.snapshot(job.model, job.optimizer, step=1)
    older = job.state()
    job.backward()
    job.update()
    manager.snapshot(job.model, job.optimizer, step=2)
    assert not manager.take_skipped_batch()
    assert bad_step(manager, job)
    assert job.state() == older
    assert manager.batches_to_skip == 3
    assert [manager.take_skipped_batch() for _ in range(4)] == [True, True, True, False]


def test_snapshot_restores_scheduler_and_scaler_too() -> None:
    job, manager = SmallJob(GradScaler("cpu", init_scale=64.0)), manager_with(RESET)
    scheduler = ExponentialLR(job.optimizer, 0.5)
    manager.snapshot(job.model, job.optimizer, scheduler=scheduler, scaler=job.scaler)
    job.optimizer.step()
    scheduler.step()
    job.scaler._scale.fill_(2.0)
    assert bad_step(manager, job)
    assert scheduler.last_epoch == 0
    assert job.optimizer.param_groups[0]["lr"] == 0.01
    assert job.scaler.get_scale() == 64.0


def test_bad_state_is_refused_as_a_snapshot() -> None:
    job, manager = SmallJob(), manager_with(RESET)
    manager.snapshot(job.model, job.optimizer)
    job.model[0].weight.data[0, 0] = INF
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        manager.snapshot(job.model, job.optimizer)
    assert bad_step(manager, job)
    assert job.is_finite()


def test_snapshots_of_another_job_are_not_restored() -> None:
    job, other, manager = SmallJob(), SmallJob(), manager_with(RESET)
    manager.snapshot(other.model, other.optimizer)
    before = other.state()
    bad_step(manager, job)
    assert chosen(manager) == [SKIP]
    assert other.state() == before


def test_bad_weights_are_mended_by_the_first_strategy_that_can() -> None:
    ladder = (Rung(SKIP), Rung(CLIP), Rung(RESET))
    job, manager = SmallJob(), NaNRecoveryManager(RecoveryConfig(ladder=ladder))
    manager.snapshot(job.model, job.optimizer)
    job.model[0].weight.data[0, 0] = NAN
    assert manager.recover(report("parameters.0.weight"), job.model, job.optimizer)
    assert chosen(manager) == [RESET]
    assert job.is_finite()


def test_going_back_to_the_same_snapshot_again_and_again_comes_to_an_end() -> None:
    job, manager = SmallJob(), manager_with(RESET, fallback_strategy=ABORT)
    manager.snapshot(job.model, job.optimizer, step=100)
    attempts = 0
    while bad_step(manager, job, step=149) and attempts < 20:
        attempts += 1
        for _ in range(49):  # the same good steps each time
            manager.record_good_step()
    assert attempts == 5
    assert "without getting any farther" in manager.get_recovery_history()[-1].tried[0][1]


def test_going_back_is_fine_as_long_as_it_gets_farther() -> None:
    job, manager = SmallJob(), manager_with(RESET, fallback_strategy=ABORT)
    for _ in range(20):
        manager.record_good_step()
        manager.snapshot(job.model, job.optimizer)
        assert bad_step(manager, job)


def test_lower_rate_survives_the_scheduler_given_with_the_snapshot() -> None:
    job, manager = SmallJob(), manager_with(LOWER)
    scheduler = LambdaLR(job.optimizer, lambda epoch: 1.0)
    manager.snapshot(job.model, job.optimizer, scheduler=[scheduler])
    assert bad_step(manager, job)
    job.optimizer.step()
    scheduler.step()
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_raised_precision_can_be_taken_back() -> None:
    job, manager = SmallJob(dtype=torch.bfloat16), manager_with(RAISE)
    situation = Situation(model=job.model, optimizer=job.optimizer, module="0")
    assert manager.respond([report()], situation, step=0).strategy is RAISE
    assert is_raised(job.model[0])
    manager.undo_raised_precision()
    manager.undo_raised_precision()
    assert not is_raised(job.model[0])


def test_raised_precision_lets_a_half_precision_model_train_on() -> None:
    class Overflowing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1000).pow(2).mean().sqrt() / 1000

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Overflowing()).half()
    optimizer = SGD(model.parameters(), lr=0.1)
    manager = manager_with(RAISE)
    situation = Situation(model=model, optimizer=optimizer, module="1")
    x = torch.ones(4, 3, dtype=torch.float16)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(x)
        if not bool(loss.isfinite()):
            assert manager.respond([report("loss")], situation, step=step).succeeded
            continue
        loss.backward()
        optimizer.step()
        manager.record_good_step(loss=loss)
        losses.append(loss.item())
    assert chosen(manager) == [RAISE]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_recoveries_are_logged_quietly(caplog: pytest.LogCaptureFixture) -> None:
    job, manager = SmallJob(), manager_with(SKIP)
    with caplog.at_level(logging.DEBUG, logger="stayfinite"):
        bad_step(manager, job, step=8)
    assert caplog.messages == ["stayfinite: step 8: skip: the step was skipped"]
    assert caplog.records[0].levelno == logging.DEBUG  # not in the script's own log


def test_plain_loop_of_the_docstring_trains_through() -> None:
    job, manager = SmallJob(), manager_with(CLIP)
    before = job.state()
    for step in range(6):
        job.backward(NAN if step in (2, 3) else None)
        bad = [g for g in job.gradients() if not bool(g.isfinite().all())]
        if bad:
            assert manager.recover(report(), job.model, job.optimizer, step=step)
        else:
            manager.record_good_step()
        job.update()
    assert chosen(manager) == [CLIP, SKIP]
    assert job.state() != before
    assert job.is_finite()


def test_graph_of_a_recorded_loss_is_not_kept_alive() -> None:
    job, manager = SmallJob(), NaNRecoveryManager()
    loss = job.model(torch.ones(1, 3)).sum()
    manager.record_good_step(loss=loss, grad_norm=torch.tensor(2.0), lr=0.1)
    assert all(value.grad_fn is None for value in manager._losses)


def diverging(manager: NaNRecoveryManager, job: SmallJob, cause: str = "lr_too_high") -> Recovery:
    job.backward(NAN)
    situation = Situation(model=job.model, optimizer=job.optimizer)
    return manager.respond([report("loss")], situation, step=0, cause=cause)


def test_a_rate_that_was_set_back_is_noticed_and_not_lowered_again() -> None:
    ladder = (Rung(LOWER, 6), Rung(SKIP, 50))
    job = SmallJob()
    manager = NaNRecoveryManager(RecoveryConfig(ladder=ladder, max_consecutive_nans=99))
    assert diverging(manager, job).strategy is LOWER
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    job.optimizer.param_groups[0]["lr"] = 0.0099  # as a library does before each update
    manager.record_good_step()
    second = diverging(manager, job)
    assert second.strategy is SKIP
    said = "lower_lr is not repeated, because the script or its scheduler has set the learning rate"
    assert said in second.detail
    manager.record_good_step()
    third = diverging(manager, job)
    assert third.strategy is SKIP
    assert "not repeated" not in third.detail  # it is said once


def test_a_rate_that_a_schedule_goes_on_from_is_lowered_again() -> None:
    job = SmallJob()
    manager = NaNRecoveryManager(RecoveryConfig(ladder=(Rung(LOWER, 6),), max_consecutive_nans=99))
    diverging(manager, job)
    manager.record_good_step()
    job.optimizer.param_groups[0]["lr"] *= 1.1  # warm-up
    assert diverging(manager, job).strategy is LOWER


def test_what_did_not_help_the_same_step_is_not_repeated_until_one_is_good() -> None:
    ladder = (Rung(LOWER, 6), Rung(SKIP, 50))
    job = SmallJob()
    manager = NaNRecoveryManager(
        RecoveryConfig(ladder=ladder, max_consecutive_nans=99, deescalate_after=1)
    )
    assert diverging(manager, job).strategy is LOWER
    again = diverging(manager, job)
    assert again.strategy is SKIP
    assert "lower_lr is not repeated, because the same step was bad again" in again.detail
    manager.record_good_step()
    assert diverging(manager, job).strategy is LOWER


def test_giving_up_has_the_share_the_cause_and_what_to_do_next() -> None:
    job, manager = SmallJob(), manager_with(SKIP, max_consecutive_nans=3)
    for _ in range(5):
        manager.record_good_step()
    last = [diverging(manager, job, "log_of_zero") for _ in range(3)][-1]
    assert last.strategy is ABORT
    assert "3 of 8 steps (38%) were bad, 3 of them by log_of_zero" in last.detail
    assert "next: Logarithm of zero" in last.detail
