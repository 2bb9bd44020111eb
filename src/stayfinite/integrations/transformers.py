"""transformers: a callback for the Trainer, and one Trainer under watch while it trains."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stayfinite.detect.detector import bad_reports
from stayfinite.detect.finite import all_finite
from stayfinite.detect.hooks import Attachment, together, wrapped
from stayfinite.distributed import agree
from stayfinite.errors import StayFiniteError
from stayfinite.explain.experiments import CannotReplayError
from stayfinite.guard.discover import ProcessGuard, free_process_guard
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.guard.replay import NO_BATCH, Replay
from stayfinite.integrations import check_package
from stayfinite.integrations.shared import (
    OnNaN,
    WatchOptions,
    guard_of,
    keep_bad_gradients,
    watch_options,
)
from stayfinite.nested import named_tensors, named_weights
from stayfinite.records import Incident
from stayfinite.recover.config import RecoveryConfig
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.report.alerts import AlertRule
from stayfinite.report.sinks import Sink
from stayfinite.safely import harmless

check_package("transformers", extra="hf")
check_package("accelerate", extra="hf")

from accelerate.utils import DistributedType  # noqa: E402
from transformers.trainer_callback import TrainerCallback  # noqa: E402

from stayfinite.integrations.accelerate import (  # noqa: E402
    guard_over,
    inner_optimizer,
    inner_schedulers,
    tell_skips,
)

logger = logging.getLogger("stayfinite")
_watched: WeakSet[Any] = WeakSet()  # trainers


class StayFiniteCallback(TrainerCallback):
    """Keeps a Trainer's training finite; for `Trainer(callbacks=[StayFiniteCallback()])`.

    A bad step is undone and replayed through the trainer's own `training_step`, so that its
    report has the line that made it; then training goes on as if its batches had not been
    there. on_nan="stop" ends training there with TrainingAbortedError, "warn" only tells.
    Checkpoints of a model that is not finite are not written. With `prove_seconds`, experiments
    on a bad step may take so long: `training_step` is called again and again without its
    update, to find the bad samples and to prove the diagnosis. `config` and `sinks` are those
    of `stayfinite.watch`; after training, `incidents` has what happened.
    """

    def __init__(
        self,
        *,
        config: RecoveryConfig | None = None,
        on_nan: OnNaN = "recover",
        sinks: Iterable[Sink] | None = None,
        alerts: Iterable[AlertRule] = (),
        prove_seconds: float = 0.0,
    ) -> None:
        self._options = watch_options(config, on_nan, sinks, alerts, prove_seconds)
        self._watch: WatchedTrainer | None = None
        self._past: list[Incident] = []

    @property
    def guard(self) -> Guard | None:
        """The guard over the training that is under way."""
        return None if self._watch is None else self._watch.guard

    @property
    def incidents(self) -> list[Incident]:
        """All that happened, over all calls of `train()`."""
        return [*self._past, *(self._watch.incidents if self._watch is not None else ())]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        with harmless("attaching to a trainer"):
            trainer = _calling_trainer()
            if trainer is None or trainer in _watched:
                why = "no Trainer was found" if trainer is None else "another callback watches it"
                logger.warning("StayFiniteCallback does nothing here: %s", why)
                return
            self._attach(trainer)

    def _attach(self, trainer: Any) -> None:
        try:
            self._watch = WatchedTrainer(trainer, self._options)
        except StayFiniteError as error:
            logger.warning("StayFiniteCallback does nothing here: %s", error)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            with harmless("ending a step of the trainer"):
                self._watch.end_step()
        self._refuse_bad_save(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._refuse_bad_save(control)

    def _refuse_bad_save(self, control: Any) -> None:
        if self._watch is not None and control.should_save:
            with harmless("looking at what a checkpoint would hold"):
                control.should_save = self._watch.may_save()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave torch and the trainer as they were; the trainer does this at its end."""
        watch, self._watch = self._watch, None
        if watch is not None:
            with harmless("leaving a trainer"):
                watch.close()
            self._past += watch.incidents


class LentCallback(StayFiniteCallback):
    """Helps whoever watches the process already; does nothing without that."""

    def _attach(self, trainer: Any) -> None:
        if process_guard_for(trainer) or guard_of(inner_optimizer(trainer.optimizer)):
            super()._attach(trainer)


