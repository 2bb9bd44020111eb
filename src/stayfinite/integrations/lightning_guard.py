"""A guard over the optimizers of one Lightning trainer, whose steps begin and end with batches.

Needs no Lightning to be loaded, so that a watched script may load it later. To run a step again,
and to count one out, it must go by private names of Lightning's loops: nothing public does it.
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
from stayfinite.guard.discover import ProcessGuard, free_process_guard
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
from stayfinite.training import Pairs, gradients_of, params_of


class LightningJob(Job):
    """One optimizer's training; keeps the batches of the step that is under way.

    With a `process_guard` it belongs to a script whose author is not asked: its first bad step is
    the last, or weights that are bad from the start are mended too.
    """

    def __init__(
        self,
        trainer: Any,
        optimizer: Optimizer,
        config: RecoveryConfig,
        *,
        process_guard: ProcessGuard | None = None,
    ) -> None:
        is_unattended = process_guard is not None and not process_guard.stops
        super().__init__(
            parts_of(trainer, optimizer),
            config,
            NaNRecoveryManager(config),
            look_around=(lambda _: parts_of(trainer, optimizer)) if is_unattended else None,
            takes_snapshots=process_guard is None or not process_guard.stops,
        )
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
        self._logged = LogState(trainer)
        # Averages that belong to the module, which updates them after everybody else.
        modules = trainer.lightning_module.modules()
        averages = [each for each in modules if isinstance(each, AveragedModel)]
        self._averages = TrainingState(None, ema=averages) if averages else None
        self._held_averages: Snapshot | None = None
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
            self._logged = LogState(self.trainer)
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
            self._logged.put_back()
            self._loop._batches_that_stepped -= 1

    def settle_late(self) -> None:
        """Take back what the module itself did after the batch."""
        held, self._held_averages = self._held_averages, None
        if held is not None and self._averages is not None:
            self._averages.restore(held)

    def end_update(self, job: LightningJob, *, was_vetoed: bool) -> None:
        """An update was attempted: one that was left out is not counted, and not logged."""
        if was_vetoed or self.was_harmed or self.answered is job:
            self.answered = None
            self._left_out += 1
            job.hold()
            if self._averages is not None and self._held_averages is None:
                self._held_averages = self._averages.capture(parts=("ema",))
            uncount_update(self.trainer)
            if not self.is_manual:
                self._logged.put_back()
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
            raise CannotReplayError("its batches were not recorded")
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

    _guard: LightningGuard

    def refused(self, optimizer: Optimizer, gradients: Pairs) -> bool:
        with self._inside_of_step(optimizer):
            is_left_out = super().refused(optimizer, gradients)
        if not is_left_out:
            self._guard.answered = None
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
            with self._guard.past.aside:
                self._guard.end_update(job, was_vetoed=was_vetoed)

    @contextlib.contextmanager
    def _inside_of_step(self, optimizer: Optimizer) -> Iterator[None]:
        """A time in which state is undone while the module's own hook is still running.

        The name of that hook stays. In manual optimization it has more to do, so gradients of
        other optimizers stay as well, and parameters that are switched off for a while.
        """
        guard = self._guard
        module, is_manual = guard.trainer.lightning_module, guard.is_manual
        names = ["_current_fx_name", *["_param_requires_grad_state"] * is_manual]
        kept = {name: vars(module)[name] for name in names if name in vars(module)}
        params = list(module.parameters()) if is_manual else []
        flags = [param.requires_grad for param in params]
        own = set(map(id, params_of(optimizer)))
        others = [param for param in params if id(param) not in own]
        gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in others]
        job = guard.jobs.get(id(optimizer))
        try:
            with self._inside_of_update():
                if job is not None:
                    guard.answered = job
                    if not all_finite(params_of(optimizer)):
                        job.undo()  # a snapshot is put back later, but not the random numbers
                yield
        finally:
            vars(module).update(kept)
            for param, flag in zip(params, flags, strict=True):
                param.requires_grad = flag
            for param, gradient, values in gradients:
                param.grad = gradient
                if gradient is not None and values is not None:
                    gradient.detach().copy_(values)

    @contextlib.contextmanager
    def _inside_of_update(self) -> Iterator[None]:
        """A time in which state is put back while the scaler is still busy with the update."""
        scaler = getattr(self._guard.trainer.precision_plugin, "scaler", None)
        if not isinstance(scaler, GradScaler):
            yield
            return
        # What it has found in this step; it is not in its state_dict().
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


Batches = Sequence[tuple[Any, int]]


class _ReachedError(Exception):
    """The update that the step leads up to."""


def run_again(trainer: Any, optimizer: Optimizer, batches: Batches) -> None:
    """Run the batches, with their numbers, up to the update; gradients are then as before it.

    Callbacks, loggers and the profiler hear nothing of it, what is logged is dropped, and no
    optimizer makes an update. Hooks of the module run, with clipping.
    """
    run = _run_automatic if trainer.lightning_module.automatic_optimization else _run_manual
    with _without_listeners(trainer), torch.enable_grad():
        run(trainer, optimizer, batches)


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
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        for gradient in gradients_of(optimizer):  # the scaler itself would refuse to do it twice
            gradient.div_(scaler.get_scale())
    trainer.precision_plugin._after_closure(trainer.lightning_module, optimizer)


def _run_manual(trainer: Any, optimizer: Optimizer, batches: Batches) -> None:
    loop = trainer.fit_loop.epoch_loop
    with _without_updates(trainer, optimizer), contextlib.suppress(_ReachedError):
        for batch, number in batches:
            arguments = loop._build_kwargs(OrderedDict(), batch, number)
            trainer.strategy.training_step(*arguments.values())


@contextlib.contextmanager
def _without_updates(trainer: Any, wanted: Optimizer) -> Iterator[None]:
    """No optimizer makes an update, and that of the wanted one ends the run."""

    def step_without_update(optimizer: Optimizer) -> Callable[..., None]:
        @functools.wraps(optimizer.step)  # by whose attributes schedulers know it
        def step(closure: Callable[[], Any] | None = None, **_: Any) -> None:
            if closure is not None:
                closure()
            if optimizer is wanted:
                raise _ReachedError

        return step

    with contextlib.ExitStack() as swaps:
        for outer in trainer.strategy._lightning_optimizers:
            step = step_without_update(outer.optimizer)
            swaps.enter_context(swap_attributes(outer, step=step))
            swaps.enter_context(swap_attributes(outer.optimizer, step=step))
        yield


@contextlib.contextmanager
def _without_listeners(trainer: Any) -> Iterator[None]:
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop.automatic_optimization
    library = library_of(trainer)
    dummy = importlib.import_module(f"{library}.loggers.logger").DummyLogger
    profiler = importlib.import_module(f"{library}.profilers").PassThroughProfiler()
    loggers = [dummy() for _ in trainer.loggers]

    def log_nothing(*_: Any, **__: Any) -> None:
        """In the place of a function that logs."""

    with (
        swap_attributes(trainer, callbacks=[], _loggers=loggers, profiler=profiler),
        swap_attributes(
            module, log=log_nothing, log_dict=log_nothing, _current_fx_name="training_step"
        ),
        swap_attributes(loop, optim_progress=copy.deepcopy(loop.optim_progress)),
    ):
        yield


@contextlib.contextmanager
def swap_attributes(owner: Any, **values: Any) -> Iterator[None]:
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


def uncount_update(trainer: Any) -> None:
    """Let `global_step` be as before the update that is running, if Lightning counts it."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    if progress.total.ready == progress.total.completed + 1:
        progress.increment_by(-1)


