"""Logarithms of what can be 0 or less."""

from __future__ import annotations

from stayfinite.prevent.preflight.checks.claim import (
    NEAR,
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
from stayfinite.prevent.preflight.use import Use
from stayfinite.prevent.risks import Level


def log_reaches_zero(use: Use) -> Claim | None:
    """log, log2, log10 of what is not kept above 0; log1p of what is not kept above -1."""
    given, seen = use.reach(0), use.seen.get(0)
    floor = -1.0 if use.name == "log1p" else 0.0
    if given is None or seen is None or not is_concerned(use, given):
        return None
    if given.bounds.low > floor and not (given.op == "data" and given.is_raw):
        return None
    level = _level(use, given, floor)
    if level is None:
        return None
    is_negative = given.bounds.low < floor and given.bounds.low_at < INF
    far = f"as low as {number(given.bounds.low)}" if given.bounds.low > -INF else "below it"
    reach = f"{number(floor)} or {far}" if is_negative else number(floor)
    return Claim(
        level=level,
        cause=_cause(use, given, is_negative),
        what=f"{use.name} gets {named(given)} that can be {reach}, and nothing keeps it away; "
        f"its smallest value now is {number(seen.low)}.",
        score=nearness(seen.low - floor, max(seen.typical, 1e-30)),
        evidence={"smallest": seen.low, "typical": seen.typical, "can_be": given.bounds.low},
    )


def _level(use: Use, given: Reach, floor: float) -> Level | None:
    seen = use.seen[0]
    if seen.elements and seen.low <= floor:
        return "high"
    if given.bounds.low_at == INF:
        return None
    if not given.learned:
        is_near = seen.low - floor < NEAR * seen.typical
        return "medium" if is_near or comes_naturally(given) or _is_noise(given) else "low"
    if given.bounds.low_at and is_only_learned(given):
        return "low"
    return "medium"


def _is_noise(given: Reach) -> bool:
    return any(back.op in ("rand", "rand_like", "uniform") for back in given.ancestors(8))


def _cause(use: Use, given: Reach, is_negative: bool) -> str:
    if _is_noise(given) and not given.learned:
        return "gumbel_log_zero"
    if (use.inside or "").startswith("distributions/"):
        return "support_boundary" if use.name == "log1p" else "zero_scale_distribution"
    return "log_of_negative" if is_negative else "log_of_zero"


def logit_reaches_its_ends(use: Use) -> Claim | None:
    """logit without eps of what can be exactly 0 or 1."""
    given = use.reach(0)
    eps = use.operands[1] if len(use.operands) > 1 else None
    if given is None or eps is not None or not is_concerned(use, given):
        return None
    bounds = given.bounds
    if bounds.low > 0 and bounds.high < 1:
        return None
    return Claim(
        level="medium",
        cause="log_of_zero",
        what=f"logit gets {named(given)} that can be exactly 0 or 1, where it is infinite.",
        fix="Keep the logits that the probability came from, or give `eps`: "
        "`torch.logit(p, eps=1e-6)`.",
        evidence={"can_be": bounds.low, "up_to": bounds.high},
    )


CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p"), (log_reaches_zero,)),
    "logit": (logit_reaches_its_ends,),
}
