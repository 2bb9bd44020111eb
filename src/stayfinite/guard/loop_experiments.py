"""Experiments on the bad step of a running loop, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from stayfinite.explain.experiments import CannotReplayError, Change, Seen
from stayfinite.guard.conditions import Split, changed_conditions, terms_of
from stayfinite.guard.replay import samples_of, seen_of
from stayfinite.living import living
from stayfinite.records import Incident, Origin
from stayfinite.replay.moments import GONE

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard
    from stayfinite.guard.loop_replay import StepAgain


class LoopExperiments:
    """The step under changed conditions. The steps before it are over: they cannot be changed."""

    snapshots = steps = 0

    def __init__(self, guard: Guard, step: StepAgain, incident: Incident) -> None:
        self._guard, self._step = guard, step
        self._origin = incident.origin if incident.origin is not None else Origin(phase="forward")
        self._cause = incident.diagnosis.cause if incident.diagnosis else "unknown"
        batch = step.turn.batch
        self.split = None if batch is GONE else Split(batch)

    @property
    def rows(self) -> int:
        return 0 if self.split is None else self.split.rows

    @property
    def values(self) -> int:
        return 0 if self.split is None else self.split.values

    @property
    def terms(self) -> tuple[str, ...]:
        return terms_of(self._origin, self._guard.evidence.scaler)

    def run(self, change: Change) -> Seen:
        """Run the step with the change; everything is as before afterwards."""
        if change.is_compiled or change.steps or change.snapshot is not None:
            raise CannotReplayError("only this step can be run again, and under the tracer")
        instead = None
        if self.split is not None and (change.rows is not None or change.precision is not None):
            instead = (self._step.turn.batch, self.split.changed(change))
        elif change.rows is not None:
            raise CannotReplayError("the batch cannot be split")
        with changed_conditions(
            self._guard, change, cause=self._cause, origin=self._origin, modules=living(nn.Module)
        ):
            found = self._step.run(instead=instead)
        if found.incident is None and not found.came_to_end:
            raise CannotReplayError(found.reason or "it did not come to its end")
        return seen_of(found.incident, change)

    def samples(self) -> tuple[list[Any] | None, str]:
        """The dataset's numbers of the rows, if they are known, and its name."""
        if self.split is None:
            return None, ""
        deliveries = self._guard.past.tracing.deliveries
        return samples_of(deliveries.of(self._step.turn.batch), self.rows)
