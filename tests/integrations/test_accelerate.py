"""Training with Accelerate under watch: loops that know nothing of it, and steps that are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from as_before import torch_as_before as torch_as_before
from framework_nets import FILE, LINES, Bad, Batch, batches, bytes_of, line_of, net
from framework_nets import few_objects as few_objects
from torch import Tensor, nn
from torch.nn import functional, utils
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader

from stayfinite import RecoveryConfig, TrainingAbortedError
from stayfinite.errors import InputError
from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard.discover import recover_everything
from stayfinite.integrations.accelerate import AcceleratorGuard, watch
from stayfinite.testing import inject


@pytest.fixture(autouse=True)
def accelerate_anew() -> Iterator[None]:
    """What is set once for a process is set anew in each test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Training:
    """A loop as people write it with Accelerate."""

    def __init__(
        self,
        made: list[Batch],
        *,
        accumulation: int = 1,
        own_loss: bool = True,
        precision: str = "no",
        scaler: Any = None,
        clip: float | None = 0.5,
    ) -> None:
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation
        )
        if scaler is not None:  # which Accelerate does not offer on a CPU by itself
            self.accelerator.scaler, self.accelerator.native_amp = scaler, True
        self.made, model = made, net()
        self.inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.inner_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.inner, 0.9)
        loader = DataLoader(made, batch_size=None)  # type: ignore[arg-type]
        parts = model, self.inner, self.inner_scheduler, loader
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(*parts)
        self.own_loss, self.clip = own_loss, clip
        self.skipped: list[bool] = []
        self.weights: list[list[bytes]] = []

    def watch(self, **options: Any) -> AcceleratorGuard:
        given = self.accelerator, self.model, self.optimizer, self.scheduler
        return watch(*given, **{"sinks": [], **options})

    def loss(self, batch: Batch) -> Tensor:
        if self.own_loss:
            loss: Tensor = self.model(**batch)["loss"]
            return loss
        return functional.mse_loss(self.model(batch["x"])["logits"], batch["labels"])

    def step(self, batch: Batch) -> float:
        with self.accelerator.accumulate(self.model):
            loss = self.loss(batch)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients and self.clip is not None:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.item()

    def run(self, guard: AcceleratorGuard | None = None) -> Training:
        """Over all batches; with a guard, as steps that are given to it."""
        torch.manual_seed(3)
        for batch in self.loader:
            self.weights.append(self.now())
            if guard is None:
                self.step(batch)
            else:
                guard.step(self.step, batch)
            if self.accelerator.sync_gradients:
                self.skipped.append(self.accelerator.optimizer_step_was_skipped)
        self.weights.append(self.now())
        return self

    def now(self) -> list[bytes]:
        return [p.detach().numpy().tobytes() for p in self.model.parameters()]

    def bytes(self) -> list[Any]:
        return bytes_of(self.model, self.inner, self.inner_scheduler)


def trained(made: list[Batch], *, given: bool, **options: Any) -> tuple[Training, AcceleratorGuard]:
    training = Training(made, **options)
    with training.watch() as guard:
        training.run(guard if given else None)
    return training, guard


GIVEN = pytest.mark.parametrize("given", [False, True], ids=["loop", "step"])


@GIVEN
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["log", "sqrt"])
def test_bad_batch_is_found_with_line_and_module(kind: Bad, accumulation: int, given: bool) -> None:
    made = batches(8, bad={5: kind})
    training, guard = trained(made, given=given, accumulation=accumulation)
    (incident,) = guard.incidents
    text, module, op = LINES[kind]
    assert incident.step == 5 // accumulation
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.module) == (line_of(text), module)
    assert (incident.origin.op, incident.origin.exact) == (op, True)
    assert Path(incident.origin.file or "").name == FILE.name
    first = 5 - 5 % accumulation
    assert training.weights[first] == training.weights[first + accumulation]


@GIVEN
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", ["log", "sqrt", "data"])
def test_bytes_are_those_of_a_run_without_the_batch(
    kind: Bad, accumulation: int, given: bool
) -> None:
    made = batches(12, bad={4: kind})
    first = 4 - 4 % accumulation
    training, _ = trained(made, given=given, accumulation=accumulation)
    others = made[:first] + made[first + accumulation :]
    plain = Training(others, accumulation=accumulation).run()
    assert training.bytes() == plain.bytes()