class LogState:
    """What `self.log` has gathered before a step, to go back to it."""

    def __init__(self, trainer: Any) -> None:
        self._results: dict[str, Any] = trainer.fit_loop.epoch_loop._results
        # Values are replaced when they are updated, so the references are enough.
        self._kept = {name: dict(vars(metric)) for name, metric in self._results.items()}

    def put_back(self) -> None:
        """As if nothing had been logged since; nothing is shown or sent for this batch."""
        for name in [*self._results]:
            if name not in self._kept:
                del self._results[name]
            else:
                vars(self._results[name]).update(self._kept[name], _forward_cache=None)


def averages_of(trainer: Any) -> tuple[Any, ...]:
    """Averages of the weights that callbacks hold: models, and dicts of tensors."""

    def is_average(value: Any) -> bool:
        if value is trainer.lightning_module or value is trainer.strategy.model:
            return False
        tensors = list(value.parameters()) if isinstance(value, nn.Module) else []
        if isinstance(value, dict) and all(isinstance(each, Tensor) for each in value.values()):
            tensors = list(value.values())
        return bool(tensors) and all_finite(tensors)

    values = [value for callback in trainer.callbacks for value in vars(callback).values()]
    return tuple(value for value in values if is_average(value))


_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")
_joined: set[type] = set()


def join_trainers() -> Attachment:
    """Let each `fit` of the Trainers that are loaded lend its guard to who watches the process."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _lent_callback(self):
                return original(self, *args, **kwargs)

        return fit

    known = [getattr(sys.modules.get(name), "Trainer", None) for name in _LIBRARIES]
    new = [each for each in known if each is not None and each not in _joined]
    _joined.update(new)
    forget = Attachment(lambda: _joined.difference_update(new))
    return together(forget, *(wrapped(trainers, "fit", wrap) for trainers in new))


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
    if free_process_guard() is None or not is_alone(trainer):
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
