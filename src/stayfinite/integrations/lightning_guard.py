"""A guard over the optimizers of one Lightning trainer, whose steps begin and end with batches.

Needs no Lightning to be loaded, so that a watched script may load it later.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from stayfinite.detect.finite import all_finite
from stayfinite.detect.hooks import Attachment, together, wrapped
from stayfinite.errors import PackageError
from stayfinite.explain.experiments import CannotReplayError
from stayfinite.guard.answers import Recover
from stayfinite.guard.discover import WithoutSnapshots, free_post
from stayfinite.guard.evidence import BadValues
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.guard.replay import NO_BATCH, Replay
from stayfinite.records import Incident
from stayfinite.recover.config import RecoveryConfig
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.safely import harmless
from stayfinite.settings import GuardSettings
from stayfinite.snapshot import Snapshot, TrainingState
from stayfinite.training import Pairs, params_of

Kept = list[tuple[Tensor, Tensor | None, Tensor | None]]
"""Parameters, with their gradients and the values of these."""


class LightningJob(Job):
    """One optimizer's training; keeps the batches of the step that is under way."""

    def __init__(
        self,
        trainer: Any,
        optimizer: Optimizer,
        config: RecoveryConfig,
        *,
        look_around: Callable[[Parts], Parts] | None = None,
    ) -> None:
        parts, manager = parts_of(trainer, optimizer), NaNRecoveryManager(config)
        super().__init__(parts, config, manager, look_around=look_around)
        self._trainer = trainer
        self.batches: list[tuple[Any, int]] = []
        self.has_stepped = False  # in this batch

    def watch_beginnings(self, begins: Callable[[Job], None]) -> None:
        """Nothing: a step begins with a batch, which the trainer tells of."""

    def end(self, *, is_good: bool, is_new: bool = True) -> None:
        """The update of this step was attempted."""
        super().end(is_good=is_good, is_new=is_new)
        self.batches.clear()
        self.has_stepped = True

    def begin_again(self) -> None:
        """Another step may begin in the same batch; what is held stays held."""
        held, self._held = self._held, None
        self.begin()
        self._held = held

    def drop(self) -> None:
        """Forget the step that is under way; it came to no update."""
        self._mark = self.trouble = None
        self.batches.clear()

    def hold(self) -> None:
        """Remember what Lightning updates after the step, to take that back in `settle`."""
        if self._held is None:
            self.parts = parts_of(self._trainer, self.parts.optimizer)  # callbacks change them
        super().hold()


class StoppingJob(WithoutSnapshots, LightningJob):
    """Ends with its first bad step."""


class UnattendedJob(LightningJob):
    """Of a script whose author is not asked: weights that are bad from the start are mended too."""

    def __init__(self, trainer: Any, optimizer: Optimizer, config: RecoveryConfig) -> None:
        super().__init__(
            trainer, optimizer, config, look_around=lambda _: parts_of(trainer, optimizer)
        )


