"""Divisions by what can be 0."""

from __future__ import annotations

import torch

from stayfinite.prevent.preflight.checks.claim import (
    NEAR,
    UNLIKELY,
    Check,
    Claim,
    comes_naturally,
    is_concerned,
    is_only_learned,
    named,
    nearness,
    number,
)
from stayfinite.prevent.preflight.ranges.bounds import INF
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.ranges.seen import Seen
from stayfinite.prevent.preflight.use import Use
from stayfinite.prevent.risks import Level

_SMALL_PARAMETER = 0.1  # a few updates can bring it to 0


def divides_by_zero(use: Use) -> Claim | None:
    """x / y, and 1 / y, where y is not kept away from 0."""
    index = 1 if use.name == "div" else 0
    by, seen = use.reach(index), use.seen.get(index)
    if by is None or seen is None or not use.dtype.is_floating_point:
        return None
    if not _can_be_zero(by) or not _matters(use, by, seen):
        return None
    if (use.inside or "").startswith("nn/"):
        return None  # torch sees to its own layers and losses
    if by.chance is not None and not seen.zeros:
        return _by_count(by, seen)
    level = _level(use, by, seen)
    if level is None:
        return None
    now = f"its smallest size now is {number(seen.smallest)}"
    now = "it is 0 in places now" if seen.zeros else now
    return Claim(
        level=level,
        cause=_cause(use, by),
        what=f"It divides by {named(by)} that can be 0, with no epsilon that counts; {now}.",
        score=nearness(seen.smallest, max(seen.typical, 1e-30)),
        evidence={"smallest": seen.smallest, "typical": seen.typical, "zeros": seen.zeros},
    )


def _can_be_zero(by: Reach) -> bool:
    return by.bounds.holds(0.0) or (by.is_raw and by.op == "data")


def _matters(use: Use, by: Reach, seen: Seen) -> bool:
    if by.frozen and not by.learned and seen.zeros:
        return True  # parameters that are not trained yet
    return is_concerned(use, by)


def _by_count(by: Reach, seen: Seen) -> Claim | None:
    chance = by.chance or 0.0
    if chance < UNLIKELY or by.has_been_read():
        return None
    return Claim(
        level="medium",
        cause="division_by_zero",
        what=f"It divides by the number of elements that a mask keeps, {number(seen.low)} now; a "
        "batch of which it keeps none gives 0 / 0.",
        fix="Count at least one: `total / mask.sum().clamp_min(1)`.",
        score=chance,
        evidence={"kept": seen.low, "chance_of_none": chance},
    )


def _level(use: Use, by: Reach, seen: Seen) -> Level | None:
    low, high = by.bounds.low, by.bounds.high
    if seen.zeros:
        return "high" if use.has_gradient or not by.frozen else "medium"
    if by.peaks and seen.low >= 0.99:
        return None  # a sum of exp(x - max(x)) holds a 1
    if low < 0 < high or not by.bounds.holds(0.0):
        return _level_of_crossing(by, seen)
    at = by.bounds.low_at if low == 0 else by.bounds.high_at
    if at == INF:
        return None
    if at:
        return "low" if is_only_learned(by) else "medium"
    if not by.fed:
        return "low"  # of weights alone
    return "medium" if by.learned or comes_naturally(by) else "low"


def _level_of_crossing(by: Reach, seen: Seen) -> Level:
    """For what is 0 only on its way from one side to the other."""
    if by.op == "parameter":
        return "medium" if seen.smallest < _SMALL_PARAMETER else "low"
    is_near = seen.elements - seen.bad > 1 and seen.closeness < NEAR
    return "medium" if is_near else "low"


def _cause(use: Use, by: Reach) -> str:
    inside = use.inside or ""
    if inside.startswith("distributions/"):
        return "zero_scale_distribution"
    if use.dtype is torch.float16 and by.op == "add":
        return "low_precision_underflow"  # the epsilon is 0 in this type
    if by.op == "linalg_vector_norm" and not by.fed:
        return "weight_norm_of_zero"
    if by.frozen and not by.learned and not by.fed:
        return "where_grad_trap"
    return "division_by_zero"


CHECKS: dict[str, tuple[Check, ...]] = dict.fromkeys(
    ("div", "reciprocal", "rsqrt"), (divides_by_zero,)
)
