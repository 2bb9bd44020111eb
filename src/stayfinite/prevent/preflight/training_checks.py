"""Checks of a training as a whole: values, precision, optimizers, layers and weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import LBFGS, Optimizer

from stayfinite.causes import CAUSES
from stayfinite.explain.clue import Context
from stayfinite.explain.rules import diagnose
from stayfinite.locate.origin import origin_of
from stayfinite.locate.provenance import Event
from stayfinite.prevent.init import InitProblem, check_init
from stayfinite.prevent.preflight.bounds import Reach
from stayfinite.prevent.preflight.claims import Claim, Scene, figure
from stayfinite.prevent.preflight.range_tracer import HIGHEST, Height, Loop, Recorder, handles
from stayfinite.prevent.risks import Level, Risk
from stayfinite.records import NaNType

_NOWHERE = "the first step"


def present_risk(what: str, events: Iterable[Event], scene: Scene) -> Risk:
    """Something is not finite in the first steps; where it began, and why."""
    found = origin_of(events, folder=scene.folder)
    said = f"{what} is not finite in the first steps"
    if found is None:
        fix = "Run the script under `stayfinite run`, which finds where it begins."
        return _present_risk(f"{said}.", _NOWHERE, "unknown", fix)
    origin = found[0]
    diagnosis = diagnose(origin, Context())
    return _present_risk(
        f"{said}: {diagnosis.why}", scene.line_of(origin), diagnosis.cause, diagnosis.fix
    )


def _present_risk(what: str, where: str, cause: str, fix: str) -> Risk:
    return Risk(level="high", cause=cause, what=what, where=where, fix=fix, score=2.0)


_GROWS = 1.2
_TURNS = 4


def other_line_risks(recorder: Recorder, scene: Scene) -> list[Risk]:
    """All of them, of everything that was recorded."""
    return [
        *_halves(recorder, scene),
        *_unused_nans(recorder, scene),
        *_loops(recorder, scene),
        *_second_derivatives(recorder, scene),
    ]


def _halves(recorder: Recorder, scene: Scene) -> Iterator[Risk]:
    for height in recorder.heights.by_place.values():
        claim = half_claim(height)
        if claim is not None:
            yield scene.risk(height.site, claim)


def _unused_nans(recorder: Recorder, scene: Scene) -> Iterator[Risk]:
    for event, reach in recorder.births:
        if _is_carried_along(event, reach):
            what = (
                f"{event.op.split('.')[1]} gives NaN already, in a value that no loss uses yet; "
                "the first step that does is lost."
            )
            cause = "zero_times_inf" if event.op.startswith("aten.mul") else "inf_minus_inf"
            yield scene.risk(event.site, Claim(level="high", cause=cause, what=what, score=1.0))


def _is_carried_along(event: Event, reach: Reach) -> bool:
    is_nan = event.nan_type is NaNType.NAN and event.phase == "forward"
    return is_nan and reach.learned and not any(handles(user) for user in reach.followers(3))


def _loops(recorder: Recorder, scene: Scene) -> Iterator[Risk]:
    for loop in recorder.loops.growing():
        if len(loop.sizes) >= _TURNS and loop.growth > _GROWS:
            yield scene.risk(loop.site, _loop_claim(loop))


def _loop_claim(loop: Loop) -> Claim:
    turns = len(loop.sizes)
    return Claim(
        level="medium",
        cause="exploding_recurrence",
        what=f"The same weights are applied {turns} times to their own output, which grows "
        f"{figure(loop.growth)} times at each turn; a longer sequence overflows.",
        score=1 - 1 / loop.growth,
        evidence={"growth": loop.growth, "turns": turns, "size": loop.sizes[-1]},
    )


def _second_derivatives(recorder: Recorder, scene: Scene) -> Iterator[Risk]:
    for site in recorder.twice.values():
        what = (
            "The gradient of this norm is differentiated again (create_graph=True); at a zero "
            "vector that is 0 / 0, though the gradient itself is not."
        )
        claim = Claim(level="medium", cause="norm_grad_at_zero", what=what)
        yield scene.risk(site, claim)


_LITTLE = 2.0  # doublings
_SOME = 4.0


def half_claim(height: Height) -> Claim | None:
    """What is risky about the float16 values of one line."""
    if height.too_large is not None:
        return Claim(
            level="medium",
            cause="mask_value_overflow",
            what=f"{figure(height.too_large)} is {'-' if height.too_large < 0 else ''}Inf in "
            "float16; a row that is masked everywhere is NaN then.",
            evidence={"constant": height.too_large},
        )
    if not math.isfinite(height.size) or height.headroom >= _SOME:
        return None
    level: Level = "medium" if height.headroom < _LITTLE else "low"
    return Claim(
        level=level,
        cause="low_precision_overflow",
        what=f"The values here reach {figure(height.size)} in float16, which ends at "
        f"{HIGHEST:g}: {height.headroom:.1f} doublings are left.",
        score=1 - height.headroom / _SOME,
        evidence={"largest": height.size, "headroom_bits": height.headroom},
    )


# Their updates have about the size of the learning rate, whatever the gradient is.
_NORMALISED = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")
_LARGE_STEP = 1.0
_HUGE_STEP = 10.0


def optimizer_risks(optimizer: Optimizer, where: str, *, is_scaled: bool = False) -> list[Risk]:
    """What is wrong with an optimizer before its next update.

    `is_scaled`: the gradients are still multiplied by a loss scale, so their size says nothing.
    """
    return [
        *_rates(optimizer, where),
        *_epsilons(optimizer, where),
        *(() if is_scaled else _steps(optimizer, where)),
        *_line_search(optimizer, where),
    ]


def _optimizer_risk(level: Level, cause: str, what: str, where: str, **evidence: Any) -> Risk:
    fix = CAUSES[cause].fix
    return Risk(level=level, cause=cause, what=what, where=where, fix=fix, evidence=evidence)


def _rates(optimizer: Optimizer, where: str) -> Iterator[Risk]:
    for number, group in enumerate(optimizer.param_groups):
        rate = _number(group.get("lr"))
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            what = f"The learning rate of group {number} is {rate}; the update spoils all weights."
            yield _optimizer_risk(
                "high", "bad_lr_schedule", what, where, group=number, lr=str(rate)
            )


def _epsilons(optimizer: Optimizer, where: str) -> Iterator[Risk]:
    for number, group in enumerate(optimizer.param_groups):
        eps = _number(group.get("eps"))
        halves = any(param.dtype is torch.float16 for param in group["params"])
        if eps is None or not halves or float(np.float16(eps)) > 0:
            continue
        kind = type(optimizer).__name__
        what = (
            f"{kind} has eps={eps:g} for float16 weights, where it is 0: a weight without gradient "
            "is updated by 0 / 0."
        )
        yield _optimizer_risk("high", "optimizer_eps", what, where, group=number, eps=eps)


def _steps(optimizer: Optimizer, where: str) -> Iterator[Risk]:
    """Updates that are larger than the weights themselves."""
    ratios = [r for group in optimizer.param_groups for r in _relative_steps(optimizer, group)]
    worst, usual = max(ratios, default=0.0), _median(ratios)
    is_lasting = usual >= _LARGE_STEP and _is_normalised(optimizer)
    if worst >= _LARGE_STEP:
        level: Level = "medium" if worst >= _HUGE_STEP or is_lasting else "low"
        size = f"{usual:.3g} times as large as the weights of most layers"
        size = size if is_lasting else f"{worst:.3g} times as large as the weights of a layer"
        what = f"An update is about {size}; the learning rate is too high{_for_what(optimizer)}."
        yield _optimizer_risk(level, "lr_too_high", what, where, update_to_weight=worst)


def _for_what(optimizer: Optimizer) -> str:
    warms_up = any(_peak(group) > _rate(group) for group in optimizer.param_groups)
    return " where its warm-up ends" if warms_up else " for a start without warm-up"


def _relative_steps(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[float]:
    is_normalised = _is_normalised(optimizer)
    rate = _peak(group) if is_normalised else _rate(group)
    if not math.isfinite(rate) or isinstance(optimizer, LBFGS):
        return
    for param in group["params"]:
        if param.grad is None or param.dim() < 2 or param.grad.is_sparse:
            continue
        weight, gradient = _rms(param), 1.0 if is_normalised else _rms(param.grad)
        if weight > 0 and math.isfinite(gradient):
            yield rate * gradient / weight


def _is_normalised(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ in _NORMALISED


def _rate(group: dict[str, Any]) -> float:
    return _number(group.get("lr")) or 0.0


def _peak(group: dict[str, Any]) -> float:
    """The highest rate that a schedule has written down for the group."""
    rates = (_number(group.get(key)) or 0.0 for key in ("initial_lr", "max_lr"))
    return max(_rate(group), *rates)


def _median(values: list[float]) -> float:
    return statistics.median_low(values) if values else 0.0


def _rms(tensor: torch.Tensor) -> float:
    values = tensor.detach().double()
    return float(values.square().mean().sqrt())


def _line_search(optimizer: Optimizer, where: str) -> Iterator[Risk]:
    if isinstance(optimizer, LBFGS) and optimizer.param_groups[0].get("line_search_fn") is None:
        what = "LBFGS has no line search, so that nothing stops a step that makes the loss explode."
        yield _optimizer_risk("medium", "lbfgs_no_line_search", what, where)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


_SCALE_TIMES = 100.0


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
    if 1 / _SCALE_TIMES < ratio < _SCALE_TIMES:
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


_LOSS_TIMES = 5.0


@dataclass(kw_only=True)
class Losses:
    """The losses that backward passes on one line began from, before the first update and after."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def rise(self) -> float:
        """How many times higher the worst is; 1 where they are not all positive."""
        both = self.before and self.after
        return max(self.after) / max(self.before) if both and self._are_positive else 1.0

    @property
    def _are_positive(self) -> bool:
        return min(*self.before, *self.after) > 0