class LightningGuard(Guard):
    """Knows the trainer: where its batches begin, and which of its updates were left out."""

    def __init__(
        self,
        settings: GuardSettings,
        trainer: Any,
        *,
        on_incident: Callable[[Incident], None] | None = None,
        only: Optimizer | None = None,
        replays: bool = True,
    ) -> None:
        super().__init__(settings, on_incident=on_incident, only=only)
        self.describe = self._with_batch
        if settings.on_nan == "recover":
            self.answer = _LightningRecover(self)
        self.trainer = trainer
        self.is_manual = not trainer.lightning_module.automatic_optimization
        self._loop = trainer.fit_loop.epoch_loop
        self._late_averages = LateAverages(trainer.lightning_module)
        self._logged: Logged | None = None
        self.answered: Job | None = None
        self._good = self._left_out = 0  # updates of this batch
        if replays:
            self.replay_with(Replay(self, self._again, batch=self._batch))

    def begin_batch(self, batch: Any, number: int) -> None:
        """A batch begins, and with it the step of each optimizer that is not accumulating."""
        self.settle_late()
        self._good = self._left_out = 0
        jobs = self._own_jobs()
        for job in jobs:
            if job.has_stepped:
                job.drop()
            job.has_stepped = False
        if not any(job.has_begun for job in jobs):
            self._logged = Logged(self.trainer)
        for job in jobs:
            self.begin_step(job)
            job.batches.append((batch, number))

    def end_batch(self) -> None:
        """A batch is over: if its updates were left out, so is all that followed them."""
        for job in self._own_jobs():
            job.settle()
            if not (self.is_manual or job.has_stepped or self._loop._should_accumulate()):
                job.drop()  # training_step has returned None
        if self._left_out and not self.is_manual and self._loop._num_ready_batches_reached():
            # The epoch is over all the same.
            self._loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if self._left_out and not self._good:
            self._strike()
            self._loop._batches_that_stepped -= 1

    def _strike(self) -> None:
        if self._logged is not None:
            self._logged.strike()

    def settle_late(self) -> None:
        """Take back what the module itself did after the batch."""
        self._late_averages.settle()

    def begin_answer(self, job: Job) -> None:
        """A bad update of this job is about to be answered."""
        self.answered = job
        if not all_finite(params_of(job.parts.optimizer)):
            job.undo()  # the state is put back from a snapshot, but not the random numbers

    def end_update(self, job: LightningJob, *, was_vetoed: bool) -> None:
        """An update was attempted: one that was left out is not counted, and not logged."""
        if was_vetoed or self.was_harmed or self.answered is job:
            self.answered = None
            self._left_out += 1
            job.hold()
            self._late_averages.hold()
            uncount(self.trainer)
            if not self.is_manual:
                self._strike()
        else:
            self._good += 1
        if self.is_manual:
            job.begin_again()

    def _with_batch(self, incident: Incident) -> Incident:
        if incident.outcome is None:
            return incident
        where = f"epoch {self.trainer.current_epoch}, batch {self._loop.batch_idx}"
        detail = f"{incident.outcome.detail} ({where})"
        outcome = dataclasses.replace(incident.outcome, detail=detail)
        return dataclasses.replace(incident, outcome=outcome)

    def _own_jobs(self) -> list[LightningJob]:
        return [job for job in self.jobs.values() if isinstance(job, LightningJob)]

    def _batch(self) -> Any:
        job = self.answered
        if not isinstance(job, LightningJob) or len(job.batches) != 1:
            return NO_BATCH
        return job.batches[0][0]

    def _again(self, batch: Any) -> None:
        job = self.answered
        if not isinstance(job, LightningJob) or not job.batches or not can_run_again(self.trainer):
            raise CannotReplayError("its batches are not known")
        others = [other.parts.state() for other in self.jobs.values() if other is not job]
        kept = [(state, state.capture(parts=("param_groups", "scheduler"))) for state in others]
        try:
            batches = list(job.batches)
            if batch is not NO_BATCH:
                batches = [(batch, batches[0][1])]
            run_again(self.trainer, job.parts.optimizer, batches)
        finally:
            for state, snapshot in kept:
                state.restore(snapshot)


class _LightningRecover(Recover):
    """Recovers in the middle of what the trainer does: that goes on as if nothing had been."""

    def __init__(self, guard: LightningGuard) -> None:
        super().__init__(guard)
        self._lightning = guard

    def refused(self, optimizer: Optimizer, gradients: Pairs) -> bool:
        with self._inside_of_step(optimizer):
            is_left_out = super().refused(optimizer, gradients)
        if not is_left_out:
            self._lightning.answered = None
        return is_left_out

    def skipped(self, optimizer: Optimizer) -> None:
        with self._inside_of_step(optimizer):
            super().skipped(optimizer)

    def harmed(self, finding: BadValues) -> None:
        with self._inside_of_update():
            super().harmed(finding)

    def ended(self, job: Job, *, is_good: bool, was_vetoed: bool) -> None:
        super().ended(job, is_good=is_good, was_vetoed=was_vetoed)
        if isinstance(job, LightningJob):
            with self._lightning.past.aside:
                self._lightning.end_update(job, was_vetoed=was_vetoed)

    @contextlib.contextmanager
    def _inside_of_step(self, optimizer: Optimizer) -> Iterator[None]:
        """A time in which state is undone while the module's own hook is still running.

        The name of that hook stays. In manual optimization it has more to do, so gradients of
        other optimizers stay as well, and parameters that are switched off for a while.
        """
        guard = self._lightning
        module, is_manual = guard.trainer.lightning_module, guard.is_manual
        names = ["_current_fx_name", *["_param_requires_grad_state"] * is_manual]
        kept = {name: vars(module)[name] for name in names if name in vars(module)}
        params = list(module.parameters()) if is_manual else []
        flags = [param.requires_grad for param in params]
        gradients = _gradients(params, but=optimizer)
        job = guard.jobs.get(id(optimizer))
        try:
            with self._inside_of_update():
                if job is not None:
                    guard.begin_answer(job)
                yield
        finally:
            vars(module).update(kept)
            for param, flag in zip(params, flags, strict=True):
                param.requires_grad = flag
            _put_back(gradients)

    @contextlib.contextmanager
    def _inside_of_update(self) -> Iterator[None]:
        """A time in which state is put back while the scaler is still busy with the update."""
        scaler = getattr(self._lightning.trainer.precision_plugin, "scaler", None)
        if not isinstance(scaler, GradScaler):
            yield
            return
        noted, scale = dict(scaler._per_optimizer_states), scaler._scale
        try:
            yield
        finally:
            scaler._per_optimizer_states.update(noted)
            if scaler._scale is None and scale is not None:  # a snapshot from before its first use
                scaler._lazy_init_scale_growth_tracker(scale.device)


