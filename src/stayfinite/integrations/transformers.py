"""transformers: a callback for the Trainer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from stayfinite.detect.entrypoints import wrapped
from stayfinite.detect.hooks import Attachment
from stayfinite.errors import StayFiniteError
from stayfinite.guard.guard import Guard
from stayfinite.guard.watch import Sink
from stayfinite.integrations.answers import OnNaN, answered_by
from stayfinite.integrations.harmless import harmless
from stayfinite.integrations.packages import check_package
from stayfinite.integrations.sharing import guard_of
from stayfinite.records import Incident
from stayfinite.recover.config import RecoveryConfig

check_package("transformers", extra="hf")
check_package("accelerate", extra="hf")

from transformers.trainer_callback import TrainerCallback  # noqa: E402

from stayfinite.integrations.accelerate import inner_optimizer  # noqa: E402
from stayfinite.integrations.transformers_joining import post_for  # noqa: E402
from stayfinite.integrations.transformers_trainer import WatchedTrainer  # noqa: E402

logger = logging.getLogger("stayfinite")
_watched: WeakSet[Any] = WeakSet()  # trainers


class StayFiniteCallback(TrainerCallback):
    """Keeps a Trainer's training finite; for `Trainer(callbacks=[StayFiniteCallback()])`.

    A bad step is undone and replayed through the trainer's own `training_step`, so that its
    report has the line that made it; then training goes on as if its batches had not been
    there. on_nan="stop" ends training there with TrainingAbortedError, "warn" only tells.
    Checkpoints of a model that is not finite are not written. With `prove_seconds`, experiments
    on a bad step may take so long: `training_step` is called again and again without its
    update, to find the guilty samples and to prove the diagnosis. `config` and `sinks` are those
    of `stayfinite.watch`; after training, `incidents` has what happened.
    """

    def __init__(
        self,
        *,
        config: RecoveryConfig | None = None,
        on_nan: OnNaN = "recover",
        sinks: Iterable[Sink] | None = None,
        prove_seconds: float = 0.0,
    ) -> None:
        # An error about them belongs here.
        answered_by(config, on_nan, prove_seconds=prove_seconds)
        self._config, self._on_nan, self._prove_seconds = config, on_nan, prove_seconds
        self._sinks = None if sinks is None else list(sinks)
        self._watch: WatchedTrainer | None = None
        self._trainer: Any = None
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
            self._watch = WatchedTrainer(
                trainer,
                config=self._config,
                on_nan=self._on_nan,
                sinks=self._sinks,
                prove_seconds=self._prove_seconds,
            )
        except StayFiniteError as error:
            logger.warning("StayFiniteCallback does nothing here: %s", error)
            return
        self._trainer = trainer
        _watched.add(trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            with harmless("ending a step of the trainer"):
                self._watch.step_ended()
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
            _watched.discard(self._trainer)
            self._trainer = None
            with harmless("leaving a trainer"):
                watch.close()
            self._past += watch.incidents


class JoiningCallback(StayFiniteCallback):
    """Helps whoever watches the process already; does nothing without that."""

    def _attach(self, trainer: Any) -> None:
        if post_for(trainer) or guard_of(inner_optimizer(trainer.optimizer)):
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
                    self.add_callback(JoiningCallback(sinks=[]))

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
