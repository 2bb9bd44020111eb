"""Lightning: a bad step is left out as if its batches had not been there, and is explained."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from framework_nets import few_objects as few_objects

pytest.importorskip("lightning", reason="Lightning is not installed")

import lit
from lit import BAD, batches, callback, fit, made_net, state, without
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stayfinite import RecoveryConfig, TrainingAbortedError

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_example.py"
PRECISIONS = ["32-true", "bf16-mixed", "fp16"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("accumulate", "schedule"), [(1, "step"), (2, "step"), (2, "epoch")])
def test_bad_batch_leaves_no_trace(precision: str, accumulate: int, schedule: str) -> None:
    window = range(BAD - BAD % accumulate, BAD - BAD % accumulate + accumulate)
    options: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": accumulate}
    watching = callback()
    watched = fit(made_net(schedule=schedule), batches(bad=[BAD]), watching, **options)
    plain = fit(made_net(schedule=schedule), without(batches(), *window), **options)
    assert state(watched) == state(plain)
    assert len(watching.incidents) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_healthy_training_is_the_same_to_the_byte(precision: str) -> None:
    options: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.1, "max_epochs": 2}
    watched = fit(made_net(), batches(), callback(), **options)
    plain = fit(made_net(), batches(), **options)
    assert state(watched) == state(plain)


@pytest.mark.parametrize("precision", [*PRECISIONS, "16-mixed"])  # on a CPU that is bf16
def test_operation_line_and_module_are_found(precision: str) -> None:
    watching = callback()
    fit(made_net(), batches(bad=[BAD]), watching, precision=precision)
    (incident,) = watching.incidents
    assert incident.step == BAD
    assert incident.origin is not None
    assert incident.origin.op == "aten.log.default"
    assert incident.origin.exact
    assert incident.origin.file is not None
    assert incident.origin.file.endswith("lit.py")
    assert "# the line that goes bad" in incident.origin.code
    assert (incident.origin.root, incident.origin.module) == ("Net", "layers")
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "log_of_negative"
    assert incident.outcome is not None
    assert incident.outcome.detail == f"the step was skipped (epoch 0, batch {BAD})"


def test_same_bad_batch_of_every_epoch_is_explained_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(made_net(), batches(3, bad=[1]), callback(sinks=None), max_epochs=3)
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("error[log_of_negative]")]) == 1
    assert [line for line in lines if line.startswith("stayfinite: step")] == []


@pytest.mark.parametrize("schedule", ["step", "epoch"])
def test_epoch_whose_last_batch_is_left_out_has_ended(schedule: str) -> None:
    made = batches(4, bad=[3])
    watched = fit(made_net(schedule=schedule), made, callback(), max_epochs=2)
    plain = fit(made_net(schedule=schedule), made[:3], max_epochs=2)
    assert state(watched) == state(plain)


def test_steps_are_counted_without_those_left_out() -> None:
    made = batches(12, bad=[2, 7])
    watched = fit(made_net(), made, callback(), max_epochs=-1, max_steps=8)
    plain = fit(made_net(), without(made, 2, 7), max_epochs=-1, max_steps=8)
    assert watched.global_step == 8
    assert state(watched) == state(plain)


def test_going_back_leaves_out_what_came_since_the_snapshot() -> None:
    config = RecoveryConfig(
        primary_strategy="rewind",
        rewind_snapshots=0,
        rewind_skip_batches=2,
        snapshot_every=4,
    )
    # Noise would be drawn on from where it was.
    watched = fit(made_net(noise=0.0), batches(12, bad=[6]), callback(config))
    plain = fit(made_net(noise=0.0), without(batches(12), 4, 5, 6, 7, 8))
    after, expected = state(watched), state(plain)
    for name in ("metrics", "global_step"):  # what was logged and counted is not taken back
        del after[name], expected[name]
    assert after == expected


def test_going_back_twice_leads_to_the_same_place() -> None:
    """Optimizer.load_state_dict would leave the snapshot to be changed by the next update."""
    config = RecoveryConfig(
        primary_strategy="rewind", rewind_snapshots=0, rewind_skip_batches=0, snapshot_every=100
    )
    watched = fit(made_net(noise=0.0), batches(bad=[3, 5]), callback(config))
    plain = fit(made_net(noise=0.0), batches()[6:])
    after, expected = state(watched), state(plain)
    for name in ("metrics", "global_step"):
        del after[name], expected[name]
    assert after == expected


def test_training_stops_with_the_reason_and_good_weights() -> None:
    watching = callback(None, on_nan="stop")
    net, same = made_net(), made_net()
    with pytest.raises(TrainingAbortedError, match=f"step {BAD}: loss is not finite") as stopped:
        fit(net, batches(bad=[BAD]), watching)
    fit(same, batches()[:BAD])
    assert stopped.value.incident is not None
    assert stopped.value.incident.diagnosis is not None
    assert stopped.value.incident.diagnosis.cause == "log_of_negative"
    assert {k: lit.raw(v) for k, v in net.state_dict().items()} == {
        k: lit.raw(v) for k, v in same.state_dict().items()
    }


def test_warning_changes_nothing() -> None:
    watching = callback(None, on_nan="warn")
    watched = fit(made_net(), batches(bad=[BAD]), watching)
    plain = fit(made_net(), batches(bad=[BAD]))
    assert watching.incidents
    assert repr(state(watched)) == repr(state(plain))


def test_giving_up_ends_training_with_the_weights_of_the_last_good_step() -> None:
    config = RecoveryConfig(primary_strategy="skip", max_consecutive_nans=3)
    net = made_net()
    with pytest.raises(TrainingAbortedError, match="Training aborted due to NaN at step"):
        fit(net, batches(bad=[4, 5, 6, 7]), callback(config))
    assert lit.is_finite(net)


def test_gradient_of_its_own_is_found_in_the_backward_pass() -> None:
    class Distance(lit.Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            hidden = self.layers.inner(batch)
            return torch.sqrt((hidden - hidden.detach() * (batch_idx == BAD)).square()).mean()

    watching = callback()
    trainer = fit(made_net(Distance), batches(), watching, gradient_clip_val=1.0)
    (incident,) = watching.incidents
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.node) == ("backward", "SqrtBackward0")
    assert "torch.sqrt(" in incident.origin.code
    assert lit.is_finite(trainer.lightning_module)
    assert trainer.global_step == 7


def test_example_saves_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr()
    without, watched, cause = printed.out.splitlines()[-3:]
    assert without.endswith("after 32 steps; the model is all NaN")
    assert watched.endswith("after 31 steps; the model is finite")
    assert "log_of_negative in `loss = " in cause
    assert printed.err.count("error[log_of_negative]") == 1


def test_experiments_name_the_guilty_sample_and_leave_no_trace() -> None:
    made = torch.cat(batches(bad=[BAD]))
    proving, plain = callback(prove_seconds=60.0), callback()
    watched = fit(made_net(), DataLoader(TensorSet(made), batch_size=6), proving)
    without_any = fit(made_net(), DataLoader(TensorSet(made), batch_size=6), plain)
    (diagnosis,) = [each.diagnosis for each in proving.incidents]
    assert diagnosis is not None
    assert diagnosis.confidence == "proven"
    sample = f"row 2 is sample {6 * BAD + 2} of the dataset TensorSet"
    assert any(sample in said for said in diagnosis.evidence)
    assert state(watched) == state(without_any)


def test_experiments_on_accumulated_batches_show_that_the_step_repeats() -> None:
    watching = callback(prove_seconds=60.0)
    fit(made_net(), batches(bad=[BAD]), watching, accumulate_grad_batches=2)
    (diagnosis,) = [each.diagnosis for each in watching.incidents]
    assert diagnosis is not None
    assert "the same step, run twice more, went bad the same way" in diagnosis.evidence


class TensorSet(Dataset[Tensor]):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]
