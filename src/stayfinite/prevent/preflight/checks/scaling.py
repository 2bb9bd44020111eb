"""float16 and its loss scale: none at all, or one that clipping was not told of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from stayfinite.prevent.preflight.heights import HIGHEST
from stayfinite.prevent.risks import Risk

_TIMES = 100.0


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One call of clip_grad_norm_; `is_scaled`: the gradients still have the loss scale in them."""

    where: str
    max_norm: float
    norm: float
    is_scaled: bool


@dataclass(kw_only=True)
class Scaling:
    """What was seen of loss scaling in the first steps."""

    uses_half: bool = False
    scale: float | None = None
    largest_gradient: float = 0.0  # of a float16 weight
    scales_itself: bool = False
    backward_at: str = ""
    clips: list[Clip] = field(default_factory=list)


def scaling_risks(scaling: Scaling) -> list[Risk]:
    """What is wrong between float16, loss scale and clipping."""
    return [
        *_without_scale(scaling),
        *_high_gradients(scaling),
        *(risk for clip in scaling.clips for risk in _clips(clip)),
    ]


def _without_scale(scaling: Scaling) -> Iterator[Risk]:
    if scaling.uses_half and scaling.scale is None and not scaling.scales_itself:
        yield Risk(
            level="medium",
            cause="low_precision_underflow",
            what="The backward pass runs in float16 without a loss scale; gradients below 6e-8 "
            "become 0.",
            where=scaling.backward_at,
            fix="Scale the loss: `scaler = torch.amp.GradScaler(device)`, "
            "`scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`; "
            "or use bfloat16.",
        )


def _high_gradients(scaling: Scaling) -> Iterator[Risk]:
    size = scaling.largest_gradient
    if scaling.scale is None and HIGHEST / 16 < size < math.inf:
        headroom = math.log2(HIGHEST / size)
        yield Risk(
            level="medium" if headroom < 2 else "low",
            cause="grad_accumulation_overflow",
            what=f"Gradients reach {size:.3g} in float16, which ends at {HIGHEST:g}: "
            f"{headroom:.1f} doublings are left for a larger loss, or for more passes that add up.",
            where=scaling.backward_at,
            fix="Lower the loss scale, or divide each loss by the number of passes before "
            "`backward()`; best keep float32 weights under autocast.",
            evidence={"largest": size, "headroom_bits": headroom},
        )


def _clips(clip: Clip) -> Iterator[Risk]:
    if clip.is_scaled:
        yield Risk(
            level="medium",
            cause="loss_scale_overflow",
            what="Gradients are clipped while they are still multiplied by the loss scale; "
            f"max_norm={clip.max_norm:g} meets a norm of {clip.norm:.3g}.",
            where=clip.where,
            fix="Unscale them first: `scaler.unscale_(optimizer)` before `clip_grad_norm_`.",
            evidence={"norm": clip.norm, "max_norm": clip.max_norm},
        )
    elif math.isfinite(clip.norm) and 0 < clip.max_norm < math.inf and clip.norm > 0:
        yield from _threshold(clip, clip.norm / clip.max_norm)


def _threshold(clip: Clip, ratio: float) -> Iterator[Risk]:
    if 1 / _TIMES < ratio < _TIMES:
        return
    meaning = "cuts every update down" if ratio > 1 else "never acts on gradients like these"
    yield Risk(
        level="low",
        cause="lr_too_high",
        what=f"Clipping to {clip.max_norm:g} {meaning}: their norm is {clip.norm:.3g}.",
        where=clip.where,
        fix="Set max_norm to a few times the usual norm, or let "
        "`stayfinite.clip_gradients(parameters)` find it.",
        evidence={"norm": clip.norm, "max_norm": clip.max_norm},
    )
