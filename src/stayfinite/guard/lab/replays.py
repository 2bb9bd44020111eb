"""The bad step of a script under changed conditions: one child of the standing script for each."""

from __future__ import annotations

import time

from stayfinite.explain.experiments.findings import Finding, with_reason, with_samples
from stayfinite.explain.experiments.lab import Lab
from stayfinite.explain.experiments.replays import CannotReplayError, Change, Seen
from stayfinite.explain.experiments.verdict import experiment, judged
from stayfinite.guard.lab.forks import Answer, Forks, write
from stayfinite.guard.proving import seen_of
from stayfinite.records import Diagnosis, Incident, to_json


class ForkReplays:
    """Runs the step in children; the first of them tells what can be changed."""

    def __init__(
        self, here: Forks, earlier: Forks | None, incident: Incident, *, steps: int, seconds: float
    ) -> None:
        self._here, self._earlier = here, earlier
        self._incident = incident
        self.steps = 0 if earlier is None else steps
        self._end = time.monotonic() + seconds
        self.step = Answer()

    @property
    def rows(self) -> int:
        return self.step.rows

    @property
    def values(self) -> int:
        return self.step.values

    @property
    def snapshots(self) -> int:
        return 1 if self.steps else 0

    @property
    def terms(self) -> tuple[str, ...]:
        origin = self._incident.origin
        known = origin.facts.get("term", {}).get("terms", ()) if origin is not None else ()
        return tuple(name for name, _ in known)

    def run(self, change: Change) -> Seen:
        """Run the step in a child with the change."""
        if change.rows is not None and not self.rows:
            raise CannotReplayError("the batch cannot be split")
        forks = self._earlier if change.steps else self._here
        if forks is None:
            raise CannotReplayError("no earlier step was held")
        seconds = self._end - time.monotonic()
        answer = forks.ask(change, until=self.step.clock, seconds=seconds)
        if answer.problem is not None:
            raise CannotReplayError(answer.problem)
        if change == Change() and self.step.clock is None:
            self.step = answer
        return seen_of(answer.incident, change)


def write_diagnosis(
    here: Forks,
    earlier: Forks | None,
    incident: Incident,
    *,
    path: str,
    steps: int,
    seconds: float,
) -> None:
    """Make the experiments, and write the diagnosis that they allow."""
    replays = ForkReplays(here, earlier, incident, steps=steps, seconds=seconds)
    diagnosis = _diagnosis(replays, incident, seconds=seconds)
    write(path, to_json(diagnosis))


def _diagnosis(replays: ForkReplays, incident: Incident, *, seconds: float) -> Diagnosis:
    diagnosis, origin = incident.diagnosis, incident.origin
    assert diagnosis is not None
    assert origin is not None
    lab = Lab(replays, seconds=seconds)
    replays.run(Change())  # so that the step is known
    is_diverging = replays.step.is_diverging
    findings = experiment(lab, diagnosis, origin, steps=replays.steps, is_diverging=is_diverging)
    known = replays.step
    named: list[Finding] = [with_samples(each, known.indices, known.dataset) for each in findings]
    judgement = judged(diagnosis, origin, named, is_diverging=is_diverging)
    return with_reason(judgement, known.why_not)
