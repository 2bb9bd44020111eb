"""Lightning: logs, averages and checkpoints know nothing of a step that was left out."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from framework_nets import few_objects as few_objects
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import MeanMetric

pytest.importorskip("lightning", reason="Lightning is not installed")

import lit
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lit import BAD, batches, callback, fit, made_net, raw, state, without


class HandMade(Callback):
    """An average as people write it: tensors in a dict, moved after every batch."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, value in module.state_dict().items():
            old = self.shadow.setdefault(name, value.detach().clone().float())
            old.mul_(0.9).add_(value.float(), alpha=0.1)

    def averages(self) -> dict[str, bytes]:
        return {name: raw(value) for name, value in self.shadow.items()}


class Averaging(WeightAveraging):
    """Lightning's own; the average is gone when training ends, so it is kept before."""

    def __init__(self) -> None:
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.kept: dict[str, bytes] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        assert self._average_model is not None
        self.kept = {name: raw(value) for name, value in self._average_model.state_dict().items()}
        super().on_train_end(trainer, module)

    def averages(self) -> dict[str, bytes]:
        return self.kept


class Inside(lit.Net):
    """The average belongs to the module, which moves it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.layers, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.layers)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.layers.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", [HandMade, Averaging])
@pytest.mark.parametrize("bad", [BAD, 7])
@pytest.mark.parametrize("is_first", [True, False])
def test_average_of_a_callback_is_as_without_the_batch(kind: Any, bad: int, is_first: bool) -> None:
    watched, plain = kind(), kind()
    both = [watched, callback()] if is_first else [callback(), watched]
    fit(made_net(), batches(bad=[bad]), callbacks=both)
    fit(made_net(), without(batches(), bad), callbacks=[plain])
    assert watched.averages() == plain.averages()


@pytest.mark.parametrize("bad", [BAD, 7])
def test_average_of_the_module_is_as_without_the_batch(bad: int) -> None:
    watched = fit(made_net(Inside), batches(bad=[bad]), callback())
    plain = fit(made_net(Inside), without(batches(), bad))
    assert state(watched) == state(plain)


class Logging(lit.Net):
    """Logs in all the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log_dict({"largest": loss.detach()}, reduce_fx="max", on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("bias", self.layers.head.bias.grad.norm(), on_step=True, on_epoch=True)


def rows(folder: Path) -> str:
    return (folder / "lightning_logs" / "version_0" / "metrics.csv").read_text()


@pytest.mark.filterwarnings("ignore:Encountered `nan` values in tensor")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_log_is_as_without_the_batch(tmp_path: Path, accumulate: int) -> None:
    window = range(BAD - BAD % accumulate, BAD - BAD % accumulate + accumulate)
    options = {"log_every_n_steps": 1, "accumulate_grad_batches": accumulate}
    for name, made, ours in (
        ("watched", batches(bad=[BAD]), [callback()]),
        ("plain", without(batches(), *window), []),
    ):
        log = CSVLogger(str(tmp_path / name))
        fit(made_net(Logging), made, callbacks=ours, logger=log, **options)
    assert rows(tmp_path / "watched") == rows(tmp_path / "plain")
    assert "nan" not in rows(tmp_path / "watched")


def test_replay_is_not_heard_by_loggers_and_callbacks(tmp_path: Path) -> None:
    class Talking(lit.Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.logger.log_metrics({"seen": float(batch_idx)}, step=self.calls)
            return super().training_step(batch, batch_idx)

    class Counting(Callback):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def on_before_backward(self, *_: Any) -> None:
            self.heard.append("backward")

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.heard.append("step")

    counting = Counting()
    trainer = fit(
        made_net(Talking),
        batches(bad=[BAD]),
        callback(),
        callbacks=[counting],
        logger=CSVLogger(str(tmp_path)),
    )
    assert counting.heard == ["backward", "step"] * 8
    seen = [row["seen"] for row in csv.DictReader(rows(tmp_path).splitlines()) if row["seen"]]
    assert [float(each) for each in seen] == [float(number) for number in range(8)]
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    assert progress.optimizer.zero_grad.total.completed == 8


def test_bad_batch_does_not_stop_training_early() -> None:
    stopping = EarlyStopping("loss", check_finite=True, patience=100)
    trainer = fit(made_net(), batches(bad=[7]), callback(), callbacks=[stopping], max_epochs=2)
    assert trainer.global_step == 14
    assert stopping.stopped_epoch == 0


def saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ckpt"))


def read(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=False)
    return checkpoint


def test_checkpoint_is_as_without_the_batch(tmp_path: Path) -> None:
    files = {}
    for name, made, ours in (
        ("watched", batches(bad=[BAD]), [callback()]),
        ("plain", without(batches(), BAD), []),
    ):
        saving = ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1)
        fit(made_net(), made, callbacks=[*ours, saving], enable_checkpointing=True)
        files[name] = {each.name: read(each) for each in saved(tmp_path / name)}
    assert list(files["watched"]) == list(files["plain"])
    for name, checkpoint in files["watched"].items():
        other = files["plain"][name]
        for part in ("optimizer_states", "lr_schedulers", "global_step"):
            assert repr(checkpoint[part]) == repr(other[part])
        for key, tensor in checkpoint["state_dict"].items():
            assert raw(tensor) == raw(other["state_dict"][key])


@pytest.mark.parametrize("on_nan", ["recover", "warn"])
def test_bad_weights_are_never_saved(
    tmp_path: Path, on_nan: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Spoiling(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, o: Any, b: Any, number: int
        ) -> None:
            if number == 3:
                module.layers.inner.weight.data[0, 0] = torch.nan

    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    watching = callback(lit.SKIP if on_nan == "recover" else None, on_nan=on_nan)
    with caplog.at_level(logging.ERROR, logger="stayfinite"):
        fit(
            made_net(),
            batches(),
            callbacks=[watching, Spoiling(), saving],
            enable_checkpointing=True,
        )
    (only,) = saved(tmp_path)
    assert all(bool(value.isfinite().all()) for value in read(only)["state_dict"].values())
    assert ("was not saved" in caplog.text) == (on_nan == "warn")
    assert watching.incidents


def test_mask_of_infinities_is_no_reason_not_to_save(tmp_path: Path) -> None:
    class Masked(lit.Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    saving = ModelCheckpoint(tmp_path)
    fit(made_net(Masked), batches(), callbacks=[callback(), saving], enable_checkpointing=True)
    assert len(saved(tmp_path)) == 1


def test_incidents_are_in_the_checkpoint(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path)
    first, second = callback(), callback()
    options: dict[str, Any] = {"enable_checkpointing": True}
    fit(made_net(), batches(bad=[BAD]), callbacks=[first, saving], **options)
    (path,) = saved(tmp_path)
    fit(
        made_net(),
        batches(bad=[BAD]),
        callbacks=[second, ModelCheckpoint(tmp_path)],
        ckpt_path=path,
        max_epochs=2,
        **options,
    )
    assert len(second.incidents) == 2
    assert second.incidents[0] == first.incidents[0]


def test_resumed_training_is_as_without_the_batch(tmp_path: Path) -> None:
    ends = []
    for name, made, ours in (
        ("watched", batches(bad=[BAD]), lambda: [callback()]),
        ("plain", without(batches(), BAD), list),
    ):
        saving = ModelCheckpoint(tmp_path / name)
        fit(made_net(), made, callbacks=[*ours(), saving], enable_checkpointing=True)
        (path,) = saved(tmp_path / name)
        ends.append(fit(made_net(), made, callbacks=ours(), ckpt_path=path, max_epochs=2))
    assert state(ends[0]) == state(ends[1])
