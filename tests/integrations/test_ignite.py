"""An Engine of Ignite under watch: supervised trainers and update functions of one's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ignite", reason="pytorch-ignite is not installed")

from as_before import torch_as_before as torch_as_before
from framework_nets import FILE, LINES, Bad, Batch, batches, bytes_of, line_of, net
from framework_nets import few_objects as few_objects
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import LRScheduler, PiecewiseLinear, TerminateOnNan
from ignite.metrics import RunningAverage
from torch import Tensor, nn
from torch.nn import functional, utils
from torch.nn.utils import clip_grad

import stayfinite
from stayfinite import RecoveryConfig, TrainingAbortedError
from stayfinite.errors import InputError
from stayfinite.integrations.ignite import StayFinite
from stayfinite.testing import inject

# Of a scheduler that steps before the first update; how an engine calls it is its user's affair.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")


class Training:
    """An engine with its model, and what there is to compare afterwards."""

    def __init__(
        self,
        made: list[Batch],
        *,
        accumulation: int = 1,
        supervised: bool = False,
        precision: torch.dtype | None = None,
        scaler: Any = None,
    ) -> None:
        self.made, self.accumulation = made, accumulation
        self.precision, self.scaler = precision, scaler
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.engine = self.supervised() if supervised else Engine(self.update)
        self.weights: list[list[bytes]] = []
        self.rates: list[float] = []
        self.engine.add_event_handler(Events.ITERATION_STARTED, self.note)

    def supervised(self) -> Engine:
        trainer: Engine = create_supervised_trainer(
            self.model,
            self.optimizer,
            functional.mse_loss,
            prepare_batch=lambda batch, **_: (batch["x"], batch["labels"]),
            model_transform=lambda output: output["logits"],
            gradient_accumulation_steps=self.accumulation,
        )
        return trainer

    def update(self, engine: Engine, batch: Batch) -> float:
        """As people write it, with all that can go on in there."""
        if (engine.state.iteration - 1) % self.accumulation == 0:
            self.optimizer.zero_grad()
        self.model.train()
        enabled = self.precision is not None
        with torch.autocast("cpu", dtype=self.precision, enabled=enabled):
            loss = self.model(**batch)["loss"] / self.accumulation
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if engine.state.iteration % self.accumulation == 0:
            self.take_step()
        return loss.item()

    def take_step(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def note(self, engine: Engine) -> None:
        self.weights.append([p.detach().numpy().tobytes() for p in self.model.parameters()])
        self.rates.append(self.optimizer.param_groups[0]["lr"])

    def steps_scheduler(self, event: Any = Events.ITERATION_COMPLETED) -> Training:
        self.engine.add_event_handler(event, lambda: self.scheduler.step())
        return self

    def watched(self, **options: Any) -> StayFinite:
        given = {"sinks": [], **options}
        handler = StayFinite(self.model, self.optimizer, self.scheduler, **given)
        return handler.attach(self.engine)

    def run(self, epochs: int = 1) -> Training:
        torch.manual_seed(3)
        self.engine.run(self.made, max_epochs=epochs, epoch_length=len(self.made))
        return self

    def bytes(self) -> list[Any]:
        return bytes_of(self.model, self.optimizer, self.scheduler)


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["log", "sqrt"])
def test_bad_batch_is_found_with_line_and_module(
    kind: Bad, accumulation: int, supervised: bool
) -> None:
    made = batches(8, bad={5: kind})
    training = Training(made, accumulation=accumulation, supervised=supervised)
    handler = training.watched()
    training.run()
    (incident,) = handler.incidents
    text, module, op = LINES[kind]
    assert incident.step == 5 // accumulation
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.module) == (line_of(text), module)
    assert (incident.origin.op, incident.origin.exact) == (op, True)
    assert Path(incident.origin.file or "").name == FILE.name
    first = 5 - 5 % accumulation
    assert training.weights[first] == training.weights[first + accumulation]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", ["log", "sqrt", "data"])
def test_bytes_are_those_of_a_run_without_the_batch(kind: Bad, accumulation: int) -> None:
    made = batches(12, bad={4: kind})
    training = Training(made, accumulation=accumulation)
    training.watched()
    training.run()
    first = 4 - 4 % accumulation
    others = made[:first] + made[first + accumulation :]
    assert training.bytes() == Training(others, accumulation=accumulation).run().bytes()


@pytest.mark.parametrize(
    ("event", "bad"),
    [
        (Events.ITERATION_STARTED, 3),
        (Events.ITERATION_COMPLETED, 3),
        (Events.ITERATION_COMPLETED, 5),
    ],
)
def test_scheduler_of_torch_does_not_notice_a_step_that_was_left_out(event: Any, bad: int) -> None:
    made = batches(6, bad={bad: "log"})
    training = Training(made).steps_scheduler(event)
    training.watched()
    training.run()
    others = Training(made[:bad] + made[bad + 1 :]).steps_scheduler(event).run()
    assert training.bytes() == others.bytes()


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
@pytest.mark.parametrize("wraps", [True, False])
def test_scheduler_of_ignite_does_not_notice_it_either(event: Any, wraps: bool) -> None:
    def rates(made: list[Batch], *, watched: bool) -> list[float]:
        training = Training(made)
        milestones = [(0, 0.1), (20, 0.0)]
        scheduler: Any = PiecewiseLinear(training.optimizer, "lr", milestones)
        if wraps:
            scheduler = LRScheduler(training.scheduler)
        used: list[float] = []
        training.optimizer.register_step_post_hook(
            lambda *_: used.append(training.optimizer.param_groups[0]["lr"])
        )
        training.engine.add_event_handler(event, scheduler)
        if watched:
            given = training.model, training.optimizer, scheduler
            StayFinite(*given, sinks=[]).attach(training.engine)
        training.run()
        return used

    made = batches(6, bad={3: "log"})
    used = rates(made, watched=True)
    # The bad step was attempted twice: by the engine, and to look at it.
    assert used[:3] + used[5:] == rates(made[:3] + made[4:], watched=False)


@pytest.mark.parametrize("event", [Events.EPOCH_STARTED, Events.EPOCH_COMPLETED])
def test_scheduler_of_epochs_is_not_taken_back(event: Any) -> None:
    made = batches(4, bad={3: "log"})
    training = Training(made).steps_scheduler(event)
    training.watched()
    training.run(epochs=3)
    assert training.scheduler.last_epoch == 3


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("on_nan", ["recover", "stop", "warn"])
def test_healthy_training_is_the_same_to_the_byte(accumulation: int, on_nan: Any) -> None:
    plain = Training(batches(6), accumulation=accumulation).steps_scheduler().run(epochs=2)
    training = Training(batches(6), accumulation=accumulation).steps_scheduler()
    handler = training.watched(on_nan=on_nan)
    training.run(epochs=2)
    assert handler.incidents == []
    assert training.bytes() == plain.bytes()
    assert training.engine.state.output == plain.engine.state.output


@pytest.mark.parametrize("kind", ["log", "sqrt"])
def test_bfloat16_is_handled(kind: Bad) -> None:
    made = batches(6, bad={3: kind})
    training = Training(made, precision=torch.bfloat16)
    handler = training.watched()
    training.run()
    (incident,) = handler.incidents
    assert incident.origin is not None
    assert incident.origin.line == line_of(LINES[kind][0])
    plain = Training(made[:3] + made[4:], precision=torch.bfloat16).run()
    assert training.bytes() == plain.bytes()


@pytest.mark.parametrize("found", [True, False])
def test_bad_loss_under_a_scaler_is_left_out_and_the_scale_stays(found: bool) -> None:
    made = batches(6, bad={3: "log"})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    training = Training(made, precision=torch.float16, scaler=scaler)
    if found:  # where create_supervised_trainer puts it
        training.engine.state.scaler = scaler
    handler = training.watched(
        config=RecoveryConfig(primary_strategy="skip"), scaler=None if found else scaler
    )
    training.run()
    (incident,) = handler.incidents
    assert incident.origin is not None
    assert (incident.origin.module, incident.step) == ("logs", 3)
    assert scaler.get_scale() == 2.0**10
    other = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    others = made[:3] + made[4:]
    plain = Training(others, precision=torch.float16, scaler=other).run()
    assert training.bytes() == plain.bytes()


def test_bad_loss_is_found_at_its_line() -> None:
    training = Training(batches(6))
    handler = training.watched()
    with inject(training.model, op="mse_loss", at_step=3, persistent=True):
        training.run()
    (incident,) = handler.incidents
    assert incident.origin is not None
    assert (incident.step, incident.origin.line) == (3, line_of("the loss"))
    assert incident.reports[0].location == "loss"
    assert training.weights[3] == training.weights[4]


def test_loss_that_no_operation_made_bad_is_not_blamed_on_the_data() -> None:
    training = Training(batches(6))
    handler = training.watched()
    with inject(training.model, loss=True, at_step=3, persistent=True):
        training.run()
    (incident,) = handler.incidents
    assert (incident.step, incident.reports[0].location) == (3, "loss")
    assert incident.origin is not None
    assert incident.origin.code == 'loss = self.model(**batch)["loss"] / self.accumulation'
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "unknown"
    assert training.weights[3] == training.weights[4]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_bad_gradient_is_named_truly_although_clipping_spreads_it(value: Any) -> None:
    training = Training(batches(6))
    handler = training.watched(config=RecoveryConfig(primary_strategy="skip"))
    with inject(training.model, gradient="linear.weight", at_step=3, value=value, persistent=True):
        training.run()
    (incident,) = handler.incidents
    assert incident.step == 3
    assert [report.location for report in incident.reports] == ["gradients.linear.weight"]
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.module) == ("backward", "linear")
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "unknown"
    assert training.weights[3] == training.weights[4]


def test_bad_data_are_found_in_the_batch() -> None:
    training = Training(batches(5, bad={2: "data"}))
    handler = training.watched()
    training.run()
    (incident,) = handler.incidents
    assert (incident.step, incident.origin and incident.origin.phase) == (2, "data")
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "bad_input_data"
    assert training.weights[2] == training.weights[3]


def test_bad_parameter_is_put_back() -> None:
    training = Training(batches(6))
    handler = training.watched(config=RecoveryConfig(snapshot_every=1))
    with inject(training.model, parameter="linear.weight", at_step=3):
        training.run()
    (incident,) = handler.incidents
    assert incident.step == 3
    assert incident.reports[0].location == "parameters.linear.weight"
    assert training.weights[3] == training.weights[4]


class TestOutput:
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_averages_and_termination_do_not_see_a_step_that_was_left_out(
        self, accumulation: int
    ) -> None:
        training = Training(batches(8, bad={4: "log"}), accumulation=accumulation)
        RunningAverage(output_transform=lambda x: x).attach(training.engine, "loss")
        training.engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        training.watched()
        training.run()
        assert training.engine.state.iteration == 8
        assert math.isfinite(training.engine.state.metrics["loss"])

    def test_without_a_good_step_before_it_is_what_came(self) -> None:
        training = Training(batches(3, bad={0: "log"}))
        outputs: list[float] = []
        training.engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: outputs.append(engine.state.output)
        )
        training.watched()
        training.run()
        assert [math.isnan(output) for output in outputs] == [True, False, False]

    def test_update_that_gives_nothing_is_fine(self) -> None:
        training = Training(batches(4, bad={2: "log"}))
        original = training.engine._process_function

        def update(engine: Engine, batch: Batch) -> None:
            original(engine, batch)

        training.engine._process_function = update
        handler = training.watched()
        training.run()
        assert training.engine.state.output is None
        assert len(handler.incidents) == 1


class TestHarm:
    def test_stopping_raises_with_the_line(self) -> None:
        training = Training(batches(5, bad={3: "log"}))
        training.watched(on_nan="stop")
        with pytest.raises(TrainingAbortedError, match="step 3") as caught:
            training.run()
        assert caught.value.incident is not None
        assert caught.value.incident.origin is not None
        assert caught.value.incident.origin.line == line_of(LINES["log"][0])
        assert nothing_is_left_in(training)

    def test_warning_changes_nothing(self) -> None:
        made = batches(5, bad={3: "sqrt"})
        training = Training(made)
        handler = training.watched(on_nan="warn")
        training.run()
        assert handler.incidents[0].step == 3
        assert training.bytes() == Training(made).run().bytes()

    @pytest.mark.parametrize(
        "name",
        [
            "integrations.ignite.watch_loop",
            "integrations.ignite._Steps._output_after",
            "guard.step.GuardedStep.step",
            "guard.job.Job.begin",
            "guard.job.Job.end",
        ],
    )
    def test_error_of_ours_is_only_logged(
        self, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("a mistake of ours")

        monkeypatch.setattr(f"stayfinite.{name}", fails)
        monkeypatch.setattr("stayfinite.safely._harmless", {})
        training = Training(batches(4))
        training.watched()
        assert training.run().bytes() == Training(batches(4)).run().bytes()
        assert "a mistake of ours" in caplog.text

    def test_second_handler_does_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        made = batches(6, bad={3: "log"})
        training, other = Training(made), Training(made)
        first, second = training.watched(), training.watched()
        training.run()
        assert (len(first.incidents), len(second.incidents)) == (1, 0)
        assert "has a guard already" in caplog.text
        other.watched()
        assert training.bytes() == other.run().bytes()

    def test_handler_beside_a_watch_does_nothing(self) -> None:
        made = batches(6, bad={3: "log"})
        training, plain = Training(made), Training(made)
        handler = training.watched()
        with stayfinite.watch(training.model, training.optimizer, sinks=[]) as guard:
            training.run()
        assert (len(handler.incidents), len(guard.incidents)) == (0, 1)
        with stayfinite.watch(plain.model, plain.optimizer, sinks=[]):
            plain.run()
        assert training.bytes() == plain.bytes()

    def test_error_of_the_user_comes_through_and_leaves_no_hook(self) -> None:
        training = Training(batches(4))

        def fails(engine: Engine, batch: Batch) -> float:
            if engine.state.iteration == 3:
                raise ZeroDivisionError("mine")
            return training.update(engine, batch)

        training.engine._process_function = fails
        training.watched()
        with pytest.raises(ZeroDivisionError, match="mine"):
            training.run()
        assert nothing_is_left_in(training, update=fails)

    def test_error_that_the_user_handles_ends_nothing(self) -> None:
        """An engine with a handler for exceptions goes on with its next epoch."""
        training = Training(batches(4, bad={3: "log"}))
        seen: list[Exception] = []

        def fails_once(engine: Engine, batch: Batch) -> float:
            if engine.state.iteration == 2 and not seen:
                raise ZeroDivisionError("mine")
            return training.update(engine, batch)

        training.engine._process_function = fails_once
        training.engine.add_event_handler(
            Events.EXCEPTION_RAISED, lambda engine, error: seen.append(error)
        )
        handler = training.watched()
        training.run(epochs=3)
        assert len(seen) == 1
        assert len(handler.incidents) >= 1
        assert all(bool(p.isfinite().all()) for p in training.model.parameters())

    @pytest.mark.parametrize("skips_completed", [True, False])
    def test_termination_leaves_no_hook(self, skips_completed: bool) -> None:
        training = Training(batches(4))
        training.engine.add_event_handler(
            Events.ITERATION_COMPLETED(once=2),
            lambda engine: engine.terminate(skip_completed=skips_completed),
        )
        training.watched()
        training.run()
        assert nothing_is_left_in(training)

    def test_detaching_leaves_the_engine_as_it_was(self) -> None:
        training = Training(batches(4))
        before = handlers_of(training.engine)
        with training.watched():
            assert handlers_of(training.engine) != before
            training.run()
        assert handlers_of(training.engine) == before
        assert nothing_is_left_in(training)

    def test_engine_can_run_again_and_again(self) -> None:
        training = Training(batches(4, bad={2: "log"}))
        handler = training.watched()
        training.run(epochs=1).run(epochs=1)
        assert [incident.step for incident in handler.incidents] == [2, 2]

    def test_wrong_engine_is_one_clear_error(self) -> None:
        model = nn.Linear(2, 1)
        handler = StayFinite(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(InputError, match="engine is a Linear; it must be an"):
            handler.attach(model)  # type: ignore[arg-type]

    def test_second_attach_is_one_clear_error(self) -> None:
        training = Training(batches(2))
        handler = training.watched()
        with pytest.raises(InputError, match="detach"):
            handler.attach(training.engine)


def handlers_of(engine: Engine) -> dict[Any, int]:
    return {event: len(each) for event, each in engine._event_handlers.items() if each}


def nothing_is_left_in(training: Training, update: Any = None) -> bool:
    clips = utils.clip_grads_with_norm_, clip_grad._clip_grads_with_norm_
    hooked = [
        *training.optimizer._optimizer_step_pre_hooks,
        *training.optimizer._optimizer_step_post_hooks,
        *(hook for module in training.model.modules() for hook in module._forward_pre_hooks),
    ]
    is_own = training.engine._process_function == (update or training.update)
    names = {f"{clip.__module__}.{clip.__qualname__}" for clip in clips}
    return is_own and not hooked and len(names) == 1


def test_loss_as_a_tensor_is_kept_as_it_is() -> None:
    training = Training(batches(3))

    def update(engine: Engine, batch: Batch) -> Tensor:
        return torch.as_tensor(training.update(engine, batch))

    training.engine._process_function = update
    training.watched()
    training.run()
    assert isinstance(training.engine.state.output, Tensor)


@pytest.mark.parametrize("kind", ["log", "data"])
@pytest.mark.parametrize("supervised", [False, True])
def test_experiments_name_the_guilty_row_and_leave_no_trace(kind: Bad, supervised: bool) -> None:
    made = batches(8, bad={5: kind})
    proving, plain = Training(made, supervised=supervised), Training(made, supervised=supervised)
    handler = proving.watched(prove_seconds=60.0)
    proving.run()
    plain.watched()
    plain.run()
    (diagnosis,) = [each.diagnosis for each in handler.incidents]
    assert diagnosis is not None
    assert diagnosis.confidence == "proven"
    assert any("row 1 of the batch" in said for said in diagnosis.evidence)
    assert proving.bytes() == plain.bytes()