def rising_risks(losses: dict[str, Losses]) -> list[Risk]:
    """The lines whose loss has jumped."""
    return [_loss_risk(where, seen) for where, seen in losses.items() if seen.rise > _LOSS_TIMES]


def _loss_risk(where: str, seen: Losses) -> Risk:
    before, after = max(seen.before), max(seen.after)
    return Risk(
        level="medium",
        cause="lr_too_high",
        what=f"One update has brought the loss from {before:.3g} to {after:.3g}; the learning rate "
        "is too high for a start without warm-up.",
        where=where,
        fix=CAUSES["lr_too_high"].fix,
        score=1 - 1 / seen.rise,
        evidence={"before": before, "after": after},
    )


_DEEP = 20
_SMALL_EPS = 1e-7


def stack_risks(model: nn.Module) -> list[Risk]:
    """What is risky about how the model is built."""
    return [*_without_norm(model), *_small_eps(model)]


def _without_norm(model: nn.Module) -> Iterator[Risk]:
    modules = list(model.modules())
    layers = sum(isinstance(module, nn.Linear | _ConvNd) for module in modules)
    if layers >= _DEEP and not any(_is_norm(module) for module in modules):
        yield Risk(
            level="medium",
            cause="bad_init",
            what=f"{layers} layers follow one another without any normalisation; a gain that is "
            "a little off at each of them is far off at the end.",
            where=type(model).__name__,
            fix="Put a normalisation between them, `nn.LayerNorm(width)` or `nn.BatchNorm2d(c)`, "
            "or residual connections that begin at 0.",
            evidence={"layers": layers},
        )


