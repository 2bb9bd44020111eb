"""AMPTrainer: a training loop in mixed precision that stays finite."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from stayfinite.amp.config import AMPConfig, NaNDetectionConfig
from stayfinite.amp.loop import (
    Epoch,
    EpochEvent,
    Evaluation,
    Followers,
    SchedulerEvery,
    Teller,
    evaluate,
    incident_line,
    length_of,
    run_epochs,
    set_learning_rate,
)
from stayfinite.amp.update import (
    Accumulation,
    Done,
    Losses,
    LossFunction,
    Setup,
    Update,
    autocast_for,
    bad_states,
    bad_weights,
    losses_of,
    require_kinds,
    require_ready,
    scaler_for,
)
from stayfinite.checkpoint import load_checkpoint, save_checkpoint
from stayfinite.detect.detector import NaNDetector
from stayfinite.errors import CheckpointError, NonFiniteError, TrainingAbortedError
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.prevent.clamp import ActivationClamp, clamp_activations
from stayfinite.records import Incident, NaNReport
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.settings import GuardSettings

logger = logging.getLogger("stayfinite")


class AMPTrainer:
    """Trains a model in fp16, bf16 or fp32; a bad step is undone, explained and recovered from.

    A batch is (inputs, targets) for `loss_fn(model(inputs), targets)`. Without a loss_fn the
    model makes its own loss: a mapping is passed as keyword arguments, a tuple as arguments, and
    the result is the loss, or has one. A dict of several terms is added up unless it has "loss".

    A scheduler is stepped after each update (scheduler_every="epoch": after each epoch of fit).
    `ema` is torch's AveragedModel, or has update(). `batches_per_epoch` is needed only for a
    warm-up without `fit` or with a loader that has no length. `incidents` has every bad step, with
    its cause and what was done about it; `nan_recovery` does it, and `nan_detector` counts what
    was checked and found.

    It watches torch until `close()`, the end of a `with` block, or until it is garbage.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batch = torch.ones(4, 2), torch.ones(4, 1)
    >>> config = AMPConfig(precision="bf16", gradient_clip_val=1.0)
    >>> with AMPTrainer(config, model, optimizer, torch.nn.functional.mse_loss) as trainer:
    ...     first, *_, last = (trainer.training_step(batch) for _ in range(20))
    >>> bool(last < first), trainer.step
    (True, 20)
    """

    def __init__(
        self,
        config: AMPConfig,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction | None = None,
        scheduler: Any = None,
        *,
        ema: Any = None,
        callbacks: Sequence[Any] = (),
        scheduler_every: SchedulerEvery = "update",
        batches_per_epoch: int | None = None,
    ) -> None:
        require_kinds(config, model, optimizer)
        self.config, self.model, self.optimizer = config, model, optimizer
        self.device = place(model, config.device)
        self.epoch = 0
        self.incidents: list[Incident] = []
        if config.learning_rate is not None:
            set_learning_rate(optimizer, config.learning_rate, scheduler=scheduler)
        self.scaler = scaler_for(config, self.device)
        self._loss_fn = loss_fn
        self._window = Accumulation()
        self._followers = Followers(
            config, model, optimizer, scheduler=scheduler, every=scheduler_every, ema=ema
        )
        self._update = Update(
            Setup(
                config=config,
                model=model,
                optimizer=optimizer,
                loss_fn=loss_fn,
                device=self.device,
                scaler=self.scaler,
                window=self._window,
                after_update=self._followers.after_update,
                incidents=self.incidents,
            )
        )
        self._teller = Teller(
            callbacks,
            optimizer=optimizer,
            scaler=self.scaler,
            bad_losses=self._update.bad_losses,
            incidents=self.incidents,
            log=weakref.WeakMethod(self.log_nan_recovery),  # the guard must not keep us alive
        )
        checks = config.nan_detection
        self.nan_detector = NaNDetector(
            check_loss=checks.check_loss,
            check_gradients=checks.check_gradients,
            check_parameters=checks.check_parameters,
            detection_interval=checks.detection_interval,
        )
        self.nan_recovery = NaNRecoveryManager(checks.recovery)
        self._is_ready = False
        self._endings: list[weakref.finalize[Any, Any]] = []
        self.clamp: ActivationClamp | None = None
        if (limit := config.clamp_activations) is not None:
            self.clamp = clamp_activations(model, -limit, limit)
            self._endings.append(weakref.finalize(self, self.clamp.remove))
        self._watch()
        if batches_per_epoch is not None:
            self._followers.begin_warmup(batches_per_epoch)

    @property
    def step(self) -> int:
        """Updates that were made."""
        return self._window.updates

    def training_step(self, batch: Any, *, batches_left: int | None = None) -> Tensor | None:
        """The loss of this batch, or None when the step was skipped or recovered from.

        It is detached, still on its device, and of this batch alone: neither scaled nor divided.
        With accumulation only every n-th call updates the weights, and a bad batch spoils its
        whole window; the None comes at the batch itself and at the end of the window. With
        `batches_left`, this one included, the last window of an epoch is a short one if need be.

        A first batch that is bad is recovered from like any other. Raises TrainingSetupError
        before the first step where no recovery could help, such as bad weights, and
        TrainingAbortedError when recovery fails; the weights are then those of the last good step.
        """
        if not self._is_ready:
            self._check_ready()
        batch = on_device(batch, self.device)
        if self._window.is_at_start:
            looks = self.guard is not None and self.guard.looks_at_loss
            size = self.config.accumulate_grad_batches
            size = size if batches_left is None else min(size, batches_left)
            self._update.begin_window(size, looks_at_loss=looks)
        bad = len(self._update.bad_losses)
        done = self._run(batch)
        if self._teller.news or len(self._update.bad_losses) > bad:
            done = None
        self._teller.batch_done(done, step=self.step, epoch=self.epoch)
        every = self.config.checkpoint_every
        if every is not None and done is not None and done.was_update and self.step % every == 0:
            self._checkpoint()
        return None if done is None else done.kept_loss

    def fit(self, loader: Iterable[Any], epochs: int = 1) -> list[EpochEvent]:
        """Train so many epochs on the loader, with a progress bar where there is a terminal.

        The last window of an epoch is a short one if need be; where the loader has no length, it
        goes on in the next epoch.
        """
        events: list[EpochEvent] = []
        length = length_of(loader)
        if length is not None:
            self._followers.begin_warmup(length)
        run_epochs(
            lambda batch, left: self.training_step(batch, batches_left=left),
            loader,
            epochs,
            after_epoch=lambda epoch: events.append(self._end_epoch(epoch)),
        )
        return events

    def evaluate(self, loader: Iterable[Any], *, model: nn.Module | None = None) -> Evaluation:
        """The mean loss over the loader, of the model or of another one, such as its average.

        Batches whose loss is not finite are named in the result and are in no mean.
        """
        batches = (on_device(batch, self.device) for batch in loader)
        losses_of_batch = functools.partial(self._losses, model=model)
        return evaluate(batches, model=model or self.model, losses_of_batch=losses_of_batch)

    def save(self, path: str | Path) -> None:
        """Write all of training to one file: what was there stays until the new one is complete.

        NonFiniteError if a weight or the optimizer's state is not finite; nothing is written.
        Gradients of a window that is under way are not saved: it begins again after `load`.
        """
        counts = {"epoch": self.epoch, "updates": self.step}
        save(self._saved(), Path(path), counts=counts)

    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote; CheckpointError if it cannot be used.

        All is checked before anything is changed. The file is read without running code in it.
        """
        counts = load(self._saved(), Path(path))
        self.epoch = counts["epoch"]
        self._window.load_state_dict({"updates": counts["updates"], "batches": 0, "size": 1})
        if self.guard is not None:  # a new one has no snapshots of what was left behind
            self._endings.pop()()
            self._watch()

    def log_nan_recovery(self, nan_report: NaNReport, step: int) -> None:
        """Write a line about a bad value to the log: where it began, and what was done about it.

        It is called for each incident; a subclass can send them elsewhere.
        """
        logger.warning("%s", incident_line(self._teller.incident_of(nan_report, step)))

    def close(self) -> None:
        """Leave torch and the model as they were; a second call does nothing.

        Modules that a recovery runs in float32 go back to the precision around them.
        """
        for ending in reversed(self._endings):
            ending()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_ready(self) -> None:
        """Raise if training cannot begin."""
        self._followers.require_length()
        require_ready(self.model, self.optimizer, has_scheduler=self._followers.has_scheduler)
        self._is_ready = True

    def _losses(self, batch: Any, model: nn.Module | None = None) -> Losses:
        model = self.model if model is None else model
        with autocast_for(self.config, self.device):
            return losses_of(batch, model=model, loss_fn=self._loss_fn)

    def _run(self, batch: Any) -> Done | None:
        guard = self.guard
        step, is_looking = (0, False) if guard is None else (guard.steps, guard.is_looking)
        try:
            return self._update(batch) if guard is None else guard.step(self._update, batch)
        except BaseException as error:
            self._window.batches = 0  # half a window is worth nothing
            if isinstance(error, TrainingAbortedError) and self._teller.news:
                error.incident = self.incidents[-1]  # it names the terms of the loss too
            raise
        finally:
            if guard is not None and guard.steps > step:
                found = [report for news in self._teller.news for report in news.reports]
                self.nan_detector.record_check(step, found if is_looking else None)

    def _end_epoch(self, epoch: Epoch) -> EpochEvent:
        event = EpochEvent(epoch=self.epoch, step=self.step, **dataclasses.asdict(epoch))
        self._followers.after_epoch(epoch.loss)
        self.epoch += 1
        if self.config.checkpoint_dir is not None:
            self._checkpoint()
        self._teller.callbacks.tell("on_epoch", event)
        return event

    def _checkpoint(self) -> None:
        """A checkpoint of this step, unless the state or the disk is bad: training goes on."""
        try:
            self.save(Path(self.config.checkpoint_dir or "") / f"step-{self.step:08d}.ckpt")
        except (NonFiniteError, CheckpointError) as error:
            logger.error("%s", error)

    def _saved(self) -> Saved:
        return Saved(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=tuple(self._followers.all_schedulers()),
            scaler=self.scaler,
            ema=self._followers.ema,
        )

    def _watch(self) -> None:
        """Have all steps from now on watched; there is no guard when nothing is to be looked at."""
        checks = self.config.nan_detection
        self.guard: Guard | None = None
        if checks.check_loss or checks.check_gradients or checks.check_parameters:
            self.guard = watch_chosen(
                self.model,
                self.optimizer,
                checks,
                scaler=self.scaler,
                schedulers=[*self._followers.all_schedulers(), self._window],
                ema=self._followers.ema,
                on_incident=self._teller.noticed,
            )
            self.nan_recovery = self.guard.manager
            self._endings.append(weakref.finalize(self, _let_go, self.guard))


