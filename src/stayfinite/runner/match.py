"""What a second run says about the incident of the first."""

from __future__ import annotations

import dataclasses

from stayfinite.records import REPEATS, Diagnosis, Incident
from stayfinite.runner.words import one_line
from stayfinite.settings import ROUND


def is_same(first: Incident, second: Incident) -> bool:
    """Whether both runs went bad at the same place in training.

    Traced, parameters are looked at after every update, untraced once in a round.
    """
    return first.rank == second.rank and 0 <= first.step - _noticed(second) <= ROUND


def _noticed(incident: Incident) -> int:
    # A traced incident names the step of the birth, which may be long before.
    facts = incident.origin.facts if incident.origin else {}
    return int(facts.get("noticed_step", incident.step))


def is_foreign(incident: Incident | None) -> bool:
    """Whether the value was born before the tracer looked, so that an earlier start is needed."""
    if incident is None:
        return False
    return incident.origin is None or bool(incident.origin.facts.get("foreign"))


def confirmed(first: Incident, second: Incident) -> Incident:
    """The first run's incident with what the tracer saw in the second."""
    diagnosis = second.diagnosis or first.diagnosis
    if diagnosis is not None:
        diagnosis = dataclasses.replace(diagnosis, evidence=(*diagnosis.evidence, REPEATS))
    return dataclasses.replace(
        first,
        step=second.step,
        reports=second.reports or first.reports,
        origin=second.origin or first.origin,
        diagnosis=diagnosis,
    )


def unconfirmed(
    first: Incident, second: Incident | None, *, changed: str | None = None
) -> Incident:
    """The first run's incident, with the evidence that it does not come back.

    `changed` is what the first run did to a file that was there before it.
    """
    evidence = _evidence(second, changed)
    return dataclasses.replace(first, diagnosis=_doubted(first.diagnosis, evidence))


def _evidence(second: Incident | None, changed: str | None) -> str:
    what = "stayed finite" if second is None else f"went bad elsewhere ({one_line(second)})"
    if changed is not None:
        return f"Not repeated: a second run {what}. The first one {changed}, which may be why."
    return f"Not deterministic: a second run with the same generator states {what}."


def _doubted(diagnosis: Diagnosis | None, evidence: str) -> Diagnosis:
    if diagnosis is None:
        diagnosis = Diagnosis(
            cause="unknown",
            why="The run is not deterministic, so repeating it does not show the operation.",
            fix="Seed every generator, or run with --trace to see it the first time.",
        )
    return dataclasses.replace(
        diagnosis, confidence="possible", evidence=(*diagnosis.evidence, evidence)
    )
