"""Lightning: a callback that leaves bad steps out, and says what made them bad.

It writes no checkpoint that is not finite.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any, TextIO, TypeVar, cast

from torch import nn
from torch.optim import Optimizer

from stayfinite.detect.detector import bad_reports
from stayfinite.detect.hooks import Attachment, listeners, together, wrapped
from stayfinite.detect.tools import NaNHooks, enable_nan_hooks
from stayfinite.guard.discover import ProcessGuard, free_process_guard
from stayfinite.guard.guard import Guard
from stayfinite.integrations import check_package
from stayfinite.integrations.lightning_guard import LightningGuard, LightningJob, is_alone
from stayfinite.integrations.shared import OnNaN, keep_bad_gradients, watch_options
from stayfinite.nested import named_tensors
from stayfinite.prevent.clamp import ActivationClamp, clamp_activations
from stayfinite.records import Incident, from_data, to_data
from stayfinite.recover.config import RecoveryConfig
from stayfinite.report.alerts import AlertRule
from stayfinite.report.sinks import Sink, forecasts_told_to, told_to
from stayfinite.safely import harmless
from stayfinite.settings import GuardSettings

logger = logging.getLogger("stayfinite")
_LIBRARIES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
_REFUSED = ("FSDP", "DeepSpeed", "XLA")


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
    long: they replay it again and again without its update, to find the bad samples and to
    prove the diagnosis.
    """

    def __init__(
        self,
        config: RecoveryConfig | None = None,
        on_nan: OnNaN = "recover",
        sinks: Iterable[Sink] | None = None,
        alerts: Iterable[AlertRule] = (),
        *,
        replay: bool = True,
        prove_seconds: float = 0.0,
    ) -> None:
        self._options = watch_options(config, on_nan, sinks, alerts, prove_seconds)
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
        # By the order in which callbacks are set up: that is the same when training resumes.
        taken = [each._key for each in others if isinstance(each, StayFinite)]
        keys = ["StayFinite", *(f"StayFinite {number}" for number in range(1, len(taken) + 1))]
        self._key = next(key for key in keys if key not in taken)

    @harmless("attaching to a trainer")
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, now that there are optimizers."""
        optimizers = [
            each
            for each in trainer.optimizers
            if isinstance(each, Optimizer) and not type(each).__name__.startswith("_Mock")
        ]
        process_guard = free_process_guard() if is_alone(trainer) else None
        reason = _reason_to_stand_aside(
            trainer, optimizers, has_process_guard=process_guard is not None
        )
        if reason is not None:
            self._stand_aside(reason)
            return
        self._earlier = self.incidents
        self._attach(trainer, optimizers, process_guard)

    def _stand_aside(self, reason: str) -> None:
        logger.warning("the StayFinite callback does nothing here: %s", reason)

    def _attach(
        self, trainer: Any, optimizers: list[Optimizer], process_guard: ProcessGuard | None
    ) -> None:
        """Watch, by ourselves or for the command that watches this process.

        That one says what is done then, and tells.
        """
        options = self._options
        if process_guard is None:
            config = options["config"] or RecoveryConfig()
            settings = GuardSettings(
                on_nan=options["on_nan"],
                folder=os.getcwd(),
                prove_seconds=options["prove_seconds"],
                again="auto" if self._replays else "never",
            )
        else:
            settings, config = process_guard.settings, process_guard.config
        guard = LightningGuard(
            settings,
            trainer,
            on_incident=told_to(options["sinks"], *options["alerts"]),
            only=optimizers[0] if process_guard is None and len(optimizers) == 1 else None,
            replays=self._replays,
        )
        guard.past.on_forecast = forecasts_told_to(options["sinks"], *options["alerts"])
        if settings.on_nan == "recover":
            for optimizer in optimizers:
                guard.add(LightningJob(trainer, optimizer, config, process_guard=process_guard))
        keeping = [keep_bad_gradients(job.parts.optimizer) for job in guard.jobs.values()]
        attached = together(refuse_bad_checkpoints(trainer), *keeping)
        if process_guard is None:
            guard.attach()
            watching = Attachment(guard.close)
        else:
            watching = process_guard.stand_in(guard)
        self._guard, self._first = guard, len(guard.incidents)
        self._attached = together(attached, watching)

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

    on_train_epoch_end = on_validation_start

    @harmless("saving a checkpoint")
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Mend weights that are bad; what is to be saved refers to the same memory."""
        if self._guard is not None and self._attached is not None:
            for job in self._guard.jobs.values():
                self._guard.mend_harm(job)

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

    def _stand_aside(self, reason: str) -> None:
        """Nothing: nobody asked for it, and the process is watched all the same."""