def _small_eps(model: nn.Module) -> Iterator[Risk]:
    for name, module in model.named_modules():
        eps: Any = getattr(module, "eps", None)
        dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
        if _is_norm(module) and torch.float16 in dtypes and _is_lost(eps):
            yield Risk(
                level="low",
                cause="low_precision_underflow",
                what=f"eps={eps:g} is 0 in float16; where the variance is 0 too, only a kernel "
                "that computes in float32 is saved by it.",
                where=name or type(model).__name__,
                fix=CAUSES["low_precision_underflow"].fix,
                evidence={"eps": eps},
            )


def _is_lost(eps: object) -> bool:
    return isinstance(eps, float) and 0 <= eps < _SMALL_EPS


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


_LEVELS: dict[str, tuple[Level, str]] = {
    "non_finite": ("high", "bad_init"),
    "uninitialised": ("high", "uninitialized_memory"),
    "too_large": ("medium", "bad_init"),
    "near_zero": ("low", "bad_init"),
    "zero": ("low", "bad_init"),
    "constant": ("low", "bad_init"),
    "dead_units": ("low", "bad_init"),
}
_NAMED = 3


def weight_risks(model: nn.Module) -> list[Risk]:
    """Every kind of problem with the weights of the model, and which of them have it."""
    by_kind: dict[str, list[InitProblem]] = {}
    for problem in check_init(model):
        by_kind.setdefault(problem.kind, []).append(problem)
    return [_weight_risk(kind, problems) for kind, problems in by_kind.items()]


def _weight_risk(kind: str, problems: list[InitProblem]) -> Risk:
    level, cause = _LEVELS[kind]
    first, *others = problems
    what = f"{first.detail[0].upper()}{first.detail[1:]}"
    if others:
        names = ", ".join(problem.name for problem in others[:_NAMED])
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        what += f"; the same of {names}{more}"
    return Risk(
        level=level,
        cause=cause,
        what=f"{what}.",
        where=first.name,
        fix=first.fix,
        evidence={"tensors": len(problems)},
    )
