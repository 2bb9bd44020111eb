"""All experiments on one step, and what they do to its diagnosis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stayfinite.explain.certainty import is_seen_in_values
from stayfinite.explain.experiments.batch import guilty_rows, guilty_values
from stayfinite.explain.experiments.findings import Finding
from stayfinite.explain.experiments.lab import Lab, OutOfTimeError
from stayfinite.explain.experiments.repeating import compiled, precise, repeated
from stayfinite.explain.experiments.replays import AS_IT_WAS, CannotReplayError
from stayfinite.explain.experiments.state import dynamics, guarded, terms, weights
from stayfinite.records import Diagnosis, Origin

_PRECISION = ("low_precision_overflow", "low_precision_underflow", "mask_value_overflow")
_LOW = ("float16", "bfloat16")
_DYNAMICS = ("lr_too_high", "exploding_recurrence", "unknown", "loss_of_extreme_logits")
_ROUNDS = 2  # with one, chance would be taken for proof once in thirty times
OUT_OF_TIME = "there was no time for more experiments"


class _Question(NamedTuple):
    diagnosis: Diagnosis
    origin: Origin
    is_diverging: bool


def experiment(
    lab: Lab, diagnosis: Diagnosis, origin: Origin, *, steps: int = 0, is_diverging: bool = False
) -> list[Finding]:
    """What there was time to find out, in the order in which it was done.

    Nothing is tried on a step that does not go bad the same way twice.
    """
    question = _Question(diagnosis, origin, is_diverging)
    first = _done(lab, "repeat", lambda: [repeated(lab)])
    if not first or first[-1].verdict != "deterministic":
        return first
    plan: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("guarded", lambda: _one(guarded(lab))),
        ("samples", lambda: _batch(lab)),
        ("precision", lambda: [] if is_diverging else precise(lab)),  # it only takes longer
        ("terms", lambda: _one(terms(lab))),
        ("weights", lambda: _one(weights(lab))),
        ("compiled", lambda: _one(compiled(lab))),
    ]
    if is_diverging or diagnosis.cause in _DYNAMICS:
        plan.append(("dynamics", lambda: dynamics(lab, steps=steps)))
    found = first
    for name, act in plan:
        more = [_confirmed(lab, each, question) for each in _done(lab, name, act)]
        found = [*found, *more]
        if more and more[-1].sentence == OUT_OF_TIME:
            break
    return found


def _confirmed(lab: Lab, finding: Finding, question: _Question) -> Finding:
    """A finding that proves must hold again: bad with the cause, finite without, every time."""
    if finding.removal is None or not _proves(finding, question):
        return finding
    try:
        for _ in range(_ROUNDS):
            if not _is_bad_again(lab) or not lab.is_finite(finding.removal, anew=True):
                said = f"{finding.sentence}, though not every time"
                return dataclasses.replace(finding, vanishes=False, sentence=said)
    except (OutOfTimeError, CannotReplayError):
        return dataclasses.replace(finding, vanishes=False)
    return finding


def _is_bad_again(lab: Lab) -> bool:
    before = lab.run(AS_IT_WAS)
    return lab.run(AS_IT_WAS, anew=True).is_like(before)


def judged(
    diagnosis: Diagnosis,
    origin: Origin,
    findings: Sequence[Finding],
    *,
    is_diverging: bool = False,
) -> Diagnosis:
    """The diagnosis with the evidence, and as sure as the findings allow.

    Where training was running away before, an operation that overflows is no cause.
    """
    question = _Question(diagnosis, origin, is_diverging)
    if not findings:
        return diagnosis
    said = [each.sentence for each in findings if each.sentence != OUT_OF_TIME]
    evidence = tuple(dict.fromkeys([*diagnosis.evidence, *(said or [OUT_OF_TIME])]))
    confidence = diagnosis.confidence
    if not any(each.experiment == "repeat" and each.reproduces for each in findings):
        confidence = "possible" if confidence == "possible" else "likely"
    elif any(_proves(each, question) for each in findings):
        confidence = "proven"
    elif any(_refutes(each, diagnosis) for each in findings):
        confidence = "possible"
    return dataclasses.replace(diagnosis, evidence=evidence, confidence=confidence)


def _proves(finding: Finding, question: _Question) -> bool:
    """Whether what was taken away is what the diagnosis names, and nothing else."""
    diagnosis, origin = question.diagnosis, question.origin
    if not finding.is_proof or not origin.exact:
        return False
    if question.is_diverging and finding.experiment != "samples":
        return False
    if finding.experiment == "guarded":
        return is_seen_in_values(diagnosis.cause, origin)
    if finding.experiment == "samples":
        return diagnosis.cause in ("bad_input_data", "bad_label") and origin.phase == "data"
    if finding.experiment == "float32":
        dtypes = {each.dtype for each in origin.outputs}
        return diagnosis.cause in _PRECISION and bool(dtypes) and dtypes <= set(_LOW)
    return False


def _refutes(finding: Finding, diagnosis: Diagnosis) -> bool:
    if finding.verdict != "innocent":
        return False
    if finding.experiment == "guarded":
        return True
    return finding.experiment == "float32" and diagnosis.cause in _PRECISION


def _batch(lab: Lab) -> list[Finding]:
    """The guilty rows, and of a single one the guilty value."""
    found = guilty_rows(lab)
    if found is None:
        return []
    if len(found.rows) != 1 or not found.vanishes:
        return [found]
    donor = next(row for row in range(lab.replays.rows) if row not in found.rows)
    try:
        return [found, *_one(guilty_values(lab, found.rows[0], donor))]
    except OutOfTimeError:
        return [found]


def _done(lab: Lab, name: str, act: Callable[[], list[Finding]]) -> list[Finding]:
    lab.doing = name
    try:
        return act()
    except OutOfTimeError:
        return [Finding(experiment=name, verdict="inconclusive", sentence=OUT_OF_TIME)]
    except CannotReplayError:
        return []


def _one(finding: Finding | None) -> list[Finding]:
    return [] if finding is None else [finding]
