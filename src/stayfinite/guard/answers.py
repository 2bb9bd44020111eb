"""Guard: the one place where detecting, locating, explaining and recovering meet.

What follows a bad step: stop, warn or recover.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.errors import ConfigError, TrainingAbortedError
from stayfinite.guard.evidence import (
    Finding,
    gradients_found,
    in_short,
    incident_of,
    parameters_found,
)
from stayfinite.guard.guard import MOST_INCIDENTS, ReportingWatcher
from stayfinite.guard.job import Job, finding_of, shared
from stayfinite.guard.step import Window
from stayfinite.living import leaves_of, one_look
from stayfinite.locate.clock import Tracing
from stayfinite.records import Aftermath, Incident, Outcome
from stayfinite.recover.advice import Recovery
from stayfinite.recover.config import RecoveryStrategy
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.settings import GuardSettings
from stayfinite.snapshot import RandomState
from stayfinite.training import Pairs, params_of, put_gradients

if TYPE_CHECKING:
    from stayfinite.guard.replay import Replay


_NO_VETO = Outcome(
    strategy="warn",
    detail="no torch optimizer makes this update, so it cannot be left out; the script goes on",
)
_TOO_LATE = "it was found when the script had ended, so nothing was undone"

Batch = TypeVar("Batch")
Result = TypeVar("Result")


class Guard(ReportingWatcher):
    """Watches training, and with on_nan="recover" answers a bad step as its jobs say.

    In a loop that is not ours a bad update is vetoed; `step` can also run it again, exactly.

    >>> Guard(GuardSettings(on_nan="warn")).incidents
    []
    """

    def __init__(
        self,
        settings: GuardSettings,
        *,
        on_incident: Callable[[Incident], None] | None = None,
        only: Optimizer | None = None,
    ) -> None:
        super().__init__(settings, on_incident=on_incident, only=only)
        self.jobs: dict[int, Job] = {}
        self._window: Window | None = None
        self.replay: Replay | None = None
        self.was_harmed = False
        self._afterwards = Afterwards(self._tracing)

    @property
    def manager(self) -> NaNRecoveryManager:
        """Counts, history and recommendations of the recoveries."""
        return self._sole_job().manager

    def add(self, job: Job, *, at_most: int | None = None) -> None:
        """Recover bad steps of this job from now on; with `at_most`, the oldest has to go."""
        self.jobs[id(job.parts.optimizer)] = job
        job.watch_beginnings(self.begin_step)
        if at_most is not None and len(self.jobs) > at_most:
            self.jobs.pop(next(iter(self.jobs))).close()

    def begin_step(self, job: Job) -> None:
        """A step begins: mark its beginning."""
        with self._aside:
            if not job.begin():
                self._check_parameters([job.parts.optimizer], everything=True)
                job.begin()

    def replay_with(self, replay: Replay, *, only: Job | None = None) -> None:
        """Find the operation of a bad step, or one of `only`, by running it anew."""
        owner = self if only is None else only
        owner.replay = replay

    def step(self, fn: Callable[[Batch], Result], batch: Batch) -> Result | None:
        """`fn(batch)`, or None when its update was bad and left out.

        `fn` does what a loop does for one batch, all updates included; with accumulation some
        calls update. It may be called again with the same batch, so what it needs must be in
        there, a counter too. A bad step is undone, traced and answered as configured. Raises
        TrainingAbortedError when nothing helps; the weights are those of the last good step.
        """
        if self._window is None:
            self._window = Window(self, self._sole_job())
        return cast("Result | None", self._window.step(fn, batch))

    def _sole_job(self) -> Job:
        if len(self.jobs) != 1:
            raise ConfigError(
                f"this guard watches {len(self.jobs)} optimizers; guard.step and guard.manager "
                "need one: make the guard with stayfinite.watch(model, optimizer)."
            )
        return next(iter(self.jobs.values()))

    def close(self) -> None:
        """Leave torch as it was; a step that was bad and unfinished is undone."""
        with contextlib.suppress(TrainingAbortedError), self._aside:
            for job in self.jobs.values():
                if job.trouble is not None:
                    job.undo()
                job.settle()
                is_over = self.stopped or self._last_look.is_over
                if self._attachment is not None and self.incidents and not is_over:
                    self._check_parameters([job.parts.optimizer], everything=True)
        super().close()
        for job in self.jobs.values():
            job.close()

    def end(self, modules: Mapping[str, nn.Module]) -> None:
        """The script is over: look once at its weights, which nothing can put back any more.

        `modules` are those that it has left behind, by the names of their variables.
        """
        look = self._last_look
        if self._attachment is None or look.is_over:
            return
        look.is_over = True
        with contextlib.suppress(TrainingAbortedError), self._aside:
            self._attachment.flush()
            for job in self.jobs.values():
                if job.trouble is not None:
                    job.undo()
                job.settle()
        if self.stopped or self.crashed:
            return
        with self._aside:
            for finding in look.take(modules):
                if not self.incidents:
                    self._found_at_end(finding)
            if self._losses.any_far_bad() and not self.incidents:
                self._found_at_end(Finding([("loss", torch.tensor(torch.nan))]))

    def _found_at_end(self, finding: Finding) -> None:
        finding = dataclasses.replace(finding, did=_TOO_LATE)
        self._record(self._incident(finding, strategy="none"))
        self.stopped = self.settings.on_nan == "stop"

    def aftermath(self) -> Aftermath:
        """How training stands; reads what is still on a device."""
        tally = self.evidence.worst_tally()
        return Aftermath(
            updates=tally.count,
            bad_updates=tally.bad,
            loss_before=_number(tally.loss_before),
            loss_after=_number(tally.loss),
            is_last_loss_bad=self._losses.is_last_bad(),
            bad_at_end=tuple(self._last_look.bad),
            unseen=self._last_look.unseen,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bad_loss(self, loss: Tensor) -> None:
        if self.settings.on_nan != "recover":
            super()._bad_loss(loss)
            return
        finding = Finding([("loss", loss)])
        leaves = leaves_of([loss])
        owners = [job for job in self.jobs.values() if job.owns(leaves)]
        for job in owners:
            if job.trouble is None:
                job.trouble = finding
                if self._window is not None:
                    self._window.saw(finding)
        if not owners and not self._window and not self._is_optimized(leaves):
            self._only_warn(finding)

    def _is_optimized(self, leaves: list[Tensor]) -> bool:
        """Whether an optimizer will be asked about these, though no job of ours has it."""
        ours = set(map(id, leaves))
        return any(
            id(param) in ours for each in self.evidence.optimizers() for param in params_of(each)
        )

    def _only_warn(self, finding: Finding) -> None:
        """There is no update that could be vetoed, so this is told, and nothing more."""
        if len(self.incidents) < MOST_INCIDENTS:
            incident = self._incident(finding, strategy="warn")
            told = any(each.outcome == _NO_VETO for each in self.incidents)
            done = incident.outcome if told else _NO_VETO
            self._record(dataclasses.replace(incident, outcome=done))

    def _before_backward(self, roots: Sequence[Tensor], gradients: Any) -> None:
        if self._window is None:
            for job in self.jobs.values():
                if job.trouble is not None:
                    with self._aside:
                        job.forget_trouble_if_gone()
        super()._before_backward(roots, gradients)

    def _verdict(
        self, optimizer: Optimizer, gradients: list[Tensor], on_device: bool
    ) -> Tensor | None:
        """Under DDP all ranks give one answer."""
        flag = super()._verdict(optimizer, gradients, on_device)
        job = self.jobs.get(id(optimizer))
        if job is None:
            return flag
        job.trouble = job.trouble or job.bad_rates()
        is_bad = job.trouble is not None or job.manager.batches_to_skip > 0
        is_bad = is_bad or (self._window is not None and self._window.vetoes_all)
        if job.is_distributed:
            is_bad = job.any_rank(is_bad or (flag is not None and bool(flag)))  # host sync
        return torch.tensor(True) if is_bad else flag

    def refused(self, optimizer: Optimizer, gradients: Pairs, *, late: bool) -> bool:
        """A bad update is at hand: true vetoes it."""
        job = self.jobs.get(id(optimizer))
        if self.settings.on_nan != "recover":
            return super().refused(optimizer, gradients, late=late)
        with self._aside:
            if self._window is not None and self._window.is_running:
                return self._window.refused(gradients)
            if job is None:
                self._notice(gradients_found(gradients, optimizer))
            elif job.trouble is None and job.manager.take_skipped_batch():
                job.undo()
            else:
                return self._answer(job, gradients)
        return True

    @one_look()
    def _answer(self, job: Job, gradients: Pairs) -> bool:
        """Recover in a loop that is not ours; whether the update is vetoed."""
        if self.mended_harm(job, was_counted=False):  # the update is still to come
            return True
        incident = self._incident(finding_of(job, gradients), strategy="recover")
        job.undo()
        if (replay := job.replay or self.replay) is not None:
            incident = replay.located(job, incident)
        incident = shared(job, incident)
        random = RandomState.capture()
        left = [(param, param.grad) for param, _ in gradients]
        put_gradients(gradients)
        recovery = job.respond(incident)
        random.restore()  # an older state would deliver the same batches once more
        self.conclude(job, incident, recovery)
        if recovery.strategy is RecoveryStrategy.CLIP_GRADIENTS:
            return False
        put_gradients(left)
        job.hold()
        self._afterwards.begin(incident)
        return True

    def conclude(self, job: Job, incident: Incident, recovery: Recovery) -> Incident:
        """Record the incident with what was done; raise if that was to give up."""
        outcome = Outcome(strategy=recovery.strategy.value, detail=recovery.detail)
        incident = dataclasses.replace(incident, outcome=outcome)
        self._record(incident)
        if job.any_rank(not recovery.succeeded):
            self.stopped = True
            what = in_short(incident)
            raise TrainingAbortedError(
                f"Training aborted due to NaN at step {incident.step}: {what}; {recovery.detail}",
                incident=incident,
            )
        return incident

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: Any) -> None:
        """A GradScaler skipped; with a bad loss it was not its scale that was at fault."""
        job = self.jobs.get(id(optimizer))
        if job is None or not job.any_rank(job.trouble is not None):
            super().skipped_by_scaler(optimizer, scaler=scaler)
            return
        with self._aside:
            self._was_skipped = True
            if self._window is not None and self._window.is_running:
                self._window.saw(finding_of(job, job.gradients()))
            else:
                self._answer_skip(job)

    def _hopeless(self, optimizer: Optimizer, pairs: Pairs) -> None:
        job = self.jobs.get(id(optimizer))
        if job is None:
            super()._hopeless(optimizer, pairs)
        elif self._window is None or not self._window.is_running:
            self._answer_skip(job)
        else:
            self._window.saw(finding_of(job, pairs))

    def _answer_skip(self, job: Job) -> None:
        """The scaler has skipped the update already, so there is nothing to clip."""
        gradients = job.gradients()
        put_gradients([(param, None) for param, _ in gradients])
        self._answer(job, gradients)

    def _harmed(self, finding: Finding) -> None:
        job = self.jobs.get(id(finding.optimizer))
        if job is None or self.settings.on_nan != "recover":
            super()._harmed(finding)
            return
        self.was_harmed = True
        incident = self._incident(finding, strategy="recover")
        random = RandomState.capture()
        done = job.roll_back() or job.initialise_anew()
        recovery = job.respond(incident)
        random.restore()
        has_loaded = recovery.checkpoint is not None
        succeeded = recovery.succeeded and (done is not None or has_loaded)
        then = recovery.detail
        if not recovery.succeeded and recovery.back_at is None and not has_loaded:
            then = "training stops here"  # at what was put back, not at the last good step
        detail = "; ".join(filter(None, (done, then)))
        if done is None and not has_loaded:
            detail = "there is no snapshot to go back to"
        recovery = dataclasses.replace(recovery, succeeded=succeeded, detail=detail)
        self.conclude(job, incident, recovery)
        if self._window is None:  # what the loop does after its update is taken back
            job.hold()

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        """An update was attempted."""
        window, job = self._window, self.jobs.get(id(optimizer))
        is_good = not vetoed and not self._was_skipped
        is_ours = job is not None and window is not None and window.is_running
        if is_ours and window is not None and window.is_repeated:
            window.attempted(is_good=is_good)
            self._was_skipped = False
            return
        self.was_harmed = False
        if job is not None:
            job.seen = self.evidence.seen(optimizer)
        super().stepped(optimizer, vetoed=vetoed)
        is_good = is_good and not self.was_harmed
        if is_ours and window is not None:
            window.attempted(is_good=is_good)
        elif job is not None:
            job.end(is_good=is_good)
        self._afterwards.stepped()

    def _look_after_update(self, optimizer: Optimizer) -> None:
        job = self.jobs.get(id(optimizer))
        if job is None or self.settings.on_nan != "recover":
            super()._look_after_update(optimizer)
            return
        if job.any_rank(not job.is_finite_after_update(self.evidence.due)):
            self._harmed(parameters_found(optimizer))
        elif self._tracing.is_on or self.evidence.statistics_are_due(optimizer):
            self._check_statistics(optimizer)

    def mended_harm(self, job: Job, *, was_counted: bool = True) -> bool:
        """Whether parameters were bad, on any rank; they have been put back then."""
        if not job.any_rank(not job.is_finite()):
            return False
        found = parameters_found(job.parts.optimizer)
        self._harmed(dataclasses.replace(found, is_after_update=was_counted))
        return True

    def incident_now(self, finding: Finding, *, explain: bool) -> Incident:
        """What was found in a step of ours; where and why only if it is being traced."""
        if explain:
            return self._incident(finding, strategy="recover")
        return incident_of(finding, self.evidence, strategy="recover")


def _number(loss: Any) -> float | None:
    """A loss that may still be on a device; None if there is none, or it is not finite."""
    if loss is None:
        return None
    value = float(loss)  # host sync
    return value if math.isfinite(value) else None


_STEPS = 3
_MOST_TIMES = 3


class Afterwards:
    """Switches the tracer on for some steps after an incident whose operation is not known."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._steps_left = 0
        self._times_left = _MOST_TIMES

    def begin(self, incident: Incident) -> None:
        known = incident.origin is not None and incident.origin.exact
        if not known and not self._tracing.is_on and self._times_left:
            self._times_left -= 1
            self._steps_left = _STEPS + 1  # this one is still to be counted
            self._tracing.switch_on()

    def stepped(self) -> None:
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._tracing.switch_off()