def _let_go(guard: Guard) -> None:
    guard.close()
    guard.manager.undo_raised_precision()


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Who has a state that is saved."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: tuple[Any, ...] = ()
    scaler: Any = None
    ema: Any = None

    def first_bad(self) -> NaNReport | None:
        bad = [*bad_weights(self.model), *bad_states(self.optimizer)]
        bad += bad_weights(self.ema) if isinstance(self.ema, nn.Module) else []
        return bad[0] if bad else None


def save(saved: Saved, path: Path, *, counts: Mapping[str, int]) -> None:
    """Write the state; NonFiniteError if it is bad, and then nothing is written."""
    try:
        save_checkpoint(path, **vars(saved), step=counts["updates"], extra={"counts": dict(counts)})
    except NonFiniteError as error:
        error.report = saved.first_bad()
        raise


def load(saved: Saved, path: Path) -> dict[str, int]:
    """Load all that was saved, and give the counts; checked before anything is changed.

    A file that a trainer did not write begins with its step, and with epoch 0.
    """
    loaded = load_checkpoint(path, **vars(saved))
    known = loaded.extra.get("counts", {}) if isinstance(loaded.extra, dict) else {}
    return {"epoch": 0, "updates": loaded.step or 0, **known}


def watch_chosen(
    model: nn.Module,
    optimizer: Optimizer,
    checks: NaNDetectionConfig,
    *,
    scaler: Any,
    schedulers: Sequence[Any],
    ema: Any,
    on_incident: Callable[[Incident], None],
) -> Guard:
    """The guard, attached."""
    settings = GuardSettings(
        on_nan="recover",
        folder=os.getcwd(),
        check_loss=checks.check_loss,
        check_gradients=checks.check_gradients,
        check_parameters=checks.check_parameters,
        check_every=checks.detection_interval,
    )
    guard = Guard(settings, on_incident=on_incident, only=optimizer)
    parts = Parts(
        optimizer=optimizer,
        modules=(model,),
        schedulers=tuple(schedulers),
        scaler=scaler,
        emas=() if ema is None else (ema,),
    )
    guard.add(Job(parts, checks.recovery, NaNRecoveryManager(checks.recovery)))
    guard.attach()
    return guard


def place(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Where the model is, after it was moved to the device that is asked for, if any."""
    if device is not None:
        model.to(device)  # in place: an optimizer keeps its parameters
    tensor = next(model.parameters(), next(model.buffers(), None))
    return torch.device("cpu") if tensor is None else tensor.device


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on the device; the batch itself if they are there."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        # A batch of a library of its own, such as a BatchEncoding.
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return tree_map(moved, batch)
