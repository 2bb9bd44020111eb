"""Lightning: the callback comes and goes without a trace, and is in nobody's way."""

from __future__ import annotations

import doctest
import io
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from as_before import torch_as_before as torch_as_before
from framework_nets import few_objects as few_objects
from torch import Tensor, nn

pytest.importorskip("lightning", reason="Lightning is not installed")

import lit
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lit import BAD, batches, callback, fit, made_net, state, without

import stayfinite
from stayfinite.errors import ConfigError
from stayfinite.integrations import lightning, lightning_guard
from stayfinite.integrations.lightning import NaNTools, StayFinite, equip

ROOT = Path(__file__).parents[2]


def hooks_of(module: nn.Module) -> list[int]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [len(getattr(each, name)) for each in module.modules() for name in names]


def attributes_of(trainer: Any) -> list[set[str]]:
    module, strategy = trainer.lightning_module, trainer.strategy
    return [set(vars(each)) for each in (trainer, module, strategy, trainer.optimizers[0])]


@pytest.mark.parametrize("bad", [[], [BAD]])
def test_nothing_is_left_behind(bad: list[int]) -> None:
    watched = fit(made_net(), batches(bad=bad), callback(), gradient_clip_val=1.0)
    plain = fit(made_net(), batches(), gradient_clip_val=1.0)
    assert hooks_of(watched.lightning_module) == hooks_of(plain.lightning_module)
    assert attributes_of(watched) == attributes_of(plain)
    assert type(watched.strategy.checkpoint_io) is type(plain.strategy.checkpoint_io)
    for optimizer in watched.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


