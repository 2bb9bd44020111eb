"""Masks that can cover a whole row, so that a softmax has nothing left."""

from __future__ import annotations

from stayfinite.prevent.preflight.checks.claim import Check, Claim
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.ranges.words import words
from stayfinite.prevent.preflight.use import Use

_MASKING = words("masked_fill where add index_put sub mul")


def covers_a_row(use: Use) -> Claim | None:
    """softmax and its like over rows in which a mask that depends on data leaves hardly anything.

    A position that every row keeps, as the first token of a causal mask, saves all rows.
    """
    given, facts = use.reach(0), use.facts
    if given is None or not facts or facts["has_anchor"]:
        return None
    mask = _mask_of(given)
    if mask is None and not facts["covered"]:
        return None
    left, rows = facts["least_left"], facts["rows"]
    return Claim(
        level="high" if not left else "medium" if left == 1 else "low",
        cause="softmax_all_masked",
        what=f"{use.name.strip('_')} runs over rows of which a mask of -Inf leaves as little as "
        f"{left} of all positions; no position is kept in all of the {rows} rows, so one can lose "
        "them all.",
        score=1 / (1 + left),
        evidence={"least_left": left, "rows": rows, "covered": facts["covered"]},
        of=mask,
    )


def _mask_of(given: Reach) -> Reach | None:
    """The operation that laid a mask on the scores, if the mask depends on data."""
    for back in given.ancestors(4):
        if back.op in _MASKING and any(_is_changing_mask(part) for part in back.made_from):
            return back
    return None


def _is_changing_mask(part: Reach) -> bool:
    return part.fed and not part.learned and not part.settled


CHECKS: dict[str, tuple[Check, ...]] = dict.fromkeys(
    ("_softmax", "_log_softmax", "logsumexp"), (covers_a_row,)
)
