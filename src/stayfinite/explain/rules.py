"""From an Origin to a Diagnosis: rules are tried in order, the first answer wins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from stayfinite.explain.causes import CAUSES
from stayfinite.explain.clue import Clue
from stayfinite.explain.domain import DOMAIN_RULES
from stayfinite.explain.dynamics import DYNAMICS_RULES
from stayfinite.explain.gradients import GRADIENT_RULES
from stayfinite.explain.history import Context
from stayfinite.explain.precision import PRECISION_RULES
from stayfinite.explain.samples import named_evidence
from stayfinite.explain.sources import SOURCE_RULES
from stayfinite.explain.updates import UPDATE_RULES
from stayfinite.records import Diagnosis, Origin

Rule = Callable[[Clue], Diagnosis | None]

# From what is certain (nobody computed it) over what the operation itself shows
# to what only the history of the steps before can tell.
RULES: tuple[Rule, ...] = (
    *SOURCE_RULES,
    *UPDATE_RULES,
    *PRECISION_RULES,
    *GRADIENT_RULES,
    *DOMAIN_RULES,
    *DYNAMICS_RULES,
)


# How to trace it is for whoever can: a run says which command does.
_NOT_SEEN = (
    "The operation that made the value was not seen: this step was not traced.",
    "Trace the step, which shows the operation and its inputs.",
)


def diagnose(origin: Origin, context: Context) -> Diagnosis:
    """Why it happened; cause "unknown" with the evidence when no rule knows."""
    clue = Clue(origin, context)
    found = next((found for rule in RULES if (found := rule(clue)) is not None), unknown(clue))
    named = named_evidence(origin, found)
    return dataclasses.replace(found, evidence=(*found.evidence, *named)) if named else found


def unknown(clue: Clue) -> Diagnosis:
    cause = CAUSES["unknown"]
    inputs = [
        f"{item.name}: {item.dtype} {list(item.shape)}, from {item.min} to {item.max}"
        for item in clue.origin.inputs
    ]
    why, fix = cause.why, cause.fix
    if not clue.origin.exact:
        why, fix = _NOT_SEEN
    elif clue.expression:
        why = f"`{clue.expression}` gave a non-finite value, and no rule knows why."
    return Diagnosis(
        cause="unknown", why=why, fix=fix, confidence="possible", evidence=tuple(inputs)
    )
