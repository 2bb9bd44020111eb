"""Square roots and powers: negative arguments, and gradients at 0."""

from __future__ import annotations

from stayfinite.prevent.preflight.checks.claim import (
    NEAR,
    Check,
    Claim,
    is_concerned,
    named,
    nearness,
    number,
)
from stayfinite.prevent.preflight.checks.divisions import divides_by_zero
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.ranges.seen import Seen
from stayfinite.prevent.preflight.use import Use
from stayfinite.prevent.risks import Level


def root_of_negative(use: Use) -> Claim | None:
    """sqrt of what can fall below 0, most often a difference that is 0 on paper."""
    return _of_negative(use, "sqrt_of_negative", "sqrt")


def root_at_zero(use: Use) -> Claim | None:
    """sqrt of what can be exactly 0, with a gradient."""
    return _gradient_at_zero(use, "sqrt_grad_at_zero", "sqrt")


def power_of_negative(use: Use) -> Claim | None:
    """A fractional power of what can be negative."""
    exponent = use.number(1)
    if exponent is None or exponent == int(exponent):
        return None
    return _of_negative(use, "pow_of_negative", f"pow(x, {number(exponent)})")


def power_at_zero(use: Use) -> Claim | None:
    """A power below 1 of what can be 0: its gradient is Inf there; below 0 it is Inf itself."""
    exponent = use.number(1)
    if exponent is None or exponent >= 1 or exponent == 0:
        return None
    if exponent < 0:
        return divides_by_zero(use)
    return _gradient_at_zero(use, "pow_grad_at_zero", f"pow(x, {number(exponent)})")


def learned_power(use: Use) -> Claim | None:
    """A power that is learned: its gradient has the log of the base."""
    base, exponent = use.reach(0), use.reach(1)
    if base is None or exponent is None or not exponent.learned or base.bounds.low > 0:
        return None
    cause = "pow_of_negative" if base.bounds.low < 0 else "pow_grad_at_zero"
    seen = use.seen.get(0)
    if seen is None or base.guarded:
        return None
    return Claim(
        level="high" if seen.low <= 0 else "medium",
        cause=cause,
        what=f"pow gets {named(base)} that can be {'negative' if base.bounds.low < 0 else '0'} and "
        f"an exponent that is learned, whose gradient has the log of it; its smallest value now is "
        f"{number(seen.low)}.",
        evidence={"smallest": seen.low, "typical": seen.typical},
    )


def _of_negative(use: Use, cause: str, name: str) -> Claim | None:
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or given.bounds.low >= 0 or not is_concerned(use, given):
        return None
    return Claim(
        level=_level_of_negative(given, seen),
        cause=cause,
        what=f"{name} gets {named(given)} that can be negative, where it is NaN; its smallest "
        f"value now is {number(seen.low)}.",
        score=nearness(seen.low, max(seen.typical, 1e-30)),
        evidence={"smallest": seen.low, "typical": seen.typical},
    )


def _level_of_negative(given: Reach, seen: Seen) -> Level:
    if seen.low < 0:
        return "high"
    is_near = seen.low <= NEAR * seen.typical
    return "medium" if is_near or given.op in ("sub", "rsub") else "low"


def _gradient_at_zero(use: Use, cause: str, name: str) -> Claim | None:
    given, seen = use.reach(0), use.seen.get(0)
    if given is None or seen is None or not use.has_gradient or not is_concerned(use, given):
        return None
    if given.bounds.low != 0 or not given.learned:
        return None
    at = given.bounds.low_at
    level: Level = "high" if seen.zeros else "low" if at else "medium"
    now = f"its smallest value now is {number(seen.low)}"
    return Claim(
        level=level,
        cause=cause,
        what=f"{name} gets {named(given)} that can be exactly 0, where its gradient is Inf; {now}.",
        score=nearness(seen.low, max(seen.typical, 1e-30)),
        evidence={"smallest": seen.low, "typical": seen.typical, "zeros": seen.zeros},
    )


CHECKS: dict[str, tuple[Check, ...]] = {
    "sqrt": (root_of_negative, root_at_zero),
    "pow": (power_of_negative, power_at_zero, learned_power),
}
