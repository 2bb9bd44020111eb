"""Lightning under `stayfinite run`: every Trainer lends its guard to the one over the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from framework_nets import few_objects as few_objects

pytest.importorskip("lightning", reason="Lightning is not installed")

import lit
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lit import BAD, batches, callback, fit, made_net, state, without

from stayfinite import TrainingAbortedError
from stayfinite.detect.hooks import listeners
from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard.discover import ProcessGuard, recover_everything
from stayfinite.integrations.lightning import StayFinite
from stayfinite.integrations.lightning_guard import join_trainers
from stayfinite.testing import inject


def attach(guard: Guard) -> None:
    guard.attach(*([recover_everything(guard)] if guard.settings.on_nan == "recover" else ()))


@pytest.fixture
def process_guard(request: pytest.FixtureRequest) -> Iterator[ProcessGuard]:
    """As `stayfinite run` has it."""
    on_nan = getattr(request, "param", "recover")
    made = ProcessGuard(Guard(GuardSettings(on_nan=on_nan)), attach)
    with join_trainers():
        yield made
    made.close()


stopping = pytest.mark.parametrize("process_guard", ["stop"], indirect=True)
both = pytest.mark.parametrize("process_guard", ["stop", "recover"], indirect=True)


@pytest.mark.parametrize("has_callback", [True, False])
def test_bad_batch_is_located_and_leaves_no_trace(
    process_guard: ProcessGuard, has_callback: bool
) -> None:
    given = [callback(on_nan="warn", config=None)] if has_callback else []
    first = process_guard.guard
    watched = fit(made_net(), batches(bad=[BAD]), callbacks=given)
    (incident,) = first.incidents
    assert incident.origin is not None
    assert incident.origin.exact
    assert (incident.step, incident.origin.module) == (BAD, "layers")
    assert [each.incidents for each in given] == [[incident]] * has_callback
    assert process_guard.guard is first
    assert first.steps == 8
    process_guard.close()
    assert state(watched) == state(fit(made_net(), without(batches(), BAD)))


@stopping
def test_stopped_at_the_line_with_the_weights_of_before(process_guard: ProcessGuard) -> None:
    net, same = made_net(), made_net()
    with pytest.raises(TrainingAbortedError):
        fit(net, batches(bad=[BAD]))
    (incident,) = process_guard.guard.incidents
    assert process_guard.guard.stopped
    assert incident.origin is not None
    assert "# the line that goes bad" in incident.origin.code
    process_guard.close()
    fit(same, batches()[:BAD])
    for name, tensor in net.state_dict().items():
        assert lit.raw(tensor) == lit.raw(same.state_dict()[name])


@stopping
@pytest.mark.parametrize("precision", ["32-true", "fp16"])
def test_stopped_at_a_bad_parameter_without_any_snapshot(
    process_guard: ProcessGuard, precision: str
) -> None:
    net = made_net()
    with (
        inject(net.layers, parameter="head.weight", at_step=3, persistent=True),
        pytest.raises(TrainingAbortedError),
    ):
        fit(net, batches(), precision=precision)
    (incident,) = process_guard.guard.incidents
    assert [each.location for each in incident.reports] == ["parameters.layers.head.weight"]


@both
def test_healthy_training_is_the_same_to_the_byte(
    process_guard: ProcessGuard, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.1, "enable_checkpointing": True}
    ends, files = [], []
    for name in ("watched", "plain"):
        saving = ModelCheckpoint(tmp_path / name)
        ends.append(state(fit(made_net(), batches(), callbacks=[saving], **options)))
        (path,) = (tmp_path / name).glob("*.ckpt")
        files.append(torch.load(path, weights_only=False)["callbacks"])
        process_guard.close()
    assert ends[0] == ends[1]
    assert [len(each) for each in files] == [1, 1]  # that of the one that saves


@both
def test_trainer_is_as_before_and_the_first_guard_is_back(process_guard: ProcessGuard) -> None:
    given: list[Callback] = [Callback()]
    first = process_guard.guard
    trainer = fit(made_net(), batches(), callbacks=given)
    assert not any(isinstance(each, StayFinite) for each in trainer.callbacks)
    assert [each for each in listeners() if isinstance(each, Guard)] == [first]
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(TrainingAbortedError):
        model(torch.full((1, 2), torch.nan)).sum().backward()
        optimizer.step()
    assert len(first.incidents) == 1
    assert first.stopped == process_guard.stops


def test_nobody_joins_where_nothing_watches() -> None:
    with join_trainers():
        joined = fit(made_net(), batches(bad=[BAD]))
    assert repr(state(joined)) == repr(state(fit(made_net(), batches(bad=[BAD]))))


@pytest.mark.parametrize("process_guard", ["warn"], indirect=True)
def test_nobody_joins_where_nothing_is_done(process_guard: ProcessGuard) -> None:
    watched = fit(made_net(), batches(bad=[BAD]))
    assert process_guard.guard.incidents[0].step == BAD
    process_guard.close()
    assert repr(state(watched)) == repr(state(fit(made_net(), batches(bad=[BAD]))))