def parts_of(trainer: Any, optimizer: Optimizer) -> Parts:
    """What belongs to one optimizer of the trainer, as it is now."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    if len(trainer.optimizers) > 1:
        schedulers = [each for each in schedulers if each.optimizer is optimizer]
    return Parts(
        optimizer=optimizer,
        modules=(trainer.strategy.model,),
        schedulers=tuple(schedulers),
        scaler=getattr(trainer.precision_plugin, "scaler", None),
        emas=averages_of(trainer),
    )


def _gradients(params: list[Any], *, but: Optimizer) -> Kept:
    own = {id(param) for param in params_of(but)} if params else set()
    others = [param for param in params if id(param) not in own]
    return [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in others]


@torch.no_grad()
def _put_back(gradients: Kept) -> None:
    for param, gradient, values in gradients:
        param.grad = gradient
        if gradient is not None and values is not None:
            gradient.copy_(values)


Batches = Sequence[tuple[Any, int]]


class _ReachedError(Exception):
    """The update that the step leads up to."""


def run_again(trainer: Any, optimizer: Optimizer, batches: Batches) -> None:
    """Run the batches, with their numbers, up to the update; gradients are then as before it.

    Callbacks, loggers and the profiler hear nothing of it, what is logged is dropped, and no
    optimizer makes an update. Hooks of the module run, with clipping.
    """
    with _unheard(trainer), torch.enable_grad():
        if trainer.lightning_module.automatic_optimization:
            _run_automatic(trainer, optimizer, batches)
        else:
            _run_manual(trainer, optimizer, batches)


def can_run_again(trainer: Any) -> bool:
    """Whether its steps depend on nothing but their batches."""
    fetcher = type(trainer.fit_loop._data_fetcher).__name__
    # There the step takes its batches itself.
    if fetcher == "_DataLoaderIterDataFetcher":
        return False
    # A wrapper such as DDP cannot be entered once more from inside.
    module = trainer.lightning_module
    return module.automatic_optimization or trainer.strategy.model is module


def library_of(trainer: Any) -> str:
    """The package that the trainer is from: `lightning.pytorch` or `pytorch_lightning`."""
    return type(trainer.fit_loop).__module__.partition(".loops")[0]


def _run_automatic(trainer: Any, optimizer: Optimizer, batches: Batches) -> None:
    loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
    utilities = importlib.import_module(f"{library_of(trainer)}.loops.utilities")
    for place, (batch, number) in enumerate(batches, start=1):
        arguments = loop._build_kwargs(OrderedDict(), batch, number)
        is_last = place == len(batches)
        with utilities._block_parallel_sync_behavior(strategy, block=not is_last):
            loop.automatic_optimization._make_closure(arguments, optimizer, number)()
    _unscale(getattr(trainer.precision_plugin, "scaler", None), optimizer)
    trainer.precision_plugin._after_closure(trainer.lightning_module, optimizer)


def _unscale(scaler: Any, optimizer: Optimizer) -> None:
    """What the scaler does before the update; itself it would refuse to do it twice."""
    if scaler is None or not scaler.is_enabled():
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.div_(scaler.get_scale())


def _run_manual(trainer: Any, optimizer: Optimizer, batches: Batches) -> None:
    loop = trainer.fit_loop.epoch_loop
    with _without_updates(trainer, optimizer), contextlib.suppress(_ReachedError):
        for batch, number in batches:
            arguments = loop._build_kwargs(OrderedDict(), batch, number)
            trainer.strategy.training_step(*arguments.values())


@contextlib.contextmanager
def _without_updates(trainer: Any, wanted: Optimizer) -> Iterator[None]:
    """No optimizer makes an update, and that of the wanted one ends the run."""

    def instead(optimizer: Optimizer) -> Callable[..., None]:
        @functools.wraps(optimizer.step)  # by whose attributes schedulers know it
        def step(closure: Callable[[], Any] | None = None, **_: Any) -> None:
            if closure is not None:
                closure()
            if optimizer is wanted:
                raise _ReachedError

        return step

    with contextlib.ExitStack() as swaps:
        for outer in trainer.strategy._lightning_optimizers:
            step = instead(outer.optimizer)
            swaps.enter_context(swapped(outer, step=step))
            swaps.enter_context(swapped(outer.optimizer, step=step))
        yield


@contextlib.contextmanager
def _unheard(trainer: Any) -> Iterator[None]:
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop.automatic_optimization
    library, name = library_of(trainer), module._current_fx_name
    dummy = importlib.import_module(f"{library}.loggers.logger").DummyLogger
    profiler = importlib.import_module(f"{library}.profilers").PassThroughProfiler()
    loggers = [dummy() for _ in trainer.loggers]
    with (
        swapped(trainer, callbacks=[], _loggers=loggers, profiler=profiler),
        swapped(module, log=_nothing, log_dict=_nothing),
        swapped(loop, optim_progress=copy.deepcopy(loop.optim_progress)),
    ):
        module._current_fx_name = "training_step"
        try:
            yield
        finally:
            module._current_fx_name = name


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of a function that logs."""


