"""Losses that have no value for some targets: all of them ignored, or too long for CTC."""

from __future__ import annotations

from stayfinite.prevent.preflight.checks.claim import Check, Claim
from stayfinite.prevent.preflight.use import Use

_UNLIKELY = 1e-5  # padding is ignored too, and there it is always so


def all_ignored(use: Use) -> Claim | None:
    """The mean of a cross-entropy over labels that can all be ignore_index."""
    facts = use.facts
    if not facts or facts["chance"] < _UNLIKELY:
        return None
    return Claim(
        level="medium" if facts["kept"] else "high",
        cause="bad_label",
        what=f"cross_entropy takes the mean over {facts['kept']} labels of {facts['labels']} and "
        "ignores the others; of a batch without any label left, the mean is 0 / 0.",
        fix="Leave out samples without a label, or divide yourself: `F.cross_entropy(..., "
        'reduction="sum") / (target != ignore_index).sum().clamp_min(1)`.',
        score=facts["chance"],
        evidence={"labels": facts["labels"], "kept": facts["kept"], "chance": facts["chance"]},
    )


def target_does_not_fit(use: Use) -> Claim | None:
    """A CTC loss whose inputs are too short for a target of the same length with repeats."""
    facts = use.facts
    if not facts or facts["zero_infinity"]:
        return None
    needed = 2 * facts["longest_target"] - 1
    if needed <= facts["shortest_input"]:
        return None
    return Claim(
        level="high" if facts["longest_target"] > facts["shortest_input"] else "medium",
        cause="ctc_infeasible",
        what=f"ctc_loss has inputs of {facts['shortest_input']} frames for targets of up to "
        f"{facts['longest_target']} labels; one whose labels all repeat needs {needed} frames, and "
        "its loss is Inf.",
        evidence={"frames": facts["shortest_input"], "needed": needed},
    )


CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), (all_ignored,)),
    "_ctc_loss": (target_does_not_fit,),
}
