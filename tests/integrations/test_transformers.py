"""The Trainer of transformers with our callback: found, named, undone, and no trace left."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from as_before import torch_as_before as torch_as_before
from framework_nets import FILE, LINES, Bad, Net, batches, bytes_of, line_of, net, samples
from framework_nets import few_objects as few_objects
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import ModelOutput

from stayfinite import RecoveryConfig, TrainingAbortedError
from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard.discover import recover_everything
from stayfinite.integrations.transformers import StayFiniteCallback, join_trainers
from stayfinite.testing import inject

SIZE = 6


class InOrder(Trainer):
    """The samples come in their order, so that a run can do without some of them."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Recorder(TrainerCallback):
    """The weights as each step began."""

    def __init__(self) -> None:
        self.weights: list[list[bytes]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.weights.append([p.detach().numpy().tobytes() for p in model.parameters()])


class Run:
    """One training, with all that there is to compare afterwards."""

    def __init__(
        self,
        folder: Path,
        made: list[dict[str, Tensor]],
        *callbacks: TrainerCallback,
        model: nn.Module | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.model = net(seed) if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.recorder = Recorder()
        self.trainer = InOrder(
            model=self.model,
            args=arguments(folder, **options),
            train_dataset=samples(made),
            optimizers=(self.optimizer, self.scheduler),
            callbacks=[self.recorder, *callbacks],
        )

    def train(self) -> Run:
        torch.manual_seed(3)
        self.trainer.train()
        return self

    def bytes(self) -> list[Any]:
        return bytes_of(self.model, self.optimizer, self.scheduler)

    def losses(self) -> list[dict[str, Any]]:
        return [entry for entry in self.trainer.state.log_history if "loss" in entry]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": SIZE,
        "num_train_epochs": 1,
        "logging_steps": 2,
        "save_strategy": "no",
        "remove_unused_columns": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    return TrainingArguments(output_dir=str(folder), **given)


def quiet(**options: Any) -> StayFiniteCallback:
    return StayFiniteCallback(sinks=[], **options)


def is_finite(model: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in model.state_dict().values())


@pytest.mark.parametrize("kind", ["log", "sqrt"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bad_batch_is_found_with_line_and_module(
    tmp_path: Path, kind: Bad, accumulation: int
) -> None:
    callback = quiet()
    run = Run(
        tmp_path,
        batches(8, bad={5: kind}),
        callback,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=1.0,
    ).train()
    (incident,) = callback.incidents
    text, module, op = LINES[kind]
    assert incident.step == 5 // accumulation
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.module) == (line_of(text), module)
    assert incident.origin.op == op
    assert Path(incident.origin.file or "").name == FILE.name
    assert incident.origin.exact
    weights = run.recorder.weights
    assert weights[incident.step] == weights[incident.step + 1]
    assert len(weights) == run.trainer.state.global_step == 8 // accumulation


def test_bad_data_are_found_in_the_batch(tmp_path: Path) -> None:
    callback = quiet()
    Run(tmp_path, batches(5, bad={2: "data"}), callback).train()
    (incident,) = callback.incidents
    assert incident.step == 2
    assert incident.origin is not None
    assert incident.origin.phase == "data"
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "bad_input_data"


def test_bad_loss_is_found_at_its_line(tmp_path: Path) -> None:
    callback = quiet()
    run = Run(tmp_path, batches(6), callback)
    with inject(run.model, op="mse_loss", at_step=3, persistent=True):
        run.train()
    (incident,) = callback.incidents
    assert incident.step == 3
    assert incident.reports[0].location == "loss"
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.module) == (line_of("the loss"), "")
    assert run.recorder.weights[3] == run.recorder.weights[4]


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0, 1e-3])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_bad_gradient_is_named_truly_although_clipping_spreads_it(
    tmp_path: Path, max_grad_norm: float, value: Any
) -> None:
    callback = quiet()
    run = Run(tmp_path, batches(6), callback, max_grad_norm=max_grad_norm)
    with inject(run.model, gradient="linear.weight", at_step=3, value=value):
        run.train()
    (incident,) = callback.incidents
    assert [report.location for report in incident.reports] == ["gradients.linear.weight"]
    assert incident.step == 3
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "transient_fault"
    assert run.recorder.weights[3] == run.recorder.weights[4]
    assert run.recorder.weights[4] != run.recorder.weights[5]


