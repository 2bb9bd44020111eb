"""Means of what may be empty, and spreads of what may be a single value."""

from __future__ import annotations

from stayfinite.prevent.preflight.checks.claim import UNLIKELY, Check, Claim
from stayfinite.prevent.preflight.use import Use

_SMALL = 32


def mean_of_nothing(use: Use) -> Claim | None:
    """mean over a selection that can be empty."""
    given = use.reach(0)
    if given is None or given.chance is None or given.has_been_read():
        return None
    if given.chance < UNLIKELY:
        return None
    seen = use.seen.get(0)
    kept = seen.elements if seen is not None else 0
    return Claim(
        level="medium" if kept else "high",
        cause="empty_reduction",
        what=f"mean runs over the elements that a mask selects, {kept} now; of a batch of which it "
        "selects none, the mean is NaN.",
        score=given.chance,
        evidence={"selected": kept, "chance_of_none": given.chance},
    )


def spread_of_one(use: Use) -> Claim | None:
    """std and var over the samples of a minibatch, which is NaN for a last one of one sample."""
    given = use.reach(0)
    if given is None or not given.varies or not use.facts:
        return None
    elements = use.facts["elements"]
    is_minibatch = use.facts["is_part"] or given.op in ("index", "index_select", "split")
    if elements > 1 and not (is_minibatch and use.facts["dims"] == 1):
        return None
    if elements > _SMALL:
        return None
    return Claim(
        level="high" if elements <= 1 else "medium",
        cause="var_of_single",
        what=f"{use.name} runs over the {elements} values of a minibatch, one for each sample; for "
        "a minibatch of one it is NaN.",
        fix="Leave out a last minibatch of one (`drop_last=True`), or take "
        "`x.std(correction=0)`, which is 0 there.",
        evidence={"elements": elements},
    )


CHECKS: dict[str, tuple[Check, ...]] = {
    "mean": (mean_of_nothing,),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), (spread_of_one,)),
}
