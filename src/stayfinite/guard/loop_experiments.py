"""Experiments on the bad step of a running loop, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from stayfinite.explain.experiments import CannotReplayError, Change, Seen
from stayfinite.guard.conditions import changed_conditions, terms_of
from stayfinite.guard.replay import NO_BATCH, KnownStep, samples_of, seen_of
from stayfinite.living import living
from stayfinite.records import Incident
from stayfinite.replay.moments import GONE

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard
    from stayfinite.guard.loop_replay import StepAgain


class LoopExperiments(KnownStep):
    """The step under changed conditions. The steps before it are over: they cannot be changed."""

    steps = 0

    def __init__(self, guard: Guard, step: StepAgain, incident: Incident) -> None:
        batch, optimizer = step.turn.batch, step.finding.optimizer
        jobs = list(guard.jobs.values()) if optimizer is None else [guard.jobs.get(id(optimizer))]
        job = jobs[0] if len(jobs) == 1 else None
        super().__init__(guard, job, incident, NO_BATCH if batch is GONE else batch)
        self._step = step

    @property
    def terms(self) -> tuple[str, ...]:
        return terms_of(self._origin, self._guard.evidence.scaler)

    def run(self, change: Change) -> Seen:
        """Run the step with the change; everything is as before afterwards."""
        if change.is_compiled or change.steps:
            raise CannotReplayError("only this step can be run again, and under the tracer")
        instead = None
        if self.split is not None and (change.rows is not None or change.precision is not None):
            instead = (self._batch, self.split.changed(change))
        elif change.rows is not None:
            raise CannotReplayError("the batch cannot be split")
        weights = None if change.snapshot is None else self._earlier()[change.snapshot]
        with changed_conditions(
            self._guard, change, cause=self._cause, origin=self._origin, modules=living(nn.Module)
        ):
            found = self._step.run(instead=instead, weights=weights)
        if found.incident is None and not found.came_to_end:
            raise CannotReplayError(found.reason or "it did not finish")
        return seen_of(found.incident, change)

    def samples(self) -> tuple[list[Any] | None, str]:
        """The dataset's numbers of the rows, if they are known, and its name."""
        if self.split is None:
            return None, ""
        deliveries = self._guard.past.tracing.deliveries
        return samples_of(deliveries.of(self._batch), self.rows)
