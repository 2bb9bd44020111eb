"""Exponentials of what nobody bounds from above."""

from __future__ import annotations

import math

from stayfinite.prevent.preflight.checks.claim import (
    Check,
    Claim,
    is_concerned,
    named,
    number,
)
from stayfinite.prevent.preflight.ranges.operation import limits_of
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.ranges.seen import Seen
from stayfinite.prevent.preflight.use import Use
from stayfinite.prevent.risks import Level

_CLOSE = 0.5


def exp_overflows(use: Use) -> Claim | None:
    """exp and its like of the unbounded output of a layer."""
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or not is_concerned(use, given):
        return None
    limit = _limit(use)
    if given.bounds.high <= limit:
        return None
    level = _level(given, seen, limit)
    return Claim(
        level=level,
        cause="exp_overflow",
        what=f"{use.name} gets {named(given)} that nothing bounds; above {number(limit)} it is "
        f"Inf, and its largest argument now is {number(seen.high)}.",
        score=max(0.0, min(1.0, seen.high / limit)),
        evidence={"largest": seen.high, "limit": limit},
    )


def _limit(use: Use) -> float:
    """The argument above which the result is Inf."""
    limit = limits_of(use.dtype).overflow
    return limit / math.log(2) if use.name == "exp2" else limit


def _level(given: Reach, seen: Seen, limit: float) -> Level:
    if seen.high > limit:
        return "high"
    if seen.high > _CLOSE * limit:
        return "medium"
    if not given.learned or not given.fed:
        return "low"
    return "low" if given.open in ("parameter", "log", "data") else "medium"


CHECKS: dict[str, tuple[Check, ...]] = dict.fromkeys(
    ("exp", "exp2", "expm1", "sinh", "cosh"), (exp_overflows,)
)