def test_gradient_that_is_bad_again_and_again_is_not_blamed_on_the_data(tmp_path: Path) -> None:
    callback = quiet()
    run = Run(tmp_path, batches(6), callback)
    with inject(run.model, gradient="linear.weight", at_step=3, persistent=True):
        run.train()
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.module) == ("backward", "linear")
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "unknown"
    assert "No operation of torch made this gradient bad" in incident.diagnosis.why


def test_bad_parameter_is_put_back(tmp_path: Path) -> None:
    callback = quiet(config=RecoveryConfig(snapshot_every=1))
    run = Run(tmp_path, batches(6), callback)
    with inject(run.model, parameter="linear.weight", at_step=3):
        run.train()
    (incident,) = callback.incidents
    assert incident.step == 3
    assert incident.reports[0].location == "parameters.linear.weight"
    assert run.recorder.weights[3] == run.recorder.weights[4]
    assert is_finite(run.model)


@pytest.mark.parametrize("kind", ["log", "sqrt", "data"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bytes_are_those_of_a_run_without_the_batch(
    tmp_path: Path, kind: Bad, accumulation: int
) -> None:
    made = batches(10, bad={5: kind})
    first = 5 - 5 % accumulation
    others = made[:first] + made[first + accumulation :]
    options = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0.5}
    run = Run(tmp_path, made, quiet(), **options).train()
    assert run.bytes() == Run(tmp_path, others, **options).train().bytes()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("on_nan", ["recover", "stop", "warn"])
def test_healthy_training_is_the_same_to_the_byte(
    tmp_path: Path, accumulation: int, on_nan: Any
) -> None:
    made, options = batches(7), {"gradient_accumulation_steps": accumulation}
    callback = quiet(on_nan=on_nan)
    watched = Run(tmp_path, made, callback, **options).train()
    plain = Run(tmp_path, made, **options).train()
    assert watched.bytes() == plain.bytes()
    assert watched.losses() == plain.losses()
    assert callback.incidents == []


@pytest.mark.parametrize("kind", ["log", "sqrt"])
def test_bfloat16_is_handled(tmp_path: Path, kind: Bad) -> None:
    made = batches(6, bad={3: kind})
    callback = quiet()
    run = Run(tmp_path, made, callback, bf16=True).train()
    (incident,) = callback.incidents
    text, module, _ = LINES[kind]
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.module) == (line_of(text), module)
    assert run.bytes() == Run(tmp_path, made[:3] + made[4:], bf16=True).train().bytes()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # of our tracer's hooks
def test_compiled_model_is_replayed_line_by_line(tmp_path: Path) -> None:
    made, callback = batches(5, bad={3: "log"}), quiet()
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    run = Run(tmp_path, made, callback, **options).train()
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert (incident.origin.line, incident.origin.module) == (line_of(LINES["log"][0]), "logs")
    assert run.bytes() == Run(tmp_path, made[:3] + made[4:], **options).train().bytes()


