"""AMPTrainer: a training loop in mixed precision that stays finite."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from stayfinite.amp.config import AMPConfig
from stayfinite.amp.epoch import (
    EpochEvent,
    Evaluation,
    Followers,
    ProgressBar,
    SchedulerEvery,
    Teller,
    evaluate,
    incident_line,
    set_learning_rate,
)
from stayfinite.amp.update import (
    BatchResult,
    LossFunction,
    Update,
    bad_states,
    bad_weights,
    require_kinds,
    require_ready,
)
from stayfinite.checkpoint import load_checkpoint, save_checkpoint
from stayfinite.detect.detector import NaNDetector
from stayfinite.errors import CheckpointError, NonFiniteError, TrainingAbortedError
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.prevent.clamp import ActivationClamp, clamp_activations
from stayfinite.records import Incident, NaNReport
from stayfinite.recover.config import refuse_unanswered
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.report.alerts import AlertRule
from stayfinite.report.sinks import forecasts_told_to, told_to
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
    was checked and found. Each of `alerts` tells one more receiver of incidents and, with
    `forecast`, of what is going to overflow or diverge, which is logged too.

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
        alerts: Iterable[AlertRule] = (),
        forecast: bool = False,
    ) -> None:
        require_kinds(config, model, optimizer)
        refuse_unanswered(config.nan_detection.recovery, _why_unanswered(config, forecast))
        self.config, self.model, self.optimizer = config, model, optimizer
        if config.device is not None:
            model.to(config.device)  # in place: an optimizer keeps its parameters
        tensor = next(model.parameters(), next(model.buffers(), None))
        self.device = torch.device("cpu") if tensor is None else tensor.device
        self.epoch = 0
        self.incidents: list[Incident] = []
        if config.learning_rate is not None:
            set_learning_rate(optimizer, config.learning_rate, scheduler=scheduler)
        self._followers = Followers(
            config, model, optimizer, scheduler=scheduler, every=scheduler_every, ema=ema
        )
        self._update = Update(
            config,
            model,
            optimizer,
            loss_fn,
            device=self.device,
            incidents=self.incidents,
            after_update=self._followers.after_update,
        )
        self.scaler = self._update.scaler
        # By a weak reference: the guard must not keep us alive.
        self._teller = Teller(
            callbacks, self._update, log=weakref.WeakMethod(self.log_nan_recovery)
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
        self._alerts, self._forecasts = list(alerts), forecast
        self._watch()
        if batches_per_epoch is not None:
            self._followers.begin_warmup(batches_per_epoch)

    @property
    def step(self) -> int:
        """Updates that were made."""
        return self._update.window.updates

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
            self._followers.require_length()
            has_scheduler = self._followers.has_scheduler
            require_ready(self.model, self.optimizer, has_scheduler=has_scheduler)
            self._is_ready = True
        batch = on_device(batch, self.device)
        if self._update.window.is_at_start:
            looks = self.guard is not None and self.guard.looks_at_loss
            size = self.config.accumulate_grad_batches
            size = size if batches_left is None else min(size, batches_left)
            self._update.begin_window(size, looks_at_loss=looks)
        bad = len(self._update.bad_losses)
        done = self._run(batch)
        if self._teller.news or len(self._update.bad_losses) > bad:
            done = None
        self._teller.end_batch(done, epoch=self.epoch)
        every = self.config.checkpoint_every
        if every is not None and done is not None and done.was_update and self.step % every == 0:
            self._checkpoint()
        return None if done is None else done.loss

    def fit(self, loader: Iterable[Any], epochs: int = 1) -> list[EpochEvent]:
        """Train so many epochs on the loader, with a progress bar where there is a terminal.

        The last window of an epoch is a short one if need be; where the loader has no length, it
        goes on in the next epoch.
        """
        length: int | None = None
        with contextlib.suppress(TypeError):  # no __len__, or a DataLoader over a stream
            length = len(loader)  # type: ignore[arg-type]
        if length is not None:
            self._followers.begin_warmup(length)
        events: list[EpochEvent] = []
        with ProgressBar(epochs=epochs) as bar:
            for number in range(epochs):
                bar.begin_epoch(number, length)
                events.append(self._train_epoch(loader, length, bar))
        return events

    def evaluate(self, loader: Iterable[Any], *, model: nn.Module | None = None) -> Evaluation:
        """The mean loss over the loader, of the model or of another one, such as its average.

        Batches whose loss is not finite are named in the result and are in no mean.
        """
        model = self.model if model is None else model
        batches = (on_device(batch, self.device) for batch in loader)
        losses_of_batch = functools.partial(self._update.losses, model=model)
        return evaluate(batches, model=model, losses_of_batch=losses_of_batch)

    def save(self, path: str | Path) -> None:
        """Write all of training to one file: what was there stays until the new one is complete.

        NonFiniteError if a weight or the optimizer's state is not finite; nothing is written.
        Gradients of a window that is under way are not saved: it begins again after `load`.
        """
        counts = {"epoch": self.epoch, "updates": self.step}
        try:
            save_checkpoint(path, **self._saved_parts(), step=self.step, extra={"counts": counts})
        except NonFiniteError as error:
            ema = self._followers.ema
            bad = [*bad_weights(self.model), *bad_states(self.optimizer)]
            bad += bad_weights(ema) if isinstance(ema, nn.Module) else []
            error.report = bad[0] if bad else None
            raise

    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote; CheckpointError if it cannot be used.

        All is checked before anything is changed. The file is read without running code in it.
        """
        loaded = load_checkpoint(path, **self._saved_parts())
        known = loaded.extra.get("counts", {}) if isinstance(loaded.extra, dict) else {}
        # A file that a trainer did not write begins with its step, and with epoch 0.
        self.epoch = known.get("epoch", 0)
        updates = known.get("updates", loaded.step or 0)
        self._update.window.load_state_dict({"updates": updates, "batches": 0, "size": 1})
        if self.guard is not None:  # a new one has no snapshots of what was left behind
            for job in self.guard.jobs.values():
                job.precaution.forget_rate()
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

    def _run(self, batch: Any) -> BatchResult | None:
        guard = self.guard
        step, is_looking = (0, False) if guard is None else (guard.steps, guard.is_looking)
        try:
            return self._update(batch) if guard is None else guard.step(self._update, batch)
        except BaseException as error:
            self._update.window.batches = 0  # half a window is worth nothing
            if isinstance(error, TrainingAbortedError) and self._teller.news:
                error.incident = self.incidents[-1]  # it names the terms of the loss too
            raise
        finally:
            if guard is not None and guard.steps > step:
                found = [report for news in self._teller.news for report in news.reports]
                self.nan_detector.record_check(step, found if is_looking else None)

    def _train_epoch(
        self, loader: Iterable[Any], length: int | None, bar: ProgressBar
    ) -> EpochEvent:
        # The loader is asked for one batch at a time: asking ahead would change the order in which
        # it and the model draw random numbers.
        started, count, skipped = time.perf_counter(), 0, 0
        total: Tensor | None = None
        loss: Tensor | None = None
        for batch in loader:
            left = None if length is None else max(1, length - count)
            loss = self.training_step(batch, batches_left=left)
            count += 1
            if loss is None:
                skipped += 1
            else:
                total = loss.double() if total is None else total + loss
            bar.advance(loss=loss, skipped=skipped)
        bar.end_epoch(loss=loss, skipped=skipped)
        event = EpochEvent(
            epoch=self.epoch,
            step=self.step,
            loss=math.nan if total is None else float(total) / (count - skipped),  # host sync
            batches=count,
            skipped_batches=skipped,
            seconds=time.perf_counter() - started,
        )
        self._followers.after_epoch(event.loss)
        self.epoch += 1
        if self.config.checkpoint_dir is not None:
            self._checkpoint()
        self._teller.tell("on_epoch", event)
        return event

    def _checkpoint(self) -> None:
        """A checkpoint of this step, unless the state or the disk is bad: training goes on."""
        try:
            self.save(Path(self.config.checkpoint_dir or "") / f"step-{self.step:08d}.ckpt")
        except (NonFiniteError, CheckpointError) as error:
            logger.error("%s", error)

    def _saved_parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": tuple(self._followers.all_schedulers()),
            "scaler": self.scaler,
            "ema": self._followers.ema,
        }

    def _watch(self) -> None:
        """Have all steps from now on watched; there is no guard when nothing is to be looked at."""
        checks, ema = self.config.nan_detection, self._followers.ema
        self.guard: Guard | None = None
        if not (checks.check_loss or checks.check_gradients or checks.check_parameters):
            return
        settings = GuardSettings(
            on_nan="recover",
            folder=os.getcwd(),
            check_loss=checks.check_loss,
            check_gradients=checks.check_gradients,
            check_parameters=checks.check_parameters,
            check_every=checks.detection_interval,
        )
        parts = Parts(
            optimizer=self.optimizer,
            modules=(self.model,),
            schedulers=(*self._followers.all_schedulers(), self._update.window),
            scaler=self.scaler,
            emas=() if ema is None else (ema,),
        )
        add, alerts = self._teller.add_incident, self._alerts
        self.guard = guard = Guard(
            settings, on_incident=told_to([add], *alerts) if alerts else add, only=self.optimizer
        )
        if self._forecasts:
            from stayfinite.prevent.forecast.forecaster import Forecaster

            guard.past.forecaster = Forecaster(self.model)
            guard.past.on_forecast = forecasts_told_to([self._teller], *alerts)
        guard.add(Job(parts, checks.recovery, NaNRecoveryManager(checks.recovery)))
        guard.attach()
        self.nan_recovery = guard.manager
        self._endings.append(weakref.finalize(self, _let_go, guard))


def _why_unanswered(config: AMPConfig, forecast: bool) -> str | None:
    checks = config.nan_detection
    if not (checks.check_loss or checks.check_gradients or checks.check_parameters):
        return "with no check on nothing is watched; set check_loss=True."
    return None if forecast else "forecast is False, so nothing is forecast; set forecast=True."


def _let_go(guard: Guard) -> None:
    guard.close()
    guard.manager.undo_raised_precision()


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on the device; the batch itself if they are there."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        # A batch of a library of its own, such as a BatchEncoding.
        return value.to(device) if callable(getattr(value, "to", None)) else value

    # torch has no public name for its own walk through nested batches.
    return tree_map(move, batch)