@GIVEN
@pytest.mark.parametrize("bad", [10, 11])
def test_last_window_may_be_shorter(bad: int, given: bool) -> None:
    made = batches(12, bad={bad: "log"})
    training, guard = trained(made, given=given, accumulation=5)
    assert len(guard.incidents) == 1
    assert training.bytes() == Training(made[:10], accumulation=5).run().bytes()


@GIVEN
def test_healthy_training_is_the_same_to_the_byte(given: bool) -> None:
    training, guard = trained(batches(7), given=given, accumulation=2)
    assert guard.incidents == []
    assert training.bytes() == Training(batches(7), accumulation=2).run().bytes()


@GIVEN
@pytest.mark.parametrize("accumulation", [1, 2])
def test_skipped_steps_are_told_and_move_no_scheduler(accumulation: int, given: bool) -> None:
    made = batches(8, bad={2: "log", 5: "sqrt"})
    training, _ = trained(made, given=given, accumulation=accumulation)
    bad = {2 // accumulation, 5 // accumulation}
    assert training.skipped == [step in bad for step in range(8 // accumulation)]
    assert training.inner_scheduler.last_epoch == 8 // accumulation - 2
    assert not training.optimizer.step_was_skipped


def test_skip_is_not_told_for_ever() -> None:
    training = Training(batches(3, bad={2: "log"}))
    with training.watch():
        training.run()
        assert training.accelerator.optimizer_step_was_skipped
    assert not training.accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize("kind", ["log", "sqrt"])
def test_loss_of_the_loop_can_be_replayed_in_a_given_step(kind: Bad) -> None:
    _, guard = trained(batches(5, bad={3: kind}), given=True, own_loss=False)
    (incident,) = guard.incidents
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.exact) == (line_of(LINES[kind][0]), True)


def test_bad_output_is_found_although_the_loss_is_the_loop_s_own() -> None:
    _, guard = trained(batches(5, bad={3: "log"}), given=False, own_loss=False)
    (incident,) = guard.incidents
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.module) == (line_of(LINES["log"][0]), "logs")


def test_what_cannot_be_replayed_is_not_called_transient() -> None:
    training, guard = trained(batches(5, bad={3: "sqrt"}), given=False, own_loss=False)
    (incident,) = guard.incidents
    assert incident.reports[0].location == "gradients.roots.scale"
    assert incident.diagnosis is None or incident.diagnosis.cause != "transient_fault"
    assert training.skipped == [False, False, False, True, False]


@GIVEN
def test_bad_data_are_found_where_the_loop_calls_the_model(given: bool) -> None:
    _, guard = trained(batches(5, bad={3: "data"}), given=given)
    (incident,) = guard.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "bad_input_data"
    assert incident.origin is not None
    assert incident.origin.code == 'loss: Tensor = self.model(**batch)["loss"]'


def test_overflow_inside_torch_is_found_where_the_loop_calls_the_model() -> None:
    accelerator, net = Accelerator(cpu=True), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with watch(accelerator, model, optimizer, sinks=[]) as guard:
        output = model(torch.full((1, 2), 1.5e38))
        accelerator.backward(output.sum())
        optimizer.step()
    (incident,) = guard.incidents
    assert incident.origin is not None
    assert incident.origin.code == "output = model(torch.full((1, 2), 1.5e38))"
    assert (incident.origin.phase, incident.origin.module) == ("forward", "1")


def test_bad_loss_is_found_at_its_line() -> None:
    training = Training(batches(6))
    with (
        training.watch() as guard,
        inject(training.model, op="mse_loss", at_step=3, persistent=True),
    ):
        training.run()
    (incident,) = guard.incidents
    assert incident.step == 3
    assert incident.reports[0].location == "loss"
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.module) == (line_of("the loss"), "")
    assert training.weights[3] == training.weights[4]