def join_trainers() -> Attachment:
    """Let every Trainer that is made from now on help the guard of this process.

    Its bad steps are then replayed, its logs and checkpoints kept true, without a callback in
    the script. For a guard over all optimizers, such as that of `stayfinite run`.
    """
    from transformers.trainer import Trainer

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            with harmless("adding a callback to a trainer"):
                known = self.callback_handler.callbacks
                if not any(isinstance(each, StayFiniteCallback) for each in known):
                    self.add_callback(LentCallback(sinks=[]))

        return init

    return wrapped(Trainer, "__init__", wrap)


def _calling_trainer() -> Any:
    """The Trainer whose code is running: callbacks are not told."""
    from transformers.trainer import Trainer  # slow, and loaded when a trainer is running

    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


Method = Callable[..., Any]


class WatchedTrainer:
    """Marks where steps begin, replays bad ones, and keeps logs and checkpoints true.

    If its optimizer has a guard already (`stayfinite run`), that one is used, and it says what
    is done and who is told.

    Four methods of the trainer are wrapped until `close()`: training_step, log,
    _save_checkpoint, and _run_epoch where there is one. The last two are private, but no callback
    comes before every save, and none after an error.
    """

    def __init__(self, trainer: Any, options: WatchOptions) -> None:
        self._trainer = trainer
        self._inner = inner_optimizer(trainer.optimizer)
        self._relief = stand_in(trainer)
        shared = guard_of(self._inner)
        self._is_shared = shared is not None
        # The model, or what makes all ranks agree around it.
        wrapper = trainer.model_wrapped
        model = wrapper if isinstance(wrapper, DistributedDataParallel) else trainer.model
        self.guard = shared or guard_over(
            trainer.accelerator, model, trainer.optimizer, trainer.lr_scheduler, options
        )
        self._earlier = len(self.guard.incidents)
        self._job = self.guard.jobs.get(id(self._inner))
        self._calls: list[tuple[Method, tuple[Any, ...], dict[str, Any]]] = []
        self._losses = LoggedLosses()
        # Masks and the like are meant to be so; no update changes what needs no gradient.
        weights = [each for each in named_weights(trainer.model) if not each[1].requires_grad]
        self._meant = {name for name, tensor in weights if not all_finite([tensor])}
        self._attachment = together(*self._attachments())
        replay = Replay(self.guard, self._again, batch=self._batch)
        self.guard.replay_with(replay, only=self._job)
        _watched.add(trainer)

    def _attachments(self) -> Iterable[Attachment]:
        trainer, job = self._trainer, self._job
        if job is not None:
            yield keep_bad_gradients(self._inner)
            yield tell_skips(trainer.optimizer, job)
        yield wrapped(trainer, "training_step", self._around_training_step)
        yield wrapped(trainer, "log", self._around_log)
        yield wrapped(trainer, "_save_checkpoint", self._around_saving)
        if hasattr(trainer, "_run_epoch"):
            yield wrapped(trainer, "_run_epoch", self._around_epoch)

    @property
    def incidents(self) -> list[Incident]:
        """Those since this training began."""
        return self.guard.incidents[self._earlier :]

    def close(self) -> None:
        """Leave torch and the trainer as they were; a guard that is somebody else's stays."""
        _watched.discard(self._trainer)
        if not self._is_shared:
            self.guard.close()
        self._relief.remove()
        self._attachment.remove()
        self._calls.clear()

    def end_step(self) -> None:
        """Take back what followed a vetoed update, before anybody evaluates or saves."""
        if self._job is not None:
            self._job.settle()
        is_good = self._job is None or self._job.was_good
        self._losses.end_step(is_good=is_good)
        if not is_good:
            self._mend_sum(self._losses.sum)

    def may_save(self) -> bool:
        """Whether all that a checkpoint would hold is finite; says so if it is not."""
        weights = named_weights(self._trainer.model)
        named = [
            *((name, tensor) for name, tensor in weights if name not in self._meant),
            *named_tensors(list(self._inner.state.values()), "optimizer"),
        ]
        bad = next((report.location for report in bad_reports(named, described=0)), None)
        if not agree(bad is not None):
            return True
        step = self._trainer.state.global_step
        where = f"{bad} is" if bad is not None else "a value of another rank is"
        logger.error("no checkpoint is saved at step %d: %s not finite", step, where)
        return False

    def _batch(self) -> Any:
        return self._calls[0][1][1] if len(self._calls) == 1 else NO_BATCH

    def _again(self, batch: Any) -> None:
        if not self._calls:
            raise CannotReplayError("no step of the trainer is running")
        for training_step, (model, inputs, *args), kwargs in self._calls:
            given = inputs if batch is NO_BATCH else batch
            training_step(model, given, *args, **kwargs)

    def _around_training_step(self, original: Method) -> Method:
        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with harmless("noting a step of the trainer"):
                self._begin(original, (model, copy.copy(inputs), *args), kwargs)
            loss = original(model, inputs, *args, **kwargs)
            with harmless("looking at a loss of the trainer"):
                self._losses.add(loss)
            return loss

        return training_step

    def _begin(self, original: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._job is None:
            return
        if not self._job.has_begun:
            self._calls.clear()
            self.guard.begin_step(self._job)
        self._calls.append((original, args, kwargs))

    def _around_log(self, original: Method) -> Method:
        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            with harmless("looking at a log of the trainer"):
                if "loss" in logs:
                    logs = self._losses.completed_log(logs)
                    self._losses = LoggedLosses()
                    self._mend_sum(0.0)
            return original(logs, *args, **kwargs)

        return log

    def _mend_sum(self, value: Any) -> None:
        """A NaN in the trainer's sum of losses would stay there; without one it is as it was."""
        total = getattr(self._trainer, "_tr_loss", None)
        if isinstance(total, Tensor) and not all_finite([total]):
            total.copy_(torch.as_tensor(value))

    def _around_saving(self, original: Method) -> Method:
        def save(*args: Any, **kwargs: Any) -> Any:
            is_fine = True
            with harmless("looking at what a checkpoint would hold"):
                is_fine = self.may_save()
            return original(*args, **kwargs) if is_fine else None

        return save

    def _around_epoch(self, original: Method) -> Method:
        def run_epoch(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except BaseException:  # on_train_end will not come
                with harmless("leaving a trainer that failed"):
                    self.close()
                raise

        return run_epoch


class LoggedLosses:
    """The losses since the last log; the trainer's own mean of them is wrong if some are bad."""

    def __init__(self) -> None:
        self._seen = self._steps = self._skipped = 0
        self._bad: Any = 0
        self.sum: Any = 0.0  # of the good ones

    def add(self, loss: Tensor) -> None:
        """One of a micro-batch; nothing is read from the device here."""
        is_bad = ~torch.isfinite(loss)
        self._seen += 1
        self._bad = self._bad + is_bad
        self.sum = self.sum + loss.masked_fill(is_bad, 0.0)

    def end_step(self, *, is_good: bool) -> None:
        self._steps += 1
        self._skipped += not is_good

    def completed_log(self, logs: dict[str, float]) -> dict[str, float]:
        """The log with what it hides; as it is when there was nothing bad."""
        more: dict[str, float] = {}
        if bad := int(self._bad):  # host sync
            more["loss"] = math.nan
            if (good := self._seen - bad) and self._steps:  # the mean, for a whole step
                more["loss"] = float(self.sum) / good * self._seen / self._steps
            more["nonfinite_losses"] = bad
        if self._skipped:
            more["skipped_steps"] = self._skipped
        return {**logs, **more}


def process_guard_for(trainer: Any) -> ProcessGuard | None:
    """Who watches this process, if all of the trainer's work is done here."""
    is_alone = trainer.accelerator.distributed_type == DistributedType.NO
    return free_process_guard() if is_alone else None


def stand_in(trainer: Any) -> Attachment:
    """Let a guard that knows the trainer's parts watch in its place; nothing if there is none."""
    process_guard = process_guard_for(trainer)
    if process_guard is None:
        return Attachment(lambda: None)
    parts = Parts(
        optimizer=inner_optimizer(trainer.optimizer),
        modules=(trainer.model,),
        schedulers=tuple(inner_schedulers(trainer.lr_scheduler)),
        scaler=trainer.accelerator.scaler,
    )
    job = Job(
        parts,
        process_guard.config,
        NaNRecoveryManager(process_guard.config),
        look_around=None if process_guard.stops else lambda known: known,
        takes_snapshots=not process_guard.stops,
    )
    guard = Guard(process_guard.settings)
    guard.add(job)
    return process_guard.stand_in(guard)
