"""Each strategy on a real job: what it does, when it cannot help, and what it never touches."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from jobs import INF, NAN, SmallJob, report
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR

import stayfinite
from stayfinite import TrainingAbortedError
from stayfinite.amp.scaler import DynamicLossScaler
from stayfinite.recover.actions import Cannot, Done, Situation, Trouble, act
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.recover.float32 import is_raised
from stayfinite.snapshot import SnapshotRing, TrainingState

SKIP, SCALE = RecoveryStrategy.SKIP_STEP, RecoveryStrategy.REDUCE_SCALE
CLIP, RESET = RecoveryStrategy.CLIP_GRADIENTS, RecoveryStrategy.RESET_MODEL
LOWER, REWIND = RecoveryStrategy.LOWER_LR, RecoveryStrategy.REWIND
RAISE, ABORT = RecoveryStrategy.RAISE_PRECISION, RecoveryStrategy.ABORT
CUSTOM = RecoveryStrategy.CUSTOM


def situation_of(job: SmallJob, **more: Any) -> Situation:
    return Situation(model=job.model, optimizer=job.optimizer, scaler=job.scaler, **more)


def tried(
    strategy: RecoveryStrategy,
    job: SmallJob,
    *,
    location: str = "gradients.0.weight",
    cause: str | None = None,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Done | Cannot:
    trouble = Trouble(reports=(report(location),), step=3, cause=cause)
    return act(strategy, situation_of(job, **more), RecoveryConfig(**(options or {})), trouble)


def ring_of(job: SmallJob, *steps: int) -> SnapshotRing:
    state = TrainingState(job.model, job.optimizer, scaler=job.scaler)
    ring = SnapshotRing(state, slots=max(1, len(steps)))
    for step in steps:
        ring.take(step=step)
        job.backward()
        job.update()
    return ring


@pytest.mark.parametrize("strategy", [SKIP, SCALE, LOWER, RAISE, ABORT])
@pytest.mark.parametrize("poison", [NAN, INF])
def test_update_after_it_changes_no_weight_and_no_state(
    strategy: RecoveryStrategy, poison: float
) -> None:
    job = SmallJob(GradScaler("cpu"))
    job.backward(poison)
    params = [(name, value) for name, value in job.state().items() if ".lr" not in name]
    answer = tried(strategy, job, module="0")
    assert isinstance(answer, Done)
    assert job.gradients() == []
    job.optimizer.step()
    after = job.state()
    assert [(name, after[name]) for name, _ in params] == params


def test_skip_leaves_all_as_it_was() -> None:
    job = SmallJob()
    before = job.state()
    job.backward(NAN)
    assert tried(SKIP, job) == Done("the step was skipped")
    job.update()
    assert job.state() == before


def test_gradients_of_the_whole_model_go_with_the_step() -> None:
    job = SmallJob()
    other = SGD(job.model[2].parameters(), lr=0.1)
    job.backward(NAN)
    trouble = Trouble(reports=(report(),))
    situation = Situation(model=job.model, optimizer=other)
    act(SKIP, situation, RecoveryConfig(), trouble)
    assert job.gradients() == []


@pytest.mark.parametrize("make", [GradScaler, DynamicLossScaler])
def test_scale_is_reduced_by_the_factor(make: type[GradScaler]) -> None:
    job = SmallJob(make("cpu", init_scale=1024.0))
    job.backward(INF)
    answer = tried(SCALE, job, options={"scale_reduction_factor": 0.25})
    assert answer == Done("the loss scale went from 1024 to 256")
    assert job.scaler.get_scale() == 256.0


def test_scaler_that_was_not_used_yet_starts_lower() -> None:
    job = SmallJob()
    job.scaler = GradScaler("cpu", init_scale=1024.0)
    assert isinstance(tried(SCALE, job), Done)
    assert job.scaler.get_scale() == 512.0
    job.backward()
    assert job.scaler.get_scale() == 512.0


def test_scaler_of_another_make_is_asked_to_update() -> None:
    class Theirs:
        scale = 64.0

        def get_scale(self) -> float:
            return self.scale

        def update(self, new_scale: float) -> None:
            self.scale = new_scale

    job = SmallJob()
    job.scaler = Theirs()
    assert isinstance(tried(SCALE, job), Done)
    assert job.scaler.scale == 32.0


def test_scale_never_goes_below_its_floor() -> None:
    job = SmallJob(GradScaler("cpu", init_scale=1.5))
    assert isinstance(tried(SCALE, job), Done)
    assert job.scaler.get_scale() == 1.0
    assert tried(SCALE, job) == Cannot("the loss scale is 1, and its floor is 1")
    job = SmallJob(DynamicLossScaler("cpu", init_scale=64.0, min_scale=32.0))
    assert isinstance(tried(SCALE, job), Done)
    assert job.scaler.get_scale() == 32.0
    assert isinstance(tried(SCALE, job), Cannot)


@pytest.mark.parametrize("scaler", [None, GradScaler("cpu", enabled=False), object()])
def test_scale_cannot_be_reduced_without_an_enabled_scaler(scaler: Any) -> None:
    job = SmallJob()
    job.scaler = scaler
    assert tried(SCALE, job) == Cannot("there is no enabled loss scaler")


@pytest.mark.parametrize("make", [GradScaler, DynamicLossScaler])
@pytest.mark.parametrize("strategy", [SKIP, SCALE, LOWER])
@pytest.mark.parametrize("going_on", ["next batch", "update", "step and update"])
def test_loop_with_unscaled_gradients_goes_on_in_any_way(
    make: type[GradScaler], strategy: RecoveryStrategy, going_on: str
) -> None:
    job = SmallJob(make("cpu", init_scale=1024.0))
    before = job.state()
    job.backward(INF)
    job.scaler.unscale_(job.optimizer)
    assert isinstance(tried(strategy, job), Done)
    if going_on == "step and update":
        job.scaler.step(job.optimizer)
    if going_on != "next batch":
        job.scaler.update()
    unchanged = {name: value for name, value in job.state().items() if ".lr" not in name}
    assert unchanged == {name: value for name, value in before.items() if ".lr" not in name}
    job.backward()
    job.scaler.unscale_(job.optimizer)
    job.update()
    assert job.state() != before
    assert job.is_finite()


def test_clip_drops_what_is_bad_and_keeps_the_rest() -> None:
    job = SmallJob()
    job.backward(NAN)
    answer = tried(CLIP, job, options={"grad_clip_value": 0.01})
    assert isinstance(answer, Done)
    assert "1 bad element was dropped from 0.weight" in answer.detail
    norm = torch.cat([gradient.flatten() for gradient in job.gradients()]).norm()
    assert float(norm) == pytest.approx(0.01)
    before = job.state()
    job.update()
    assert job.state() != before
    assert job.is_finite()


def test_without_a_limit_clip_drops_what_is_bad_and_clips_nothing() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = torch.tensor([[float("inf"), 50.0, -3.0]])
    manager = stayfinite.NaNRecoveryManager(
        stayfinite.RecoveryConfig(primary_strategy="clip", grad_clip_value=None)
    )
    report = stayfinite.NaNReport(True, stayfinite.NaNType.POS_INF, "gradients.weight")
    assert manager.recover(report, model, optimizer)
    assert model.weight.grad.tolist() == [[0.0, 50.0, -3.0]]


def test_clip_drops_whole_tensors_on_demand() -> None:
    job = SmallJob()
    job.backward(NAN)
    assert isinstance(tried(CLIP, job, options={"drop_whole_tensors": True}), Done)
    assert not bool(job.gradients()[0].any())
    assert bool(job.gradients()[1].any())


@pytest.mark.parametrize("make", [GradScaler, DynamicLossScaler])
@pytest.mark.parametrize("unscaled", [False, True])
def test_clip_is_on_true_values_and_the_scaler_makes_the_step(
    make: type[GradScaler], unscaled: bool
) -> None:
    job = SmallJob(make("cpu", init_scale=1024.0))
    before = job.state()
    job.backward(INF)
    if unscaled:
        job.scaler.unscale_(job.optimizer)
    assert isinstance(tried(CLIP, job, options={"grad_clip_value": 0.01}), Done)
    norm = torch.cat([gradient.flatten() for gradient in job.gradients()]).norm()
    assert float(norm) == pytest.approx(0.01 if unscaled else 10.24)
    job.update()
    assert job.state() != before
    assert job.is_finite()
    assert job.scaler.get_scale() == 1024.0


def test_clip_cannot_help_when_nothing_finite_is_left() -> None:
    job = SmallJob()
    job.optimizer.zero_grad()
    assert tried(CLIP, job) == Cannot("there are no gradients")
    job.backward()
    for gradient in job.gradients():
        gradient.fill_(NAN)
    assert tried(CLIP, job) == Cannot("nothing finite is left of the gradients but zeros")
    assert all(bool(gradient.isnan().all()) for gradient in job.gradients())
    for gradient in job.gradients():
        gradient.view(-1)[1:] = 0.0
    assert isinstance(tried(CLIP, job), Cannot)
    for gradient in job.gradients():
        gradient.view(-1)[1:] = 1.0
    options = {"drop_whole_tensors": True}
    assert isinstance(tried(CLIP, job, options=options), Cannot)


def test_clip_of_a_bad_loss_needs_most_of_the_gradients() -> None:
    job = SmallJob()
    job.backward(NAN)
    assert isinstance(tried(CLIP, job, location="loss"), Done)
    job.backward()
    for gradient in job.gradients():
        gradient.view(-1)[1:] = NAN
    assert isinstance(tried(CLIP, job, location="loss"), Cannot)
    assert isinstance(tried(CLIP, job, location="gradients.0.weight"), Done)


def test_clip_waits_for_a_step_that_is_run_again() -> None:
    job = SmallJob()
    job.optimizer.zero_grad()
    assert isinstance(tried(CLIP, job, will_rerun=True), Done)


def test_step_that_is_run_again_keeps_its_leftover_gradients() -> None:
    job = SmallJob()
    job.backward()
    held = job.gradients()
    assert isinstance(tried(SKIP, job, will_rerun=True), Done)
    assert [id(gradient) for gradient in job.gradients()] == [id(gradient) for gradient in held]


def test_reset_goes_back_to_the_newest_snapshot() -> None:
    job = SmallJob()
    ring = ring_of(job, 10)
    ring.take(step=20)
    good = job.state()
    job.backward()
    job.update()
    assert job.state() != good
    job.backward(NAN)
    answer = tried(RESET, job, snapshots=ring)
    assert answer == Done("back at the snapshot of step 20", went_back_to=20)
    assert job.state() == good
    assert job.gradients() == []


def test_rewind_goes_back_so_many_snapshots() -> None:
    job = SmallJob()
    states = [job.state()]
    ring = SnapshotRing(TrainingState(job.model, job.optimizer), slots=3)
    for step in (10, 20, 30):
        ring.take(step=step)
        states.append(job.state())
        job.backward()
        job.update()
    options = {"rewind_snapshots": 2, "snapshot_slots": 3, "rewind_skip_batches": 7}
    answer = tried(REWIND, job, snapshots=ring, options=options)
    assert isinstance(answer, Done)
    assert answer.went_back_to == 10
    assert "the next 7 batches are skipped" in answer.detail
    assert job.state() == states[1]
    assert len(ring) == 1


def test_rewind_is_content_with_the_oldest_snapshot() -> None:
    job = SmallJob()
    answer = tried(REWIND, job, snapshots=ring_of(job, 10))
    assert isinstance(answer, Done)
    assert answer.went_back_to == 10


@pytest.mark.parametrize("strategy", [RESET, REWIND])
def test_going_back_needs_a_snapshot(strategy: RecoveryStrategy) -> None:
    job = SmallJob()
    empty = SnapshotRing(TrainingState(job.model, job.optimizer))
    assert tried(strategy, job) == Cannot("there is no snapshot")
    assert tried(strategy, job, snapshots=empty) == Cannot("there is no snapshot")


def test_going_back_restores_bad_weights() -> None:
    job = SmallJob()
    ring = ring_of(job, 10)
    ring.take(step=11)
    good = job.state()
    with torch.no_grad():
        job.model[0].weight.fill_(NAN)
    assert isinstance(tried(RESET, job, snapshots=ring), Done)
    assert job.state() == good


@pytest.mark.parametrize("strategy", [SKIP, SCALE, CLIP, LOWER, RAISE])
@pytest.mark.parametrize("place", ["parameter", "optimizer"])
def test_what_leaves_the_weights_alone_cannot_mend_them(
    strategy: RecoveryStrategy, place: str
) -> None:
    job = SmallJob(GradScaler("cpu"))
    job.backward()
    if place == "parameter":
        job.model[0].weight.data[0, 0] = NAN
    else:
        job.optimizer.state[job.model[0].weight]["exp_avg"][0, 0] = INF
    answer = tried(strategy, job, module="0", location="loss")
    assert isinstance(answer, Cannot)
    assert "only a good snapshot can restore it" in answer.reason
    assert job.gradients() != []


def test_infinite_mask_is_no_bad_state_but_a_reported_buffer_is() -> None:
    job = SmallJob()
    job.model.register_buffer("mask", torch.tensor([0.0, -INF]))
    job.backward(NAN)
    assert isinstance(tried(SKIP, job), Done)
    assert isinstance(tried(SKIP, job, location="buffers.mask"), Cannot)


def test_lower_rate_is_lower() -> None:
    job = SmallJob()
    answer = tried(LOWER, job, options={"lr_reduction_factor": 0.1})
    assert answer == Done("the learning rate went from 0.01 to 0.001")
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    job.optimizer.param_groups[0]["lr"] = 0.0
    assert tried(LOWER, job) == Cannot("there is no learning rate above 0")


def test_rate_is_lowered_by_any_factor() -> None:
    job = SmallJob()
    assert isinstance(tried(LOWER, job, options={"lr_reduction_factor": 0.999}), Done)
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.00999)


def test_lower_rate_goes_back_to_the_oldest_snapshot_on_demand() -> None:
    job = SmallJob()
    old = job.state()
    ring = ring_of(job, 10, 20)
    options = {"lower_lr_goes_back": True}
    answer = tried(LOWER, job, snapshots=ring, options=options)
    assert isinstance(answer, Done)
    assert answer.went_back_to == 10
    rate = "optimizer.param_groups.0.lr"
    assert {**job.state(), rate: old[rate]} == old
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    assert isinstance(tried(LOWER, job, options=options), Done)  # without a snapshot, from here
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.0025)


def test_each_return_lowers_the_whole_schedule_further() -> None:
    job = SmallJob()
    scheduler = LinearLR(job.optimizer, start_factor=0.1, total_iters=9)
    state = TrainingState(job.model, job.optimizer, scheduler=scheduler)
    ring = SnapshotRing(state, slots=1)
    ring.take(step=0)
    for height in (0.005, 0.0025, 0.00125):
        for _ in range(9):
            job.optimizer.step()
            scheduler.step()
        answer = tried(
            LOWER,
            job,
            snapshots=ring,
            schedulers=(scheduler,),
            options={"lower_lr_goes_back": True},
        )
        assert isinstance(answer, Done)
        assert scheduler.last_epoch == 0
        assert job.optimizer.param_groups[0]["lr"] == pytest.approx(height / 10)
        assert scheduler.base_lrs == pytest.approx([height])


@pytest.mark.parametrize("given", [True, False])
def test_lower_rate_survives_the_scheduler(given: bool) -> None:
    job = SmallJob()
    scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda epoch: 1.0)
    tried(LOWER, job, schedulers=(scheduler,) if given else ())
    job.optimizer.step()
    scheduler.step()
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("made", "more", "can"),
    [
        ({}, {}, False),
        ({"dtype": torch.bfloat16}, {}, True),
        ({"scaler": GradScaler("cpu")}, {}, True),
        ({"scaler": GradScaler("cpu", enabled=False)}, {}, False),
        ({}, {"cause": "low_precision_overflow"}, True),
        ({}, {"cause": "log_of_zero"}, False),
    ],
)
def test_precision_is_raised_only_where_it_was_low(
    made: dict[str, Any], more: dict[str, Any], can: bool
) -> None:
    job = SmallJob(**made)
    answer = tried(RAISE, job, module="0", **more)
    assert isinstance(answer, Done) == can
    assert is_raised(job.model[0]) == can
    assert not is_raised(job.model[2])


def test_precision_is_raised_where_a_half_tensor_was_reported() -> None:
    job = SmallJob()
    trouble = Trouble(reports=(report("gradients.0.weight", dtype="float16"),))
    answer = act(RAISE, situation_of(job, module="0"), RecoveryConfig(), trouble)
    assert isinstance(answer, Done)


def test_precision_is_raised_inside_autocast() -> None:
    job = SmallJob()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert isinstance(tried(RAISE, job, module="0"), Done)


def test_precision_is_raised_once_and_can_be_taken_back() -> None:
    job = SmallJob(dtype=torch.bfloat16)
    answer = tried(RAISE, job, module="0")
    assert isinstance(answer, Done)
    assert answer.undo is not None
    assert tried(RAISE, job, module="0") == Cannot("module '0' runs in float32 already")
    answer.undo()
    assert not is_raised(job.model[0])
    assert isinstance(tried(RAISE, job, module="0"), Done)


@pytest.mark.parametrize("name", [None, "nothing.here"])
def test_precision_cannot_be_raised_of_an_unknown_module(name: str | None) -> None:
    job = SmallJob(dtype=torch.bfloat16)
    expected = Cannot("the module that made the bad value was not found")
    assert tried(RAISE, job, module=name) == expected


def test_custom_function_gets_all_it_needs() -> None:
    job = SmallJob(GradScaler("cpu"))
    given: list[Any] = []

    def mend(*args: Any) -> bool:
        given.extend(args)
        return True

    assert isinstance(tried(CUSTOM, job, options={"custom_recovery_fn": mend}), Done)
    assert given == [report(), job.model, job.optimizer, job.scaler, 3]


def test_custom_function_that_says_no_cannot_help() -> None:
    options = {"custom_recovery_fn": lambda *_: False}
    answer = tried(CUSTOM, SmallJob(), options=options)
    assert answer == Cannot("custom_recovery_fn returned False")
    assert tried(CUSTOM, SmallJob()) == Cannot("there is no custom_recovery_fn")


def test_custom_function_that_raises_cannot_help(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> bool:
        raise ValueError("not today")

    with caplog.at_level(logging.ERROR, logger="stayfinite"):
        answer = tried(CUSTOM, SmallJob(), options={"custom_recovery_fn": broken})
    assert answer == Cannot("it failed: ValueError: not today")
    assert "the strategy 'custom' failed" in caplog.text


def test_custom_function_may_stop_the_run() -> None:
    def stop(*_: Any) -> bool:
        raise TrainingAbortedError("enough")

    with pytest.raises(TrainingAbortedError, match="enough"):
        tried(CUSTOM, SmallJob(), options={"custom_recovery_fn": stop})


def test_custom_function_that_poisons_the_weights_has_not_helped() -> None:
    def poison(_: Any, model: nn.Module, *__: Any) -> bool:
        next(model.parameters()).data.fill_(NAN)
        return True

    answer = tried(CUSTOM, SmallJob(), options={"custom_recovery_fn": poison})
    assert isinstance(answer, Cannot)
    assert "left parameters.0.weight that is not finite" in answer.reason


@pytest.mark.parametrize("poison", [None, NAN])
def test_gradients_that_a_custom_function_leaves_are_used_only_if_finite(
    poison: float | None,
) -> None:
    job = SmallJob()
    job.backward(poison)
    tried(CUSTOM, job, options={"custom_recovery_fn": lambda *_: True})
    assert bool(job.gradients()) == (poison is None)


def test_abort_leaves_good_weights_untouched() -> None:
    job = SmallJob()
    ring = ring_of(job, 10)
    before = job.state()
    job.backward(NAN)
    assert isinstance(tried(ABORT, job, snapshots=ring), Done)
    job.update()
    assert job.state() == before


def test_abort_mends_bad_weights_if_it_can() -> None:
    job = SmallJob()
    ring = ring_of(job, 10)
    job.model[0].weight.data.fill_(NAN)
    answer = tried(ABORT, job, snapshots=ring)
    assert answer == Done("training stops here; back at the snapshot of step 10", went_back_to=10)
    assert job.is_finite()
    job.model[0].weight.data.fill_(NAN)
    answer = tried(ABORT, job)
    assert answer == Done("training stops here; the state is not finite, and there is no snapshot")
