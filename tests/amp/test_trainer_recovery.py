"""AMPTrainer and bad steps: what is looked at, how often, what is done, and when it gives up."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from moments import memory_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from training import (
    Heard,
    all_steps,
    batches,
    config,
    mse,
    raw,
    recovering,
    small_model,
    trainer_of,
    without,
)

from stayfinite.amp.trainer import AMPTrainer
from stayfinite.errors import TrainingAbortedError
from stayfinite.records import NaNReport
from stayfinite.recover.config import RecoveryStrategy
from stayfinite.testing import inject


def finite(model: nn.Module) -> bool:
    return all(bool(t.isfinite().all()) for t in [*model.parameters(), *model.buffers()])


class RootOfSquare(torch.autograd.Function):
    """Finite forward, infinite backward where the input is 0: what sqrt does at 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient / x.abs() * x


def spoiling_loss(output: Tensor, target: Tensor) -> Tensor:
    """Its gradient is NaN, though it is finite, for the batches whose targets are all 0."""
    spoiled = bool((target == 0).all())
    return mse(RootOfSquare.apply(output * 0) if spoiled else output, target)


def with_spoiling(count: int, *bad: int) -> list[tuple[Tensor, Tensor]]:
    made = batches(count)
    return [(x, torch.zeros_like(y)) if n in bad else (x, y) for n, (x, y) in enumerate(made)]


def test_bad_gradient_of_a_finite_loss_is_vetoed() -> None:
    model = small_model()
    with trainer_of(config(), model, loss_fn=spoiling_loss) as trainer:
        losses = all_steps(trainer, with_spoiling(6, 3))
        (incident,) = trainer.incidents
    assert [n for n, loss in enumerate(losses) if loss is None] == [3]
    assert incident.reports[0].location.startswith("gradients.")
    assert finite(model)


def test_clipping_does_not_hide_a_bad_gradient() -> None:
    given = config(gradient_clip_val=1.0)
    with trainer_of(given, small_model(), loss_fn=spoiling_loss) as trainer:
        assert all_steps(trainer, with_spoiling(4, 2))[2] is None
        assert len(trainer.incidents) == 1


