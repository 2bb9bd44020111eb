"""Angles: acos and its like at the ends of their domain, atan2 at the origin."""

from __future__ import annotations

import math

from stayfinite.prevent.preflight.checks.claim import Check, Claim, is_concerned, named, number
from stayfinite.prevent.preflight.use import Use
from stayfinite.prevent.risks import Level


def leaves_its_domain(use: Use) -> Claim | None:
    """acos, asin, atanh, erfinv of what is not kept strictly between -1 and 1."""
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or not is_concerned(use, given):
        return None
    bounds = given.bounds
    is_inside = bounds.low > -1 and bounds.high < 1
    may_touch = use.name in ("acos", "asin") and not use.has_gradient
    if is_inside or (may_touch and bounds.low >= -1 and bounds.high <= 1):
        return None
    size = max(abs(seen.low), abs(seen.high))
    level: Level = "high" if size >= 1 else "medium"
    return Claim(
        level=level,
        cause="acos_domain",
        what=f"{use.name} gets {named(given)} that is not kept between -1 and 1; beyond it is NaN, "
        f"at the ends its gradient is Inf, and now it comes up to {number(size)}.",
        score=min(1.0, size),
        evidence={"largest": size, "margin": 1 - size},
    )


def below_one(use: Use) -> Claim | None:
    """acosh of what is not kept above 1."""
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or given.bounds.low > 1 or not is_concerned(use, given):
        return None
    return Claim(
        level="high" if seen.low <= 1 else "medium",
        cause="acos_domain",
        what=f"acosh gets {named(given)} that is not kept above 1; below it is NaN, at 1 its "
        f"gradient is Inf, and its smallest value now is {number(seen.low)}.",
        fix="Keep it above 1: `torch.acosh(x.clamp_min(1 + 1e-6))`.",
        evidence={"smallest": seen.low},
    )


def origin(use: Use) -> Claim | None:
    """atan2 with a gradient, where both arguments can be 0 at once."""
    y, x = use.reach(0), use.reach(1)
    if y is None or x is None or not use.has_gradient:
        return None
    if not (y.bounds.holds(0.0) and x.bounds.holds(0.0)) or y.guarded or x.guarded:
        return None
    smallest = [use.seen[i].smallest for i in (0, 1) if i in use.seen]
    size = max(smallest, default=math.inf)
    return Claim(
        level="high" if size == 0 else "medium",
        cause="atan2_grad_at_zero",
        what="atan2 gets two values that can both be 0, where its gradient is 0 / 0; their "
        f"smallest sizes now are {' and '.join(number(value) for value in smallest)}.",
        evidence={"smallest": size},
    )


CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (leaves_its_domain,)),
    "acosh": (below_one,),
    "atan2": (origin,),
}