@GIVEN
def test_gradient_that_is_bad_again_and_again_is_not_blamed_on_the_data(given: bool) -> None:
    training = Training(batches(6))
    fault = inject(training.model, gradient="linear.weight", at_step=3, persistent=True)
    with training.watch() as guard, fault:
        training.run(guard if given else None)
    (incident,) = guard.incidents
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.module) == ("backward", "linear")
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "unknown"
    assert "No operation of torch made this gradient bad" in incident.diagnosis.why
    assert training.weights[3] == training.weights[4]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_bad_gradient_is_named_truly_although_clipping_spreads_it(value: Any) -> None:
    training = Training(batches(6))
    with training.watch() as guard:
        inner = training.accelerator.unwrap_model(training.model)
        with inject(inner, gradient="linear.weight", at_step=3, value=value):
            training.run()
    (incident,) = guard.incidents
    assert [report.location for report in incident.reports] == ["gradients.linear.weight"]
    assert training.weights[3] == training.weights[4]


@GIVEN
def test_bad_parameter_is_put_back(given: bool) -> None:
    training = Training(batches(6))
    fault = inject(training.model, parameter="linear.weight", at_step=3)
    with training.watch(config=RecoveryConfig(snapshot_every=1)) as guard, fault:
        training.run(guard if given else None)
    (incident,) = guard.incidents
    assert incident.step == 3
    assert incident.reports[0].location == "parameters.linear.weight"
    assert training.weights[3] == training.weights[4]


@GIVEN
@pytest.mark.parametrize("kind", ["log", "sqrt"])
def test_bfloat16_is_handled(kind: Bad, given: bool) -> None:
    made = batches(6, bad={3: kind})
    training, guard = trained(made, given=given, precision="bf16")
    (incident,) = guard.incidents
    assert incident.origin is not None
    assert incident.origin.line == line_of(LINES[kind][0])
    plain = Training(made[:3] + made[4:], precision="bf16").run()
    assert training.bytes() == plain.bytes()


@GIVEN
@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # of our tracer's hooks
def test_compiled_model_is_replayed_line_by_line(given: bool) -> None:
    made = batches(5, bad={3: "log"})
    training, plain = Training(made), Training(made[:3] + made[4:])
    for each in (training, plain):
        each.model = torch.compile(each.model, backend="eager")
    with training.watch() as guard:
        training.run(guard if given else None)
    (incident,) = guard.incidents
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.module) == (line_of(LINES["log"][0]), "logs")
    assert training.bytes() == plain.run().bytes()


@GIVEN
def test_bad_loss_under_a_scaler_is_left_out_and_the_scale_stays(given: bool) -> None:
    made = batches(6, bad={3: "log"})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    training = Training(made, scaler=scaler)
    with training.watch(config=RecoveryConfig(primary_strategy="skip")) as guard:
        training.run(guard if given else None)
        assert not training.optimizer.step_was_skipped
    (incident,) = guard.incidents
    assert incident.origin is not None
    assert (incident.origin.module, incident.step) == ("logs", 3)
    assert training.skipped == [False, False, False, True, False, False]
    assert scaler.get_scale() == 2.0**10
    other = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert training.bytes() == Training(made[:3] + made[4:], scaler=other).run().bytes()


