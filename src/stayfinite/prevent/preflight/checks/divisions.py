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

_FEW = 2  # a count this low in some row may well be 0 in another


def divides_by_zero(use: Use) -> Claim | None:
    """x / y, and 1 / y, where y is not kept away from 0."""
    index = 1 if use.name == "div" else 0
    by, seen = use.reach(index), use.seen.get(index)
    if by is None or seen is None or not use.dtype.is_floating_point:
        return None
    if not by.bounds.holds(0.0) or not _matters(use, by, seen):
        return None
    if by.chance is not None and not seen.zeros:
        return _by_count(by, seen)
    level = _level(use, by, seen)
    if level is None:
        return None
    now = (
        "it is 0 in places now"
        if seen.zeros
        else f"its smallest size now is {number(seen.smallest)}"
    )
    return Claim(
        level=level,
        cause=_cause(use, by),
        what=f"It divides by {named(by)} that can be 0, with no epsilon that counts; {now}.",
        score=nearness(seen.smallest, max(seen.typical, 1e-30)),
        evidence={"smallest": seen.smallest, "typical": seen.typical, "zeros": seen.zeros},
    )


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
        what=f"It divides by the number of elements that a mask keeps, {number(seen.low)} now; by "
        f"this batch, none are kept in about {number(chance)} of the batches.",
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
    if low < 0 < high:
        is_near = seen.elements - seen.bad > 1 and seen.closeness < NEAR
        return "medium" if is_near and by.learned else "low"
    at = by.bounds.low_at if low == 0 else by.bounds.high_at
    if at == INF:
        return None
    if at:
        return "low" if is_only_learned(by) else "medium"
    if _counts(by) and seen.low > _FEW:
        return "low"
    return "medium" if by.learned or comes_naturally(by) else "low"


def _counts(by: Reach) -> bool:
    """Whether it counts, per row, what a mask keeps."""
    return any(
        back.op == "sum" and not back.learned and back.made_from and _is_mask(back.made_from[0])
        for back in by.ancestors(3)
    )


def _is_mask(reach: Reach) -> bool:
    return reach.bounds.low == 0 and reach.bounds.high == 1


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