def test_nothing_is_left_behind_after_an_error() -> None:
    class Failing(lit.Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise KeyError("the user's own")
            return super().training_step(batch, batch_idx)

    net = made_net(Failing)
    with pytest.raises(KeyError, match="the user's own"):
        fit(net, batches(), callback())
    assert not any(hooks_of(net))


def test_failure_of_ours_does_not_end_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("our bug")

    monkeypatch.setattr(lightning_guard.LightningGuard, "end_batch", fails)
    monkeypatch.setattr("stayfinite.safely._harmless", {})
    with caplog.at_level(logging.ERROR, logger="stayfinite"):
        watched = fit(made_net(), batches(), callback())
    assert state(watched) == state(fit(made_net(), batches()))
    assert caplog.text.count("training goes on") == 1


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_second_callback_stands_aside(order: list[int], caplog: pytest.LogCaptureFixture) -> None:
    both = [callback(), callback()]
    with caplog.at_level(logging.WARNING, logger="stayfinite"):
        watched = fit(made_net(), batches(bad=[BAD]), callbacks=[both[each] for each in order])
    assert state(watched) == state(fit(made_net(), without(batches(), BAD)))
    assert sorted(len(each.incidents) for each in both) == [0, 1]
    assert caplog.text.count("does nothing here: this process is watched already") == 1


def test_two_callbacks_and_a_checkpoint(tmp_path: Path) -> None:
    saving = [ModelCheckpoint(tmp_path)]
    made = batches(bad=[BAD])
    fit(made_net(), made, callbacks=[callback(), callback(), *saving], enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    both = [callback(), callback()]
    again = fit(made_net(), made, callbacks=both, ckpt_path=path, max_epochs=2)
    assert again.global_step == 14
    assert sorted(len(each.incidents) for each in both) == [0, 2]


def test_callback_stands_aside_where_watch_is_at_work() -> None:
    net = made_net(schedule=None)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    net.configure_optimizers = lambda: optimizer
    watching = callback()
    with stayfinite.watch(net, optimizer, sinks=[]) as guard:
        fit(net, batches(bad=[BAD]), watching)
    assert len(guard.incidents) == 1
    assert watching.incidents == []


def test_the_place_before_those_that_save(tmp_path: Path) -> None:
    saving, watching, other = ModelCheckpoint(tmp_path), callback(), Callback()
    trainer = fit(
        made_net(),
        batches(1),
        callbacks=[watching, saving, other],
        limit_train_batches=0,
        enable_checkpointing=True,
    )
    assert trainer.callbacks[-3:] == [other, watching, saving]


class Silent(lit.Net):
    """Logs nothing: torch cannot compile that part of Lightning."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).mean()


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_module_is_watched_and_replayed(whole: bool) -> None:
    """Hooks that are added after torch.compile do not fire, so none are needed."""
    watching, net = callback(), made_net(Silent)
    if not whole:
        net.layers.compile(backend="eager")
    made: Any = torch.compile(net, backend="eager") if whole else net
    watched = fit(made, batches(bad=[BAD]), watching)
    assert lit.is_finite(net)
    assert watched.global_step == 7
    (incident,) = watching.incidents
    assert incident.origin is not None
    assert incident.origin.op == "aten.log.default"
    assert incident.origin.module == "layers"


def test_closure_runs_inside_of_the_step_and_is_judged_after_it() -> None:
    """Without a scaler Lightning computes gradients in `step`: at its entry there are old ones."""
    seen: list[bool] = []

    class Looking(lit.Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            optimizer.register_step_pre_hook(
                lambda *_: seen.append(all(p.grad is None for p in self.parameters()))
            )
            return optimizer

    watching = callback()
    fit(made_net(Looking), batches(2, bad=[0]), watching)
    assert seen[0]
    assert [incident.step for incident in watching.incidents] == [0]


def test_step_that_is_not_to_be_called_twice() -> None:
    class Counting(lit.Net):
        seen = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            Counting.seen += 1
            return super().training_step(batch, batch_idx)

    watching = callback(replay=False)
    watched = fit(made_net(Counting), batches(bad=[BAD]), watching)
    assert Counting.seen == 8
    assert state(watched) == state(fit(made_net(), without(batches(), BAD)))
    assert len(watching.incidents) == 1


def test_step_that_returns_nothing_is_no_step() -> None:
    class Choosy(lit.Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else loss

    for precision in ("32-true", "fp16"):
        watching = callback()
        options = {"precision": precision}
        watched = fit(made_net(Choosy), batches(bad=[3]), watching, **options)
        plain = fit(made_net(Choosy), without(batches(), 3), **options)
        assert state(watched) == state(plain)
        assert len(watching.incidents) == 1


def test_report_goes_to_every_sink() -> None:
    heard: list[Any] = []

    def failing(incident: Any) -> None:
        raise OSError("disk full")

    fit(made_net(), batches(bad=[BAD]), callback(sinks=[failing, heard.append]))
    assert [incident.step for incident in heard] == [BAD]


def test_callback_travels_to_other_processes_before_and_after_training() -> None:
    watching = callback()
    assert pickle.loads(pickle.dumps(watching)).incidents == []
    fit(made_net(), batches(2, bad=[1]), watching)
    assert pickle.loads(pickle.dumps(watching)).incidents == watching.incidents != []


@pytest.mark.parametrize("options", [{"on_nan": "ignore"}, {"on_nan": None}])
def test_wrong_option_is_an_error_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="on_nan is"):
        StayFinite(**options)


def test_old_name_of_the_package_works_too(tmp_path: Path) -> None:
    code = f"""
import sys
import pytorch_lightning as pl
from stayfinite.integrations.lightning import StayFinite
assert "lightning.pytorch" not in sys.modules
import torch

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return torch.log(self.layer(batch).sigmoid().mean() + batch.mean())
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

batches = [torch.full((3, 2), value) for value in (1.0, -100.0, 1.0)]
watching = StayFinite(sinks=[])
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[watching],
    enable_checkpointing=True, default_root_dir={str(tmp_path)!r}, enable_progress_bar=False)
trainer.fit(Net(), torch.utils.data.DataLoader(batches, batch_size=None))
(incident,) = watching.incidents
print(incident.diagnosis.cause, trainer.global_step)
"""
    done = forks.run_text(["-c", code], env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert done.stdout.strip().splitlines()[-1] == "log_of_negative 2", done.stderr


def test_missing_package_is_one_line_with_the_command() -> None:
    code = """
import importlib.metadata as metadata
real = metadata.version
def version(name):
    if name in ("lightning", "pytorch-lightning"):
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
from stayfinite.errors import PackageError
try:
    import stayfinite.integrations.lightning
except PackageError as error:
    print(error)
"""
    done = forks.run_text(["-c", code])
    assert done.stdout.strip() == (
        "lightning is not installed: pip install 'stayfinite[lightning]'"
    ), done.stderr


class Tooled(NaNTools, lit.Net):
    pass


def test_tools_of_a_debugger() -> None:
    net = Tooled()
    before = hooks_of(net)
    printed = io.StringIO()
    net.enable_nan_hooks(file=printed)
    net.layers(batches(1, bad=[0])[0])
    assert "layers (Layers): BAD, from finite input" in printed.getvalue()
    net.disable_nan_hooks()
    net.clamp_activations = True
    assert net.clamp_activations == lightning.LIMIT
    net.clamp_activations = 0.5
    assert float(net.layers.inner(batches(1)[0]).detach().abs().max()) <= 0.5
    net.clamp_activations = False
    assert net.clamp_activations is False
    assert hooks_of(net) == before


def test_module_without_the_tools_can_be_given_them() -> None:
    net = made_net()
    assert equip(net) is net
    net.clamp_activations = 2.0
    assert (type(net).__name__, net.clamp_activations) == ("Net", 2.0)
    assert equip(net).clamp_activations == 2.0
    net.clamp_activations = False
    assert state(fit(net, batches())) == state(fit(made_net(), batches()))


def test_examples_in_docstrings_run() -> None:
    assert doctest.testmod(lightning).failed == 0