def test_vetoed_step_under_a_scaler_is_told_as_skipped() -> None:
    """The scaler lets it pass: the gradient goes bad after it has looked."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    training = Training(batches(4), scaler=scaler, clip=None)
    scale = next(p for n, p in training.model.named_parameters() if n.endswith("roots.scale"))
    calls = []

    def spoil(optimizer: Any, args: Any, kwargs: Any) -> None:
        calls.append(len(calls))
        if calls[-1] == 2:
            scale.grad.fill_(torch.nan)

    handle = training.inner.register_step_pre_hook(spoil)
    with training.watch():
        training.run()
    handle.remove()
    assert training.skipped == [False, False, True, False]
    assert training.inner_scheduler.last_epoch == 3


class TestHarm:
    def test_stopping_raises_with_the_line(self) -> None:
        training = Training(batches(5, bad={3: "log"}))
        aborted = pytest.raises(TrainingAbortedError, match="step 3")
        with training.watch(on_nan="stop"), aborted as caught:
            training.run()
        assert caught.value.incident is not None
        assert caught.value.incident.origin is not None
        assert caught.value.incident.origin.line == line_of(LINES["log"][0])
        assert training.now() == training.weights[3]

    def test_warning_changes_nothing(self) -> None:
        made = batches(5, bad={3: "sqrt"})
        training = Training(made)
        with training.watch(on_nan="warn") as guard:
            training.run()
        assert guard.incidents[0].step == 3
        assert training.bytes() == Training(made).run().bytes()

    def test_step_can_be_given_to_one_that_only_warns(self) -> None:
        made = batches(5, bad={3: "sqrt"})
        training = Training(made)
        with training.watch(on_nan="warn") as guard:
            training.run(guard)
        assert guard.incidents[0].step == 3
        assert training.bytes() == Training(made).run().bytes()

    @GIVEN
    @pytest.mark.parametrize(
        "name",
        [
            "integrations.shared.user_place",
            "guard.step.GuardedStep.step",
            "guard.job.Job.begin",
            "guard.job.Job.end",
        ],
    )
    def test_error_of_ours_is_only_logged(
        self,
        name: str,
        given: bool,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fails(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("a mistake of ours")

        monkeypatch.setattr(f"stayfinite.{name}", fails)
        monkeypatch.setattr("stayfinite.safely._harmless", {})
        training = Training(batches(4))
        with training.watch() as guard:
            training.run(guard if given else None)
        assert training.bytes() == Training(batches(4)).run().bytes()
        assert ("a mistake of ours" in caplog.text) is (given or "GuardedStep" not in name)

    @pytest.mark.parametrize("given", [False, True])
    def test_second_watch_uses_the_guard_of_the_first(self, given: bool) -> None:
        made = batches(6, bad={3: "log"})
        training = Training(made)
        with training.watch() as first, training.watch() as second:
            training.run(second if given else None)
        assert first.guard is second.guard
        assert len(first.incidents) == 1
        assert training.bytes() == trained(made, given=False)[0].bytes()

    def test_two_models_under_one_guard_are_each_replayed_alone(self) -> None:
        """As under `stayfinite run`; the second has gradients while the first is looked at."""

        def run(made: list[Batch]) -> list[bytes]:
            first, second = Training(made), Training(batches(6))
            second.model.drop.p = 0.0  # both would draw on one generator
            with first.watch(), second.watch():
                for batch, other in zip(made, second.made, strict=True):
                    second.accelerator.backward(second.loss(other))
                    first.step(batch)
                    second.optimizer.step()
                    second.optimizer.zero_grad()
            return second.now()

        guard = Guard(GuardSettings(on_nan="recover"))
        guard.attach(recover_everything(guard))
        try:
            is_same = run(batches(6)) == run(batches(6, bad={3: "log"}))
        finally:
            guard.close()
        (incident,) = guard.incidents
        assert incident.origin is not None
        assert incident.origin.line == line_of(LINES["log"][0])
        assert is_same

    def test_nothing_is_left_behind(self) -> None:
        before = utils.clip_grads_with_norm_, clip_grad._clip_grads_with_norm_
        training = Training(batches(6, bad={3: "log"}))
        hooks = len(training.inner._optimizer_step_post_hooks)
        with training.watch():
            training.run()
        assert before == (utils.clip_grads_with_norm_, clip_grad._clip_grads_with_norm_)
        assert not training.inner._optimizer_step_pre_hooks
        assert len(training.inner._optimizer_step_post_hooks) == hooks
        assert not any(module._forward_pre_hooks for module in training.model.modules())

    def test_wrong_accelerator_is_one_clear_error(self) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(InputError, match="accelerator is a str; it must be an"):
            watch("cpu", model, optimizer)  # type: ignore[arg-type]

    def test_optimizer_that_was_not_prepared_is_watched_all_the_same(self) -> None:
        training = Training(batches(5, bad={3: "log"}))
        training.optimizer = training.inner
        with training.watch() as guard:
            training.run()
        assert len(guard.incidents) == 1
        assert training.weights[3] == training.weights[4]


@GIVEN
@pytest.mark.parametrize("kind", ["log", "data"])
def test_experiments_name_the_guilty_row_and_leave_no_trace(kind: Bad, given: bool) -> None:
    made = batches(8, bad={5: kind})
    proving, plain = Training(made), Training(made)
    with proving.watch(prove_seconds=60.0) as guard:
        proving.run(guard if given else None)
    with plain.watch() as other:
        plain.run(other if given else None)
    (diagnosis,) = [each.diagnosis for each in guard.incidents]
    assert diagnosis is not None
    assert diagnosis.confidence == "proven"
    assert any("row 1 of the batch" in said for said in diagnosis.evidence)
    assert proving.bytes() == plain.bytes()
