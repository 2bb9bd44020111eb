"""Lightning: a callback that leaves bad steps out, and says which operation made them bad."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from torch.optim import Optimizer

from stayfinite.detect.entrypoints import together
from stayfinite.detect.hooks import Attachment, listeners
from stayfinite.guard.guard import Guard
from stayfinite.guard.post import Post, free_post
from stayfinite.guard.watch import Sink, told_to
from stayfinite.integrations.answers import OnNaN, answered_by
from stayfinite.integrations.clipping import keep_bad_gradients
from stayfinite.integrations.harmless import harmless
from stayfinite.integrations.lightning_files import refuse_bad_checkpoints
from stayfinite.integrations.lightning_guard import (
    LightningGuard,
    LightningJob,
    StoppingJob,
    UnattendedJob,
)
from stayfinite.integrations.lightning_joining import is_alone
from stayfinite.integrations.lightning_tools import NaNTools as NaNTools
from stayfinite.integrations.lightning_tools import equip as equip
from stayfinite.integrations.packages import check_package
from stayfinite.records import Incident, from_data, to_data
from stayfinite.recover.config import RecoveryConfig
from stayfinite.settings import GuardSettings

logger = logging.getLogger("stayfinite")
_LIBRARIES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
_SHARDED = ("FSDP", "DeepSpeed", "ModelParallel", "XLA")


def _callbacks() -> tuple[type, ...]:
    """`Callback` of the library that is loaded; if neither is, of all that are installed."""
    names = [name for name in _LIBRARIES if name in sys.modules]
    names = names or [name for name, package in _LIBRARIES.items() if _is_installed(package)]
    for name in names or ["lightning.pytorch"]:
        check_package(_LIBRARIES[name], extra="lightning", like="lightning")
    return tuple(importlib.import_module(name).Callback for name in names)


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


class StayFinite(*_callbacks()):  # type: ignore[misc]
    """Keeps a Trainer's training finite; for `Trainer(callbacks=[StayFinite()])`.

    A bad step is undone and replayed through `training_step`, so that its report has the line
    that made it; then training goes on as if its batches had not been there, or as `config`
    says. on_nan="stop" ends training there with TrainingAbortedError, "warn" only tells. Each
    incident goes to all `sinks`; without any, its report goes to stderr. With replay=False no
    `training_step` is called twice. With `prove_seconds`, experiments on a bad step may take so
    long: they replay it again and again without its update, to find the guilty samples and to
    prove the diagnosis.
    """

    def __init__(
        self,
        config: RecoveryConfig | None = None,
        on_nan: OnNaN = "recover",
        sinks: Iterable[Sink] | None = None,
        *,
        replay: bool = True,
        prove_seconds: float = 0.0,
    ) -> None:
        self._answer = answered_by(config, on_nan, prove_seconds=prove_seconds)
        self._prove_seconds = prove_seconds
        self._sinks = None if sinks is None else list(sinks)  # a list travels to other processes
        self._replays = replay
        self._guard: LightningGuard | None = None
        self._attached: Attachment | None = None
        self._earlier: list[Incident] = []
        self._first = 0  # of the guard's incidents that is ours
        self._key: str | None = None

    @property
    def incidents(self) -> list[Incident]:
        """All so far; those of the run that this one goes on from come first."""
        guard = self._guard
        return [*self._earlier, *(guard.incidents[self._first :] if guard is not None else ())]

    @property
    def state_key(self) -> str:
        """Until training begins each has its own: two callbacks are no reason not to begin."""
        return self._key or f"StayFinite {id(self)}"

    def state_dict(self) -> dict[str, Any]:
        """The incidents so far."""
        return {"incidents": to_data(self.incidents)} if self.incidents else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier = [from_data(Incident, each) for each in state_dict.get("incidents", ())]

    @harmless("setting up a callback")
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the last place before those that save, to see what all others have done."""
        savers = trainer.checkpoint_callbacks
        others = [each for each in trainer.callbacks if each is not self and each not in savers]
        trainer.callbacks = [*others, self, *savers]
        self._key = self._free_key([each for each in others if isinstance(each, StayFinite)])

    def _free_key(self, others: list[StayFinite]) -> str:
        """By the order in which callbacks are set up: that is the same when training resumes."""
        taken = {each._key for each in others}
        keys = ["StayFinite", *(f"StayFinite {number}" for number in range(1, len(others) + 1))]
        return next(key for key in keys if key not in taken)

    @harmless("attaching to a trainer")
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, now that there are optimizers."""
        optimizers = [each for each in trainer.optimizers if _is_known(each)]
        post = free_post() if is_alone(trainer) else None
        reason = _reason_to_stand_aside(trainer, optimizers, has_post=post is not None)
        if reason is not None:
            self._says_no(reason)
            return
        self._earlier = self.incidents
        if post is None:
            self._attach(trainer, optimizers)
        else:
            self._join(post, trainer, optimizers)

    def _says_no(self, reason: str) -> None:
        logger.warning("the StayFinite callback does nothing here: %s", reason)

    def _attach(self, trainer: Any, optimizers: list[Optimizer]) -> None:
        on_nan, config = self._answer["on_nan"], self._answer["config"] or RecoveryConfig()
        guard = LightningGuard(
            GuardSettings(on_nan=on_nan, folder=os.getcwd(), prove_seconds=self._prove_seconds),
            trainer,
            on_incident=told_to(self._sinks),
            only=optimizers[0] if len(optimizers) == 1 else None,
            replays=self._replays,
        )
        watched = optimizers if on_nan == "recover" else []
        attached = _prepare(trainer, guard, [LightningJob(trainer, o, config) for o in watched])
        guard.attach()
        self._guard, self._first = guard, 0
        self._attached = together(attached, Attachment(guard.close))

    def _join(self, post: Post, trainer: Any, optimizers: list[Optimizer]) -> None:
        """Watch for the command that watches this process; it says what is done, and tells."""
        guard = LightningGuard(post.settings, trainer, replays=self._replays)
        job = StoppingJob if post.stops else UnattendedJob
        attached = _prepare(trainer, guard, [job(trainer, o, post.config) for o in optimizers])
        relief = post.hand_over(guard)
        self._guard, self._first = guard, len(guard.incidents)
        self._attached = together(attached, relief)

    @harmless("the beginning of a batch")
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step may begin."""
        if self._guard is not None:
            self._guard.begin_batch(batch, batch_idx)

    @harmless("the end of a batch")
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """What followed an update that was left out is left out too."""
        if self._guard is not None:
            self._guard.end_batch()

    @harmless("averages")
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on averages must be right."""
        if self._guard is not None:
            self._guard.settle_late()

    @harmless("averages")
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """From here on averages must be right."""
        if self._guard is not None:
            self._guard.settle_late()

    @harmless("saving a checkpoint")
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Mend weights that are bad; what is to be saved refers to the same memory."""
        if self._guard is not None and self._attached is not None:
            for job in self._guard.jobs.values():
                self._guard.mended_harm(job)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach; a step that was bad and unfinished is undone."""
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach."""
        self.close()

    @harmless("detaching from a trainer")
    def close(self) -> None:
        """Leave torch and the trainer as they were; a second call does nothing."""
        attached, self._attached = self._attached, None
        if attached is not None and self._guard is not None:
            self._guard.settle_late()
            attached.remove()
            self._earlier, self._guard = self.incidents, None


class LentStayFinite(StayFinite):
    """In a script that has no callback of ours: no file has a trace of it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def _says_no(self, reason: str) -> None:
        """Nothing: nobody asked for it, and the process is watched all the same."""


def _prepare(trainer: Any, guard: LightningGuard, jobs: list[LightningJob]) -> Attachment:
    for job in jobs:
        guard.add(job)
    keeping = [keep_bad_gradients(job.parts.optimizer) for job in jobs]
    return together(refuse_bad_checkpoints(trainer), *keeping)


def _reason_to_stand_aside(
    trainer: Any, optimizers: list[Optimizer], *, has_post: bool
) -> str | None:
    strategy = type(trainer.strategy).__name__
    if not has_post and any(isinstance(listener, Guard) for listener in listeners()):
        return "this process is watched already, by a callback, by watch() or by `stayfinite run`"
    if strategy.startswith(_SHARDED):
        return f"sharded models are not handled, and the strategy is {strategy}"
    return None if optimizers else "there is no optimizer of torch"


def _is_known(optimizer: Any) -> bool:
    return isinstance(optimizer, Optimizer) and not type(optimizer).__name__.startswith("_Mock")
