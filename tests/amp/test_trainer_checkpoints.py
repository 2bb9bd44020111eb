"""save and load: exact, atomic, and never a bad value."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from training import Batch, all_steps, batches, config, mse, raw, recovering, small_model

from stayfinite.amp.trainer import AMPTrainer
from stayfinite.checkpoint import save_checkpoint
from stayfinite.errors import CheckpointError, NonFiniteError


def full_trainer(precision: str = "fp16", *, seed: int = 0, **options: Any) -> AMPTrainer:
    """All that has a state."""
    model = small_model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return AMPTrainer(
        config(precision, **options),
        model,
        optimizer,
        mse,
        ExponentialLR(optimizer, 0.9),
        ema=AveragedModel(model),
    )


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_run_that_was_saved_and_loaded_goes_on_by_bytes(tmp_path: Path, precision: str) -> None:
    made, file = batches(12), tmp_path / "deep" / "last.pt"
    torch.manual_seed(7)
    with full_trainer(precision) as whole:
        all_steps(whole, made[:6])
        whole.save(file)
        losses = all_steps(whole, made[6:])
        numbers = drawn()
    with full_trainer(precision, seed=99) as resumed:
        resumed.load(file)
        assert resumed.step == whole.step - len([loss for loss in losses if loss is not None])
        assert all_steps(resumed, made[6:]) == losses
        assert drawn() == numbers
        assert resumed.step == whole.step
    assert raw(resumed.model) == raw(whole.model)
    assert raw(resumed._followers.ema) == raw(whole._followers.ema)
    rates = [trainer.optimizer.param_groups[0]["lr"] for trainer in (whole, resumed)]
    assert rates[0] == rates[1]
    if precision == "fp16":
        assert resumed.scaler is not None
        assert whole.scaler is not None
        assert resumed.scaler.state_dict() == whole.scaler.state_dict()


def test_snapshots_from_before_loading_are_forgotten(tmp_path: Path) -> None:
    made = batches(12, bad=(9,))
    recovery = recovering(primary_strategy="reset", snapshot_every=1)
    with full_trainer("fp32", detect={"recovery": recovery}) as trainer:
        all_steps(trainer, made[:3])
        trainer.save(tmp_path / "last.pt")
        early = raw(trainer.model)
        all_steps(trainer, made[3:8])
        trainer.load(tmp_path / "last.pt")
        assert trainer.training_step(made[9]) is None
        assert trainer.incidents[0].outcome.strategy == "reset"
        assert trainer.step == 3
        assert raw(trainer.model) == early


def test_warm_up_goes_on_where_it_was(tmp_path: Path) -> None:
    def made() -> AMPTrainer:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
        given = config(warmup_epochs=2)
        return AMPTrainer(given, model, optimizer, mse, batches_per_epoch=4)

    with made() as trainer:
        all_steps(trainer, batches(3))
        trainer.save(tmp_path / "last.pt")
    with made() as trainer:
        trainer.load(tmp_path / "last.pt")
        all_steps(trainer, batches(1))
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


@pytest.mark.parametrize("place", ["parameter", "statistics", "optimizer", "ema"])
def test_bad_state_is_not_saved_and_the_old_file_stays(tmp_path: Path, place: str) -> None:
    file = tmp_path / "last.pt"
    with full_trainer() as trainer:
        all_steps(trainer, batches(3))
        trainer.save(file)
        before = file.read_bytes()
        first = next(trainer.model.parameters())
        ema = trainer._followers.ema
        target: Any = {
            "parameter": first,
            "statistics": trainer.model[1].running_var,
            "optimizer": trainer.optimizer.state[first]["exp_avg"],
            "ema": next(ema.parameters()),
        }[place]
        with torch.no_grad():
            target.view(-1)[0] = math.inf
        with pytest.raises(
            NonFiniteError, match=r"(?s)last\.pt was not saved.* holds \+Inf"
        ) as caught:
            trainer.save(file)
        assert caught.value.report is not None
        with torch.no_grad():
            target.view(-1)[0] = 0.0
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pt"]


def test_mask_that_holds_inf_on_purpose_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with AMPTrainer(config(), model, optimizer, mse) as trainer:
        all_steps(trainer, batches(2))
        trainer.save(tmp_path / "last.pt")
        trainer.load(tmp_path / "last.pt")


def test_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "last.pt"
    with full_trainer() as trainer:
        trainer.save(file)
        before = file.read_bytes()
        trainer._followers.schedulers[0].unpicklable = lambda: None
        with pytest.raises(Exception, match="pickle"):
            trainer.save(file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pt"]


def without_scaler() -> AMPTrainer:
    return full_trainer("fp32", seed=2)


def with_other(model: nn.Module, *, schedulers: int = 1) -> AMPTrainer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = [ExponentialLR(optimizer, 0.9) for _ in range(schedulers)]
    return AMPTrainer(config("fp16"), model, optimizer, mse, scheduler, ema=AveragedModel(model))


def with_buffer() -> nn.Module:
    model = small_model(2)
    model.register_buffer("more", torch.ones(1))
    return model


@pytest.mark.parametrize(
    ("saving", "loading", "said"),
    [
        (without_scaler, full_trainer, "scaler: the file has none"),
        (full_trainer, lambda: with_other(small_model(2), schedulers=2), "scheduler: the file has"),
        (full_trainer, lambda: with_other(with_buffer()), r"model\.more: is not in the file"),
        (lambda: with_other(with_buffer()), full_trainer, r"model\.more: has no place"),
        (full_trainer, lambda: with_other(nn.Linear(4, 1)), r"optimizer\.param_groups: has groups"),
    ],
)
def test_checkpoint_that_does_not_fit_changes_nothing(
    tmp_path: Path, saving: Any, loading: Any, said: str
) -> None:
    file = tmp_path / "last.pt"
    with saving() as trainer:
        all_steps(trainer, batches(2))
        trainer.save(file)
    with loading() as trainer:
        before, state = raw(trainer.model), torch.get_rng_state()
        with pytest.raises(CheckpointError) as caught:
            trainer.load(file)
        assert any(re.match(said, str(problem)) for problem in caught.value.problems)
        assert raw(trainer.model) == before
        assert torch.equal(torch.get_rng_state(), state)
        assert trainer.step == 0


def test_flipped_bit_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "last.pt"
    with full_trainer(seed=1) as trainer:
        all_steps(trainer, batches(2))
        trainer.save(file)
        data = bytearray(file.read_bytes())
        at = data.index(next(trainer.model.parameters()).detach().numpy().tobytes())
        data[at] ^= 1
        file.write_bytes(data)
        before = raw(trainer.model)
        with pytest.raises(CheckpointError, match="the checksum differs"):
            trainer.load(file)
        assert raw(trainer.model) == before


def test_file_of_save_checkpoint_goes_on_at_its_step(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    with full_trainer("fp32") as trainer:
        all_steps(trainer, batches(2))
        members = {"model": trainer.model, "optimizer": trainer.optimizer}
        followers = trainer._followers
        save_checkpoint(file, **members, scheduler=followers.schedulers, ema=followers.ema, step=2)
    with full_trainer("fp32", seed=3) as other:
        other.load(file)
        assert (other.step, other.epoch) == (2, 0)
        assert raw(other.model) == raw(trainer.model)


def test_disk_that_is_full_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = batches(4)
    with full_trainer("fp32") as trainer:
        expected = all_steps(trainer, made)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    monkeypatch.setattr(os, "write", full)
    with full_trainer("fp32", **options) as trainer:
        assert all_steps(trainer, made) == expected
    assert names_in(tmp_path) == []
    assert "No space left on device" in caplog.text


def test_unreadable_file_is_one_clear_line(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pt"
    garbage.write_bytes(b"this is no checkpoint")
    with full_trainer() as trainer:
        for file, said in (
            (tmp_path / "none.pt", "there is no"),
            (garbage, "no safetensors header"),
        ):
            with pytest.raises(CheckpointError, match=said) as caught:
                trainer.load(file)
            assert "\n" not in str(caught.value)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"format": 1, "model": Evil()}, tmp_path / "evil.pt")
    with full_trainer() as trainer, pytest.raises(CheckpointError):
        trainer.load(tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_checkpoints_are_written_every_so_many_updates_and_after_each_epoch(
    tmp_path: Path,
) -> None:
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    made: list[Batch] = batches(6, bad=(1,))
    with full_trainer("fp32", **options) as trainer:
        trainer.fit(made[2:] + made[:2], epochs=1)
        assert trainer.step == 5
    assert names_in(tmp_path) == ["step-00000002.ckpt", "step-00000004.ckpt", "step-00000005.ckpt"]
    with full_trainer("fp32") as trainer:
        trainer.load(tmp_path / "step-00000005.ckpt")
        assert (trainer.step, trainer.epoch) == (5, 1)


def test_checkpoint_of_a_bad_state_is_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    detect = {"detection_interval": 100, "recovery": recovering(snapshot_every=100)}
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "detect": detect}
    with full_trainer("fp32", **options) as trainer:
        all_steps(trainer, batches(3, bad=(1,)))
    assert names_in(tmp_path) == ["step-00000001.ckpt"]
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "was not saved" in said[0].getMessage()
