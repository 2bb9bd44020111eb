"""Rules for the update itself: learning rate, optimizer, clipping, loss scale."""

from __future__ import annotations

import math

from stayfinite.explain.clue import SMALLEST, Clue, diagnosis, largest, number, rule
from stayfinite.records import Diagnosis

_SCALES = ("div", "reciprocal", "mul", "linalg_vector_norm")
_DIVIDES = ("addcdiv", "div", "reciprocal", "rsqrt", "fused_adam", "fused_adamw")


def bad_rate(clue: Clue) -> Diagnosis | None:
    """A learning rate that is no learning rate."""
    rate = clue.optimizer.learning_rate
    if rate is None or clue.origin.phase not in ("optimizer", "forward") or 0 <= rate < math.inf:
        return None
    return diagnosis(
        "bad_lr_schedule",
        f"The learning rate is {rate}: the schedule computed it so.",
        "Look for a division by zero in the schedule (zero warm-up or total steps), and check "
        "math.isfinite(lr) where it is set.",
    )


def half_precision_eps(clue: Clue) -> Diagnosis | None:
    """Adam's eps rounds to 0 in float16: 0 / 0 for every weight without gradient."""
    facts = clue.optimizer
    if facts.eps is None or not _divides_by_zero(clue):
        return None
    if any(sign in clue.expression for sign in ("/", "div", "reciprocal", "rsqrt")):
        return None  # the division stands in the user's own line, not inside torch's optimizer
    dtype = clue.dtype
    if 0 < facts.eps < SMALLEST.get(dtype, 0.0):
        return diagnosis(
            "optimizer_eps",
            f"eps = {facts.eps:g} is 0 in {dtype}, so {facts.kind} divides 0 by 0 where the "
            "gradient is 0.",
            f"Keep float32 weights and use autocast, or give {facts.kind} eps=1e-4 in {dtype}.",
        )
    cause = "optimizer_eps" if 0 < facts.eps < 1e-12 else "division_by_zero_optimizer"
    enough = "1e-4" if dtype == "float16" else "1e-8"
    return diagnosis(
        cause,
        f"{facts.kind} divided by a second moment of 0 (eps = {facts.eps:g}).",
        f"Give {facts.kind} a larger eps: eps={enough} in {dtype}.",
    )


def _divides_by_zero(clue: Clue) -> bool:
    return clue.origin.phase == "optimizer" and clue.op in _DIVIDES and clue.has_zero


# A hand-written optimizer that divides by zero.
division_in_optimizer = rule(
    _divides_by_zero,
    "division_by_zero_optimizer",
    "The optimizer divided by zero in `{clue.expression}`.",
    "Keep that denominator away from 0: `x.clamp_min(1e-8)`, or take the other branch of the "
    "update where it is 0.",
)


def overflow_in_optimizer(clue: Clue) -> Diagnosis | None:
    """The update itself overflowed."""
    if clue.origin.phase != "optimizer":
        return None
    if clue.dtype == "float16":
        return diagnosis(
            "low_precision_overflow",
            f"The optimizer state is kept in float16 and passed 65504 (inputs up to "
            f"{number(clue.size)}).",
            "Keep float32 master weights and optimizer state (autocast instead of model.half()).",
        )
    rate = clue.optimizer.learning_rate
    return diagnosis(
        "lr_too_high",
        f"The update overflowed: gradients up to {number(clue.size)} at a learning rate of {rate}.",
        "Lower the learning rate, warm it up, and clip the gradients: "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).",
    )


def clipping(clue: Clue) -> Diagnosis | None:
    """clip_grad_norm_ with a norm that is not finite."""
    if clue.origin.phase != "forward":
        return None
    made = [op for item in clue.origin.inputs for op in clue.made_by(item.name)]
    by_hand = any(op.startswith("grad:") for op in made) and clue.op in _SCALES
    if "clip_grad" not in clue.inside and not by_hand:
        return None
    return diagnosis(
        "grad_clip_nan_norm",
        f"The gradients were finite; their norm in `{clue.expression}` was 0 or not finite, and "
        "scaling by it spoils them all.",
        "Use torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True), or add an eps to the "
        "norm: `max_norm / (norm + 1e-6)`.",
    )


def scale_collapse(clue: Clue) -> Diagnosis | None:
    """The loss scale fell to nothing and the gradients still overflow."""
    scale = clue.context.scale
    if clue.op.startswith("amp_foreach") and any(
        largest(item) > 1e30 or item.zero_count == item.numel for item in clue.origin.inputs
    ):
        return diagnosis(
            "loss_scale_collapse",
            "The loss scale has fallen so far that its reciprocal overflows while unscaling.",
            "Give the scaler a floor, and find what overflows at any scale.",
        )
    # What a forward pass makes without the scaler has nothing to do with the scale.
    is_scaled = clue.origin.phase != "forward" or "grad_scaler" in clue.inside
    if scale is None or not clue.context.scaler_skips or not is_scaled:
        return None
    if scale > 1.0:
        return diagnosis(
            "loss_scale_overflow",
            f"{clue.context.scaler_skips} updates in a row were skipped at scale {number(scale)}.",
            "Start with a smaller init_scale and a longer growth_interval, or use bfloat16.",
        )
    return diagnosis(
        "loss_scale_collapse",
        f"The gradients overflow {clue.dtype or 'float16'} even at a loss scale of "
        f"{number(scale)}, so every update is skipped.",
        f"It is not the scale: run `{clue.expression}` in float32 "
        "(torch.autocast(..., enabled=False)) or train in bfloat16.",
    )


# Adding up gradients passed the type's limit.
accumulation = rule(
    lambda clue: "AccumulateGrad" in (clue.origin.node or "") and clue.op == "add",
    "grad_accumulation_overflow",
    "Each gradient was finite; their sum passed the limit of {clue.dtype}.",
    "Divide the loss by the number of accumulation steps, and accumulate in float32.",
)


UPDATE_RULES = (
    bad_rate,
    half_precision_eps,
    division_in_optimizer,
    overflow_in_optimizer,
    clipping,
    scale_collapse,
    accumulation,
)
