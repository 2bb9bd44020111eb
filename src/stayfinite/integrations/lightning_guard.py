"""A guard over the optimizers of one trainer, whose steps begin and end with batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from stayfinite.detect.gradients import Pairs, params_of
from stayfinite.detect.scan import all_finite
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.guard.post import WithoutSnapshots
from stayfinite.guard.proving import NO_BATCH
from stayfinite.guard.replay import CannotReplayError, Replay
from stayfinite.integrations.lightning_again import can_run_again, run_again
from stayfinite.integrations.lightning_books import LateAverages, Logged, averages_of, uncount
from stayfinite.records import Incident
from stayfinite.recover.config import RecoveryConfig
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.settings import GuardSettings

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
        self._trainer = trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._is_manual = not trainer.lightning_module.automatic_optimization
        self._late_averages = LateAverages(trainer.lightning_module)
        self._logged: Logged | None = None
        self._answered: Job | None = None
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
            self._logged = Logged(self._trainer)
        for job in jobs:
            self.begin_step(job)
            job.batches.append((batch, number))

    def end_batch(self) -> None:
        """A batch is over: if its updates were left out, so is all that followed them."""
        for job in self._own_jobs():
            job.settle()
            if not (self._is_manual or job.has_stepped or self._loop._should_accumulate()):
                job.drop()  # training_step has returned None
        if self._left_out and not self._is_manual and self._loop._num_ready_batches_reached():
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

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        """An update was attempted."""
        with self._inside_of_update():
            super().stepped(optimizer, vetoed=vetoed)
        job = self.jobs.get(id(optimizer))
        if isinstance(job, LightningJob):
            with self._aside:
                if vetoed or self.was_harmed or self._answered is job:
                    self._leave_out(job)
                else:
                    self._good += 1
                if self._is_manual:
                    job.begin_again()

    def _leave_out(self, job: LightningJob) -> None:
        self._answered = None
        self._left_out += 1
        job.hold()
        self._late_averages.hold()
        uncount(self._trainer)
        if not self._is_manual:
            self._strike()

    def refused(self, optimizer: Optimizer, gradients: Pairs, *, late: bool) -> bool:
        """A bad update is at hand: true vetoes it."""
        with self._inside_of_step(optimizer):
            return super().refused(optimizer, gradients, late=late)

    def _answer_skip(self, job: Job) -> None:
        with self._inside_of_step(job.parts.optimizer):
            super()._answer_skip(job)

    def _answer(self, job: Job, gradients: Pairs) -> bool:
        self._answered = job
        if not all_finite(params_of(job.parts.optimizer)):
            job.undo()  # the state is put back from a snapshot, but not the random numbers
        is_left_out = super()._answer(job, gradients)
        if not is_left_out:
            self._answered = None
        return is_left_out

    def _record(self, incident: Incident) -> None:
        if incident.outcome is not None:
            where = f"epoch {self._trainer.current_epoch}, batch {self._loop.batch_idx}"
            detail = f"{incident.outcome.detail} ({where})"
            outcome = dataclasses.replace(incident.outcome, detail=detail)
            incident = dataclasses.replace(incident, outcome=outcome)
        super()._record(incident)

    def _own_jobs(self) -> list[LightningJob]:
        return [job for job in self.jobs.values() if isinstance(job, LightningJob)]

    def _batch(self) -> Any:
        job = self._answered
        if not isinstance(job, LightningJob) or len(job.batches) != 1:
            return NO_BATCH
        return job.batches[0][0]

    def _again(self, batch: Any) -> None:
        job = self._answered
        if not isinstance(job, LightningJob) or not job.batches or not can_run_again(self._trainer):
            raise CannotReplayError("its batches are not known")
        others = [other.parts.state() for other in self.jobs.values() if other is not job]
        kept = [(state, state.capture(parts=("param_groups", "scheduler"))) for state in others]
        try:
            batches = list(job.batches)
            if batch is not NO_BATCH:
                batches = [(batch, batches[0][1])]
            run_again(self._trainer, job.parts.optimizer, batches)
        finally:
            for state, snapshot in kept:
                state.restore(snapshot)

    @contextlib.contextmanager
    def _inside_of_step(self, optimizer: Optimizer) -> Iterator[None]:
        """A time in which state is undone while the module's own hook is still running.

        The name of that hook stays. In manual optimization it has more to do, so gradients of
        other optimizers stay as well, and parameters that are switched off for a while.
        """
        module = self._trainer.lightning_module
        names = ["_current_fx_name", *["_param_requires_grad_state"] * self._is_manual]
        kept = {name: vars(module)[name] for name in names if name in vars(module)}
        params = list(module.parameters()) if self._is_manual else []
        flags = [param.requires_grad for param in params]
        gradients = _gradients(params, but=optimizer)
        try:
            with self._inside_of_update():
                yield
        finally:
            vars(module).update(kept)
            for param, flag in zip(params, flags, strict=True):
                param.requires_grad = flag
            _put_back(gradients)

    @contextlib.contextmanager
    def _inside_of_update(self) -> Iterator[None]:
        """A time in which state is put back while the scaler is still busy with the update."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
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