def test_each_bad_term_of_the_loss_is_named_before_the_loss() -> None:
    def terms(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        near = mse(output, target)
        # 0 / 0 for the targets that are all 0
        return {"near": near, "ratio": near * 0 + target.sum() / target.sum().abs()}

    model = small_model()
    with trainer_of(config(), model, loss_fn=terms) as trainer:
        losses = all_steps(trainer, with_spoiling(4, 2))
        (incident,) = trainer.incidents
    assert losses[2] is None
    places = [report.location for report in incident.reports]
    assert places[:2] == ["loss.ratio", "loss"]
    assert "loss.near" not in places


@pytest.mark.parametrize("count", [1, 3])
def test_run_is_aborted_at_the_last_allowed_bad_step(count: int) -> None:
    made = batches(12, bad=tuple(range(4, 12)))
    plain, ours = small_model(), small_model()
    torch.manual_seed(7)
    with trainer_of(config(), plain) as trainer:
        all_steps(trainer, made[:4])
    torch.manual_seed(7)
    detect = {"recovery": recovering(max_consecutive_nans=count)}
    heard = Heard()
    with trainer_of(config(detect=detect), ours, callbacks=[heard]) as trainer:
        all_steps(trainer, made[: 4 + count - 1])
        with pytest.raises(TrainingAbortedError) as caught:
            trainer.training_step(made[4 + count])
        assert caught.value.incident == trainer.incidents[-1]
        assert len(trainer.incidents) == count
    assert caught.value.incident.outcome.strategy == "abort"
    assert raw(ours) == raw(plain)
    assert len(heard.named("on_nan")) == count
    assert len(heard.named("on_recovery")) == count - 1


def test_good_step_ends_the_streak() -> None:
    bad = (2, 3, 5, 6, 8, 9)
    detect = {"recovery": recovering(max_consecutive_nans=3)}
    with trainer_of(config(detect=detect), small_model()) as trainer:
        losses = all_steps(trainer, batches(12, bad=bad))
    assert [n for n, loss in enumerate(losses) if loss is None] == list(bad)


def test_abort_strategy_stops_at_once() -> None:
    detect = {"recovery": recovering(primary_strategy=RecoveryStrategy.ABORT)}
    model = small_model()
    with trainer_of(config(detect=detect), model) as trainer:
        all_steps(trainer, batches(2))
        with pytest.raises(TrainingAbortedError):
            trainer.training_step(batches(3, bad=(2,))[2])
    assert finite(model)


def test_clip_strategy_makes_the_step_with_what_is_left() -> None:
    detect = {"recovery": recovering(primary_strategy="clip")}
    model = nn.Linear(4, 1)
    with trainer_of(config(detect=detect), model) as trainer:
        all_steps(trainer, batches(3))
        before = raw(model)
        with inject(model, trainer.optimizer, gradient="weight", value="inf", persistent=True):
            assert trainer.training_step(batches(1)[0]) is None
        assert trainer.incidents[0].outcome.strategy == "clip"
        assert trainer.step == 4
    assert raw(model) != before
    assert finite(model)


def test_reset_strategy_brings_back_the_last_snapshot() -> None:
    detect = {"recovery": recovering(primary_strategy="reset", snapshot_every=2)}
    made = batches(6, bad=(5,))
    plain, ours = small_model(), small_model()
    torch.manual_seed(7)
    with trainer_of(config(), plain) as trainer:
        all_steps(trainer, made[:4])
    torch.manual_seed(7)
    with trainer_of(config(detect=detect), ours) as trainer:
        all_steps(trainer, made)
        assert trainer.incidents[0].outcome.strategy == "reset"
        assert trainer.step == 4
    assert raw(ours) == raw(plain)


def test_scale_is_reduced_in_fp16() -> None:
    given = config("fp16")
    with trainer_of(given, small_model()) as trainer:
        all_steps(trainer, batches(6))
        assert trainer.scaler is not None
        before = trainer.scaler.get_scale()
        trainer.training_step(batches(7, bad=(6,))[6])
        assert trainer.incidents[0].outcome.strategy in ("reduce_scale", "skip")
        assert trainer.scaler.get_scale() in (before, before / 2)


def test_transient_fault_is_retried_when_asked_for() -> None:
    made = batches(8)
    plain, ours = small_model(), small_model()
    torch.manual_seed(7)
    with trainer_of(config(), plain) as trainer:
        all_steps(trainer, made)
    torch.manual_seed(7)
    detect = {"recovery": recovering(primary_strategy="skip", skip_batch_after_nan=False)}
    faults = iter([False] * 4 + [True] + [False] * 100)

    def flaky(output: Tensor, target: Tensor) -> Tensor:
        loss = mse(output, target)
        return loss * math.nan if next(faults) else loss

    with trainer_of(config(detect=detect), ours, loss_fn=flaky) as trainer:
        losses = all_steps(trainer, made)
        assert trainer.step == 8
        assert trainer.incidents[0].diagnosis.cause == "transient_fault"
    assert [n for n, loss in enumerate(losses) if loss is None] == [4]
    assert raw(ours) == raw(plain)


def test_without_any_check_a_bad_batch_reaches_the_weights() -> None:
    detect = {"check_loss": False, "check_gradients": False, "check_parameters": False}
    model = nn.Linear(4, 1)
    with trainer_of(config(detect=detect), model) as trainer:
        all_steps(trainer, batches(4, bad=(2,)))
        assert trainer.incidents == []
    assert not finite(model)


def test_without_the_check_of_the_loss_it_is_the_gradient_that_is_found() -> None:
    with trainer_of(config(detect={"check_loss": False}), small_model()) as trainer:
        all_steps(trainer, batches(4, bad=(2,)))
        (incident,) = trainer.incidents
    assert all(report.location.startswith("gradients.") for report in incident.reports)


def test_without_the_check_of_gradients_a_bad_one_passes_and_is_undone_later() -> None:
    model = small_model()
    detect = {
        "check_gradients": False,
        "check_parameters": False,
        "recovery": recovering(snapshot_every=1),
    }
    with trainer_of(config(detect=detect), model, loss_fn=spoiling_loss) as trainer:
        made = with_spoiling(8, 4)
        all_steps(trainer, made[:5])
        assert trainer.incidents == []
        assert not finite(model)
        all_steps(trainer, made[5:])
        (incident,) = trainer.incidents
    assert incident.reports[0].location.startswith("parameters.")
    assert finite(model)


class Poisoned(torch.optim.SGD):
    """Writes a NaN into the last weight at its third step, once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults = iter([False, False, True] + [False] * 100)

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if next(self.faults):
            with torch.no_grad():
                self.param_groups[0]["params"][-1].fill_(math.nan)
        return result


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("snapshot_every", [1, 50])
def test_nothing_follows_an_update_that_made_weights_bad(
    precision: str, snapshot_every: int
) -> None:
    made, model = batches(6), small_model()
    optimizer = Poisoned(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    ema = AveragedModel(model)
    given = config(
        precision,
        loss_scale=64.0 if precision == "fp16" else None,
        detect={"recovery": recovering(snapshot_every=snapshot_every)},
    )
    with AMPTrainer(given, model, optimizer, mse, scheduler, ema=ema) as trainer:
        losses = all_steps(trainer, made)
        assert [n for n, loss in enumerate(losses) if loss is None] == [2]
        assert trainer.step == 5
    assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5**5
    assert ema.n_averaged == 5
    assert finite(model)
    assert finite(ema)


@pytest.mark.parametrize("check_parameters", [True, False])
def test_check_of_parameters_finds_at_once_what_is_found_later_without(
    check_parameters: bool,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    detect = {
        "check_parameters": check_parameters,
        "recovery": recovering(snapshot_every=1),
    }
    optimizer = Poisoned(model.parameters(), lr=0.01)
    with AMPTrainer(config(detect=detect), model, optimizer, mse) as trainer:
        losses = all_steps(trainer, batches(3))
        assert (len(trainer.incidents) == 1) is check_parameters
        assert finite(model) is check_parameters
        if check_parameters:
            assert losses[2] is None
        all_steps(trainer, batches(3))
        assert len(trainer.incidents) >= 1
    assert finite(model)


@pytest.mark.parametrize("snapshot_every", [1, 50])
@pytest.mark.parametrize(("bad", "is_seen_at_once"), [(4, True), (5, False), (6, False)])
def test_steps_between_the_checked_ones_are_not_looked_at(
    bad: int, is_seen_at_once: bool, snapshot_every: int
) -> None:
    made = batches(12, bad=(bad,))
    recovery = recovering(snapshot_every=snapshot_every)
    detect = {"detection_interval": 4, "recovery": recovery}
    model = small_model()
    with trainer_of(config(detect=detect), model) as trainer:
        all_steps(trainer, made[: bad + 1])
        assert bool(trainer.incidents) is is_seen_at_once
        assert finite(model) is is_seen_at_once
        all_steps(trainer, made[bad + 1 :])
        assert len(trainer.incidents) == 1
    assert finite(model)


def test_incident_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stayfinite"), trainer_of(config(), small_model()) as t:
        all_steps(t, batches(3, bad=(2,)))
        t.log_nan_recovery(t.incidents[0].reports[0], 2)
    first, again = (record.getMessage() for record in caplog.records)
    assert first == again
    assert first.startswith("step 2: loss is NaN")
    assert "bad_input_data" in first
    assert "Done: skip" in first
    assert "\n" not in first


def test_bad_value_of_the_callers_own_is_logged_with_its_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "stayfinite"), trainer_of(config(), small_model()) as t:
        t.log_nan_recovery(t.nan_detector.check_tensor(torch.tensor(-math.inf), "logits"), step=7)
    assert caplog.messages == ["step 7: logits is -Inf."]


def test_subclass_can_send_recoveries_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[tuple[str, int]] = []

    class Sending(AMPTrainer):
        def log_nan_recovery(self, nan_report: NaNReport, step: int) -> None:
            sent.append((nan_report.location, step))

    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    with Sending(config(), model, optimizer, mse) as trainer:
        all_steps(trainer, batches(4, bad=(1, 3)))
    assert sent == [("loss", 1), ("loss", 3)]
    assert caplog.messages == []


def test_trainer_is_garbage_when_nobody_holds_it() -> None:
    trainer = trainer_of(config(), small_model())
    all_steps(trainer, batches(3, bad=(1,)))
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def test_detector_of_the_trainer_counts_what_was_checked_and_found() -> None:
    detect = {"detection_interval": 2}
    with trainer_of(config(detect=detect), small_model()) as trainer:
        all_steps(trainer, batches(6, bad=(2,)))
        counts = trainer.nan_detector.get_statistics()
    assert (counts["checks"], counts["skipped"], counts["hits"]) == (3, 3, 1)
    assert (counts["first_bad_step"], counts["last_bad_step"]) == (2, 2)
    assert counts["hits_by_location"]["loss"] == 1
    assert set(counts["hits_by_type"]) == {"nan"}


def test_recovery_of_the_trainer_has_its_history() -> None:
    with trainer_of(config(), small_model()) as trainer:
        all_steps(trainer, batches(3, bad=(1,)))
        assert [each.step for each in trainer.nan_recovery.get_recovery_history()] == [1]
        assert not trainer.nan_recovery.should_abort()
        assert trainer.nan_recovery is trainer.guard.manager
    unwatched = {"check_loss": False, "check_gradients": False, "check_parameters": False}
    with trainer_of(config(detect=unwatched), small_model()) as trainer:
        all_steps(trainer, batches(1))
        assert trainer.nan_recovery.config is trainer.config.nan_detection.recovery
        assert trainer.nan_detector.get_statistics()["checks"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_first_batch_that_is_bad_is_recovered_from(precision: str) -> None:
    made = batches(4, bad=(0,))
    model = small_model()
    with trainer_of(config(precision), model) as trainer:
        losses = all_steps(trainer, made)
    assert losses[0] is None
    assert losses[-1] is not None
    assert [incident.step for incident in trainer.incidents] == [0]
    assert finite(model)


def test_first_batch_that_is_bad_leaves_no_trace() -> None:
    made = batches(4, bad=(0,))
    ours, clean = small_model(), small_model()
    torch.manual_seed(3)
    with trainer_of(config(), ours) as trainer:
        all_steps(trainer, made)
    torch.manual_seed(3)
    with trainer_of(config(), clean) as trainer:
        all_steps(trainer, made[1:])
    assert raw(ours) == raw(clean)


def test_first_batches_that_are_all_bad_end_the_training_untouched() -> None:
    model = small_model()
    before = raw(model)
    with trainer_of(config(), model) as trainer, pytest.raises(TrainingAbortedError) as caught:
        all_steps(trainer, batches(20, bad=tuple(range(20))))
    assert str(caught.value).startswith("Training aborted due to NaN at step 4: ")
    assert caught.value.incident is trainer.incidents[-1]
    assert len(trainer.incidents) == 5
    assert raw(model) == before


def test_first_bad_batch_aborts_at_once_where_that_is_the_rule() -> None:
    detect = {"recovery": recovering(primary_strategy="abort")}
    with (
        trainer_of(config(detect=detect), small_model()) as trainer,
        pytest.raises(TrainingAbortedError, match=r"^Training aborted due to NaN at step 0"),
    ):
        trainer.training_step(batches(1, bad=(0,))[0])


def test_reset_loads_from_disk_where_the_snapshot_has_gone_bad(tmp_path: Path) -> None:
    file = tmp_path / "good.ckpt"
    recovery = recovering(primary_strategy="reset", snapshot_every=100, checkpoint_path=file)
    model = small_model()
    with trainer_of(config("bf16", detect={"recovery": recovery}), model) as trainer:
        all_steps(trainer, batches(3))
        trainer.save(file)
        saved = raw(model)
        (job,) = trainer.guard.jobs.values()
        snapshot = job.ring.back(0)
        memory_of(snapshot, "parameters.0.weight").fill_(math.nan)  # a fault of memory
        all_steps(trainer, batches(2, seed=5))
        assert trainer.training_step(batches(1, bad=(0,))[0]) is None
        assert raw(model) == saved
        (recovered,) = trainer.nan_recovery.get_recovery_history()
        assert recovered.checkpoint == str(file)
        assert trainer.incidents[0].outcome.strategy == "reset"
        assert "good.ckpt of step 3" in trainer.incidents[0].outcome.detail
        assert None not in all_steps(trainer, batches(60))
        assert job.ring.back(0).step > 3  # snapshots are taken again
    assert finite(model)


def test_fp16_overflow_of_the_scale_is_no_incident() -> None:
    heard = Heard()
    with trainer_of(config("fp16", loss_scale=2.0**24), nn.Linear(4, 1), callbacks=[heard]) as t:
        assert all_steps(t, batches(2)) == [None, None]
        assert t.incidents == []
    assert [event.was_update for event in heard.named("on_step")] == [False, False]


def test_rewind_skips_the_batches_that_follow() -> None:
    ladder = {"primary_strategy": "rewind", "rewind_snapshots": 0, "rewind_skip_batches": 3}
    detect = {"recovery": recovering(snapshot_every=2, **ladder)}
    made = batches(12, bad=(5,))
    plain, ours = small_model(), small_model()
    torch.manual_seed(7)
    with trainer_of(config(), plain) as trainer:
        all_steps(trainer, without(made, 4, 5, 6, 7, 8))
    torch.manual_seed(7)
    with trainer_of(config(detect=detect), ours) as trainer:
        losses = all_steps(trainer, made)
        assert trainer.step == 7
    assert [n for n, loss in enumerate(losses) if loss is None] == [5, 6, 7, 8]
    assert raw(ours) == raw(plain)


class Tall(nn.Module):
    """Its head passes the largest float16 at once."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        nn.init.constant_(self.head.bias, 1e5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("every", [1, 2])
def test_guilty_module_runs_in_float32_until_the_trainer_is_closed(every: int) -> None:
    seen: list[torch.dtype] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return mse(output.float() / 1e5, target)

    model = Tall()
    detect = {"recovery": recovering(primary_strategy="raise_precision")}
    given = config("fp16", detect=detect, accumulate_grad_batches=every)
    with trainer_of(given, model, lr=1e-3, loss_fn=loss_fn) as trainer:
        losses = all_steps(trainer, batches(8))
        assert [i.outcome.detail for i in trainer.incidents] == [
            "module 'head' runs in float32 from now on"
        ]
        assert losses[every:] == [loss for loss in losses[every:] if loss is not None]
        assert seen[-1] is torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert model(batches(1)[0][0]).dtype is torch.float16