class HalfPrecision(InOrder):
    """float16 with a scaler, which Accelerate does not offer on a CPU by itself."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state._mixed_precision = "fp16"
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)


def test_bad_loss_under_a_scaler_is_left_out_and_the_scale_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "InOrder", HalfPrecision)
    made = batches(6, bad={3: "log"})
    callback = quiet(config=RecoveryConfig(primary_strategy="skip"))
    run = Run(tmp_path, made, callback).train()
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert (incident.origin.module, incident.step) == ("logs", 3)
    assert run.trainer.accelerator.scaler.get_scale() == 2.0**10
    assert run.bytes() == Run(tmp_path, made[:3] + made[4:]).train().bytes()


def test_overflow_that_a_scaler_absorbs_is_its_own_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "InOrder", HalfPrecision)
    made = batches(6, bad={3: "sqrt"})
    callback = quiet()
    run, plain = Run(tmp_path, made, callback).train(), Run(tmp_path, made).train()
    assert callback.incidents == []
    assert run.trainer.accelerator.scaler.get_scale() == 2.0**9
    assert run.bytes() == plain.bytes()


def as_tuple(output: dict[str, Tensor]) -> Any:
    return output["loss"], output["logits"]


@dataclasses.dataclass
class Named(ModelOutput):
    loss: Any = None
    logits: Any = None


def as_model_output(output: dict[str, Tensor]) -> Any:
    return Named(loss=output["loss"], logits=output["logits"])


@pytest.mark.parametrize("shape", [dict, as_tuple, as_model_output])
def test_results_of_any_shape_are_understood(tmp_path: Path, shape: Callable[[Any], Any]) -> None:
    class Shaped(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return shape(super().forward(x, labels))

    torch.manual_seed(0)
    callback = quiet()
    Run(tmp_path, batches(5, bad={2: "log"}), callback, model=Shaped()).train()
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert incident.origin.module == "logs"


def test_own_loss_of_a_trainer_is_replayed_too(tmp_path: Path) -> None:
    class OwnLoss(InOrder):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            y = model(inputs["x"])["logits"]
            return torch.log(inputs["labels"]).sum() + y.mean()  # in a loss of my own

    made = batches(5)
    made[3]["labels"][2] = -1.0
    callback = quiet()
    run = Run(tmp_path, made, callback)
    run.trainer.__class__ = OwnLoss
    run.train()
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert (incident.origin.op, incident.origin.function) == ("aten.log.default", "compute_loss")


def test_vetoed_step_does_not_move_the_scheduler(tmp_path: Path) -> None:
    run = Run(tmp_path, batches(8, bad={2: "log", 5: "sqrt"}), quiet()).train()
    assert run.trainer.state.global_step == 8
    assert run.scheduler.last_epoch == 6
    assert not run.trainer.accelerator.optimizer_step_was_skipped


def test_scheduler_that_follows_an_evaluation_is_not_taken_back(tmp_path: Path) -> None:
    run = Run(tmp_path, batches(4, bad={1: "log", 3: "log"}), quiet(), eval_steps=2)
    args = run.trainer.args
    args.eval_strategy, args.metric_for_best_model = "steps", "loss"
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer)
    run.trainer.lr_scheduler = plateau
    run.trainer.eval_dataset = samples(batches(2))
    run.trainer.state.eval_steps = 2
    run.train()
    assert plateau.last_epoch == 2


class TestLogs:
    def test_mean_leaves_out_what_is_bad_and_says_so(self, tmp_path: Path) -> None:
        made = batches(6, bad={3: "log"})
        run = Run(tmp_path, made, quiet()).train()
        plain = Run(tmp_path, made[:3], logging_steps=1).train()
        entry = run.losses()[1]
        assert entry["nonfinite_losses"] == entry["skipped_steps"] == 1
        assert entry["loss"] == pytest.approx(plain.losses()[2]["loss"])
        assert "nonfinite_losses" not in run.losses()[0]

    def test_loss_of_a_bad_model_is_not_said_to_be_0(self, tmp_path: Path) -> None:
        made = batches(8, bad={2: "log"})
        plain = Run(tmp_path, made).train()
        assert [entry["loss"] for entry in plain.losses()[2:]] == [0.0, 0.0]
        callback = quiet(on_nan="warn")
        watched = Run(tmp_path, made, callback).train()
        assert all(math.isnan(entry["loss"]) for entry in watched.losses()[2:])
        assert [entry["nonfinite_losses"] for entry in watched.losses()[2:]] == [2, 2]
        assert not is_finite(watched.model)
        assert callback.incidents[0].step == 2

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_one_bad_loss_does_not_stay_in_an_unfiltered_mean(
        self, tmp_path: Path, accumulation: int
    ) -> None:
        run = Run(
            tmp_path,
            batches(16, bad={2: "log"}),
            quiet(),
            logging_nan_inf_filter=False,
            gradient_accumulation_steps=accumulation,
            logging_steps=3,
        ).train()
        assert all(math.isfinite(entry["loss"]) for entry in run.losses())
        assert math.isfinite(run.trainer.state.log_history[-1]["train_loss"])


class TestCheckpoints:
    def test_bad_model_is_not_saved(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        run = Run(
            tmp_path,
            batches(8, bad={3: "log"}),
            quiet(on_nan="warn"),
            save_strategy="steps",
            save_steps=2,
        ).train()
        assert run.trainer.state.global_step == 8
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
        assert "no checkpoint is saved at step 4: parameters.roots.scale is not" in caplog.text

    def test_bad_model_is_not_saved_at_the_end_of_an_epoch_either(self, tmp_path: Path) -> None:
        Run(
            tmp_path, batches(4, bad={3: "log"}), quiet(on_nan="warn"), save_strategy="epoch"
        ).train()
        assert list(tmp_path.glob("checkpoint-*")) == []

    def test_what_is_meant_to_be_infinite_keeps_no_checkpoint_back(self, tmp_path: Path) -> None:
        model = net()
        model.frozen = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
        model.register_buffer("mask", torch.full((2,), -torch.inf))
        Run(tmp_path, batches(4), quiet(), model=model, save_strategy="steps", save_steps=4).train()
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]

    def test_training_goes_on_from_a_checkpoint_beside_a_vetoed_step(self, tmp_path: Path) -> None:
        made = batches(8, bad={3: "log"})
        options = {"save_strategy": "steps", "save_steps": 4}
        whole = Run(tmp_path, made, quiet(), **options).train()
        resumed = Run(tmp_path, made, quiet(), **options)
        resumed.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert whole.bytes() == resumed.bytes()


class TestHarm:
    """Training is never disturbed, whatever happens to us."""

    def test_second_callback_does_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = quiet(), quiet()
        made = batches(6, bad={3: "log"})
        run = Run(tmp_path, made, first, second).train()
        assert (len(first.incidents), len(second.incidents)) == (1, 0)
        assert "another callback watches it" in caplog.text
        assert run.bytes() == Run(tmp_path, made, quiet()).train().bytes()

    @pytest.mark.parametrize(
        "name",
        [
            "transformers._calling_trainer",
            "transformers.guard_over",
            "transformers.WatchedTrainer._begin",
            "transformers.WatchedTrainer.end_step",
            "transformers.WatchedTrainer.may_save",
            "transformers.LoggedLosses.add",
            "transformers.LoggedLosses.completed_log",
        ],
    )
    def test_error_of_ours_is_only_logged(
        self,
        tmp_path: Path,
        name: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fails(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("a mistake of ours")

        monkeypatch.setattr(f"stayfinite.integrations.{name}", fails)
        monkeypatch.setattr("stayfinite.safely._harmless", {})
        made, saving = batches(2), {"save_strategy": "steps", "save_steps": 2}
        run = Run(tmp_path, made, quiet(), **saving).train()
        assert run.bytes() == Run(tmp_path, made).train().bytes()
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
        assert "a mistake of ours" in caplog.text
        assert no_trace_in(run)

    def test_stopping_leaves_the_weights_of_the_last_good_step(self, tmp_path: Path) -> None:
        callback = quiet(on_nan="stop")
        run = Run(tmp_path, batches(6, bad={3: "log"}), callback)
        with pytest.raises(TrainingAbortedError, match="step 3") as caught:
            run.train()
        assert caught.value.incident is not None
        assert caught.value.incident.origin is not None
        assert caught.value.incident.origin.line == line_of(LINES["log"][0])
        now = [p.detach().numpy().tobytes() for p in run.model.parameters()]
        assert now == run.recorder.weights[3]

    def test_error_of_the_user_comes_through_and_leaves_no_hook(self, tmp_path: Path) -> None:
        class Fails(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 2:
                    raise ZeroDivisionError("mine")

        run = Run(tmp_path, batches(4), quiet(), Fails())
        with pytest.raises(ZeroDivisionError, match="mine"):
            run.train()
        assert no_trace_in(run)

    def test_wrong_option_is_an_error_at_once(self) -> None:
        with pytest.raises(ValueError, match="on_nan is 'ignore'"):
            quiet(on_nan="ignore")


def no_trace_in(run: Run) -> bool:
    """Whether trainer, model, optimizer and clipping are as if we had never been there."""
    hooked = [
        *run.optimizer._optimizer_step_pre_hooks,
        *run.optimizer._optimizer_step_post_hooks,
        *(hook for module in run.model.modules() for hook in module._forward_pre_hooks),
        *(name for name in ("training_step", "log", "_save_checkpoint", "_run_epoch")
          if name in vars(run.trainer)),
    ]  # fmt: skip
    clips = utils.clip_grads_with_norm_, clip_grad._clip_grads_with_norm_
    return not hooked and {clip.__module__ for clip in clips} == {"torch.nn.utils.clip_grad"}


@pytest.mark.parametrize("bad", [{}, {2: "log"}])
def test_no_hook_is_left_behind(tmp_path: Path, bad: dict[int, Bad]) -> None:
    before = utils.clip_grads_with_norm_, clip_grad._clip_grads_with_norm_
    callback = quiet()
    run = Run(tmp_path, batches(4, bad=bad), callback).train()
    assert no_trace_in(run)
    assert before == (utils.clip_grads_with_norm_, clip_grad._clip_grads_with_norm_)
    assert callback.guard is None


def test_same_callback_watches_one_training_after_another(tmp_path: Path) -> None:
    callback = quiet()
    made = batches(4, bad={2: "log"})
    run = Run(tmp_path, made, callback)
    run.train().train()
    Run(tmp_path, made, callback).train()
    assert [incident.step for incident in callback.incidents] == [2, 2, 2]


class TestOtherGuards:
    """As `stayfinite run --on-nan recover` has it: one guard over every optimizer."""

    @pytest.fixture
    def guard(self) -> Iterator[Guard]:
        guard = Guard(GuardSettings(on_nan="recover"))
        guard.attach(recover_everything(guard))
        yield guard
        guard.close()

    def test_callback_helps_the_guard_that_is_there(self, tmp_path: Path, guard: Guard) -> None:
        callback = quiet()
        run = Run(tmp_path, batches(6, bad={3: "log"}), callback).train()
        assert callback.incidents == guard.incidents
        (incident,) = guard.incidents
        assert incident.origin is not None
        assert incident.origin.module == "logs"
        assert run.recorder.weights[3] == run.recorder.weights[4]

    def test_bytes_are_the_same_with_one_guard_or_the_other(
        self, tmp_path: Path, guard: Guard
    ) -> None:
        made = batches(8, bad={3: "sqrt", 4: "log"})
        with_both = Run(tmp_path, made, quiet()).train()
        guard.close()
        assert with_both.bytes() == Run(tmp_path, made, quiet()).train().bytes()

    @pytest.mark.parametrize("has_callback", [True, False])
    def test_trainers_join_without_a_callback_in_the_script(
        self, tmp_path: Path, guard: Guard, has_callback: bool
    ) -> None:
        given = [quiet()] if has_callback else []
        with join_trainers():
            run = Run(tmp_path, batches(6, bad={3: "log"}), *given)
        ours = [each for each in run.trainer.callback_handler.callbacks if is_ours(each)]
        run.train()
        assert len(ours) == 1
        (incident,) = guard.incidents
        assert incident.origin is not None
        assert incident.origin.line == line_of(LINES["log"][0])
        assert run.losses()[1]["nonfinite_losses"] == 1

    def test_trainer_that_joined_does_nothing_alone(self, tmp_path: Path) -> None:
        made = batches(5, bad={3: "log"})
        with join_trainers():
            run = Run(tmp_path, made)
        assert repr(run.train().bytes()) == repr(Run(tmp_path, made).train().bytes())
        assert not is_finite(run.model)

    def test_replay_of_a_trainer_is_not_used_for_a_loop_after_it(
        self, tmp_path: Path, guard: Guard
    ) -> None:
        Run(tmp_path, batches(3), quiet()).train()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in batches(3, bad={1: "log"}):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
        (incident,) = guard.incidents
        assert incident.diagnosis is None or incident.diagnosis.cause != "transient_fault"


def is_ours(callback: TrainerCallback) -> bool:
    return isinstance(callback, StayFiniteCallback)


def test_report_goes_to_stderr_by_default_on_lines_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path, batches(4, bad={2: "log"}), StayFiniteCallback(), disable_tqdm=False).train()
    said = capsys.readouterr().err
    assert "%|" in said  # a progress bar
    assert said.partition("error[log_of_negative]")[0].endswith("\r")


def test_incident_walks_through_all_objects_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks, everything = [], gc.get_objects

    def counted() -> list[Any]:
        walks.append(1)
        return everything()

    run = Run(tmp_path, batches(4, bad={2: "log"}), quiet())
    monkeypatch.setattr(gc, "get_objects", counted)
    run.train()
    assert len(walks) == 1


@pytest.mark.parametrize("kind", ["log", "data"])
def test_experiments_name_the_guilty_sample_and_leave_no_trace(tmp_path: Path, kind: Bad) -> None:
    made = batches(8, bad={5: kind})
    proving, plain = quiet(prove_seconds=60.0), quiet()
    watched, other = Run(tmp_path, made, proving).train(), Run(tmp_path, made, plain).train()
    (diagnosis,) = [each.diagnosis for each in proving.incidents]
    assert diagnosis is not None
    assert diagnosis.confidence == "proven"
    assert any(f"row 1 is sample {5 * SIZE + 1} of" in said for said in diagnosis.evidence)
    assert watched.bytes() == other.bytes()
