"""A bad step of a loop that is not ours, run once more to see which operation made it bad."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stayfinite.detect.gradients import params_of, put_gradients
from stayfinite.detect.repeats import run_again
from stayfinite.explain.experiments import replays as experiments
from stayfinite.guard.job import Job, finding_of
from stayfinite.guard.proving import NO_BATCH, proven
from stayfinite.records import Diagnosis, Incident

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard

logger = logging.getLogger("stayfinite")
_MOST = 20
CLEAN_AGAIN = Diagnosis(
    cause="transient_fault",
    why="The same step, run again from the same state, was finite: it does not repeat.",
    fix="Look for a hardware fault or a non-deterministic operation if it happens again.",
    confidence="likely",
    evidence=("the step was replayed with the same batch, weights and random state",),
)


class CannotReplayError(Exception):
    """Raised by `again` where it finds that it cannot run this step; nothing more is said of it."""


class Replay:
    """Calls `again(batch)`, which runs the step under way up to its update, and may raise.

    It is given NO_BATCH for the batches that the step had, or, in experiments, others in the
    place of `batch()`; that is NO_BATCH where there are several. If it is not the whole step
    that is run, one that is finite says nothing.
    """

    def __init__(
        self,
        guard: Guard,
        again: Callable[[Any], Any],
        *,
        batch: Callable[[], Any] = lambda: NO_BATCH,
        is_whole: bool = True,
    ) -> None:
        self._guard, self._again, self._batch, self.is_whole = guard, again, batch, is_whole
        self._left = _MOST

    def located(self, job: Job, noticed: Incident) -> Incident:
        """The incident with origin and diagnosis; the state is that of the step's beginning."""
        if not self._left or (noticed.origin is not None and noticed.origin.exact):
            return noticed
        self._left -= 1
        found = None
        try:
            found = self.found(job)
        except CannotReplayError:
            return noticed
        except Exception:
            logger.warning(
                "a step could not be replayed; where it went bad is not known", exc_info=True
            )
            return noticed
        finally:
            job.undo()
        if found is None and not self.is_whole:
            return noticed
        if found is None:
            return dataclasses.replace(noticed, diagnosis=CLEAN_AGAIN)
        known = dataclasses.replace(noticed, origin=found.origin, diagnosis=found.diagnosis)
        return proven(self._guard, job, known, _Attempts(self, job), self._batch())

    def found(self, job: Job, batch: Any = NO_BATCH) -> Incident | None:
        """What is bad this time."""
        params = params_of(job.parts.optimizer)
        before, trouble = [(param, param.grad) for param in params], job.trouble
        job.trouble = None
        try:
            with run_again(), self._guard.traced():
                job.undo()
                self._again(batch)
                finding = finding_of(job, job.gradients())
                return self._guard.incident_now(finding, explain=True) if finding.named else None
        finally:
            job.trouble = trouble
            put_gradients(before)


class _Attempts:
    """The step that a framework replays, for experiments."""

    def __init__(self, replay: Replay, job: Job) -> None:
        self._replay, self._job = replay, job
        self.is_whole = replay.is_whole
        self.put_back = job.undo

    def run(self, batch: Any, *, traced: bool) -> Incident | None:
        if not traced:
            raise experiments.CannotReplayError("it is only run under the tracer")
        return self._replay.found(self._job, batch)

    def run_before(self, since: int) -> bool:
        raise experiments.CannotReplayError("the steps before it are not known")