@contextlib.contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of one object replaced for a while; those of its class show again after it."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def uncount(trainer: Any) -> None:
    """Let `global_step` be as before the update that is running, if Lightning counts it."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    if progress.total.ready == progress.total.completed + 1:
        progress.increment_by(-1)


class Logged:
    """What `self.log` has gathered before a step, to go back to it."""

    def __init__(self, trainer: Any) -> None:
        self._results: dict[str, Any] = trainer.fit_loop.epoch_loop._results
        # Values are replaced when they are updated, so the references are enough.
        self._kept = {name: dict(vars(metric)) for name, metric in self._results.items()}

    def strike(self) -> None:
        """As if nothing had been logged since; nothing is shown or sent for this batch."""
        for name in [*self._results]:
            if name not in self._kept:
                del self._results[name]
            else:
                vars(self._results[name]).update(self._kept[name], _forward_cache=None)


class LateAverages:
    """Averages that belong to the module, which updates them after everybody else."""

    def __init__(self, module: nn.Module) -> None:
        found = [each for each in module.modules() if isinstance(each, AveragedModel)]
        self._state = TrainingState(None, ema=found) if found else None
        self._held: Snapshot | None = None

    def hold(self) -> None:
        if self._state is not None and self._held is None:
            self._held = self._state.capture(parts=("ema",))

    def settle(self) -> None:
        held, self._held = self._held, None
        if held is not None and self._state is not None:
            self._state.restore(held)


def averages_of(trainer: Any) -> tuple[Any, ...]:
    """Averages of the weights that callbacks hold: models, and dicts of tensors."""
    values = [value for callback in trainer.callbacks for value in vars(callback).values()]
    return tuple(value for value in values if _is_average(value, trainer))


def _is_average(value: Any, trainer: Any) -> bool:
    if value is trainer.lightning_module or value is trainer.strategy.model:
        return False
    tensors = list(_tensors(value))
    return bool(tensors) and all_finite(tensors)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, dict) and all(isinstance(each, Tensor) for each in value.values()):
        yield from value.values()


_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")
_joined: set[type] = set()


def join_trainers() -> Attachment:
    """Let each `fit` of the Trainers that are loaded lend its guard to the post of this process."""
    known = [getattr(sys.modules.get(name), "Trainer", None) for name in _LIBRARIES]
    return together(*(_join(each) for each in known if each is not None and each not in _joined))


def _join(trainers: type) -> Attachment:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _lent_callback(self):
                return original(self, *args, **kwargs)

        return fit

    _joined.add(trainers)
    attachment = wrapped(trainers, "fit", wrap)

    def remove() -> None:
        _joined.discard(trainers)
        attachment.remove()

    return Attachment(remove)


@contextlib.contextmanager
def _lent_callback(trainer: Any) -> Iterator[None]:
    """A callback of ours while it trains, if there is somebody to help."""
    before, ours = trainer.callbacks, None
    with harmless("adding a callback to a trainer"):
        ours = _callback_for(trainer)
        if ours is not None:
            trainer.callbacks = [*before, ours]
    try:
        yield
    finally:
        if ours is not None:
            ours.close()
            rest = [each for each in trainer.callbacks if each is not ours]
            trainer.callbacks = before if rest == before else rest


def _callback_for(trainer: Any) -> Any:
    if free_post() is None or not is_alone(trainer):
        return None
    try:
        from stayfinite.integrations.lightning import LentStayFinite, StayFinite
    except PackageError:  # the package is too old; the process is watched all the same
        return None
    has_one = any(isinstance(each, StayFinite) for each in trainer.callbacks)
    return None if has_one else LentStayFinite(sinks=[])


def is_alone(trainer: Any) -> bool:
    """Whether all of its training happens in this process."""
    return trainer.world_size == 1 and trainer.strategy.launcher is None