def _reason_to_stand_aside(
    trainer: Any, optimizers: list[Optimizer], *, has_process_guard: bool
) -> str | None:
    strategy = type(trainer.strategy).__name__
    if not has_process_guard and any(isinstance(listener, Guard) for listener in listeners()):
        return "this process is watched already, by a callback, by watch() or by `stayfinite run`"
    if strategy.startswith(_REFUSED):
        return f"{strategy} is not handled; for FSDP2 there is ModelParallelStrategy"
    return None if optimizers else "there is no optimizer of torch"


_PARTS = ("state_dict", "current_model_state", "optimizer_states")


def refuse_bad_checkpoints(trainer: Any) -> Attachment:
    """Let no checkpoint of this trainer be written that is not finite, nor take another's place."""
    weights = named_tensors(trainer.lightning_module.state_dict(), "")
    # A mask may hold -inf on purpose.
    meant = {report.location for report in bad_reports(weights, described=0)}
    is_refusing = False

    def around_saving(original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(checkpoint: dict[str, Any], path: Any, *args: Any, **more: Any) -> None:
            nonlocal is_refusing
            named = (
                (name, tensor)
                for part in _PARTS
                for name, tensor in named_tensors(checkpoint.get(part), part)
                if name.removeprefix(part) not in meant
            )
            bad = next((report.location for report in bad_reports(named, described=0)), None)
            is_refusing = bad is not None
            if bad is None:
                original(checkpoint, path, *args, **more)
            else:
                logger.error("%s was not saved: %s is not finite; older files are kept", path, bad)

        return save_checkpoint

    def around_removal(original: Callable[..., Any]) -> Callable[..., Any]:
        def remove_checkpoint(path: Any) -> None:
            if not is_refusing:
                original(path)

        return remove_checkpoint

    files = trainer.strategy.checkpoint_io
    return together(
        wrapped(files, "save_checkpoint", around_saving),
        wrapped(files, "remove_checkpoint", around_removal),
    )


LIMIT = 1e4  # well inside of float16
Module = TypeVar("Module", bound=nn.Module)


class NaNTools:
    """For the bases of a module, before its own: `class Net(NaNTools, LightningModule)`.

    >>> class Net(NaNTools, nn.Linear):
    ...     pass
    >>> net = Net(2, 2)
    >>> net.enable_nan_hooks()
    >>> net.clamp_activations = 100.0
    >>> net.clamp_activations
    100.0
    >>> net.disable_nan_hooks()
    >>> net.clamp_activations = False
    """

    def enable_nan_hooks(self, *, verbose: bool = False, file: TextIO | None = None) -> None:
        """Print each layer whose output turns non-finite, or with `verbose` every layer."""
        self.disable_nan_hooks()
        vars(self)["_nan_hooks"] = enable_nan_hooks(
            cast(nn.Module, self), verbose=verbose, file=file
        )

    def disable_nan_hooks(self) -> None:
        """Take the hooks off again."""
        hooks: NaNHooks | None = vars(self).pop("_nan_hooks", None)
        if hooks is not None:
            hooks.remove()

    @property
    def clamp_activations(self) -> float | bool:
        """The limit of what each layer may give out, either way; False where there is none.

        Set it to a number, to True for 10000, or to False to end it.
        """
        clamp: ActivationClamp | None = vars(self).get("_activation_clamp")
        return False if clamp is None else clamp.max

    @clamp_activations.setter
    def clamp_activations(self, limit: float | bool) -> None:
        clamp: ActivationClamp | None = vars(self).pop("_activation_clamp", None)
        if clamp is not None:
            clamp.remove()
        if limit is not False and limit is not None:
            most = LIMIT if limit is True else float(limit)
            vars(self)["_activation_clamp"] = clamp_activations(cast(nn.Module, self), -most, most)


def equip(module: Module) -> Module:
    """The same module, which has the tools of NaNTools from now on; for one made without them.

    >>> net = equip(nn.Linear(2, 2))
    >>> net.clamp_activations = True
    >>> net.clamp_activations
    10000.0
    """
    kind: Any = type(module)
    if not issubclass(kind, NaNTools):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        module.__class__ = type(kind.__name__, (NaNTools, kind), names)
    return module
