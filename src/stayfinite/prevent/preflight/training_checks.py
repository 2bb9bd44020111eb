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

from stayfinite.explain.clue import Context
from stayfinite.explain.rules import diagnose
from stayfinite.locate.origin import origin_of
from stayfinite.locate.provenance import Event
from stayfinite.prevent.init import InitProblem, check_init
from stayfinite.prevent.preflight.operator_checks import NOWHERE, Places
from stayfinite.prevent.preflight.range_tracer import HIGHEST, HalfRange, RangeTracer
from stayfinite.prevent.risks import Evidence, Level, Risk, risk_of
from stayfinite.records import NaNType

_GROWS, _TURNS = 1.2, 4  # of a recurrence
_LITTLE, _SOME = 2.0, 4.0  # doublings that are left in float16
# Their updates have about the size of the learning rate, whatever the gradient is.
_NORMALISED = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")
_LARGE_STEP, _HUGE_STEP = 1.0, 10.0
_FAR_FROM_NORM = 100.0
_LOSS_TIMES = 5.0
_DEEP = 20
_SMALL_EPS = 1e-7
_NAMED = 3


def present_risk(what: str, events: Iterable[Event], places: Places) -> Risk:
    """Something is not finite in the first steps; where it began, and why."""
    found = origin_of(events, folder=places.folder)
    said = f"{what} is not finite in the first steps"
    if found is None:
        fix = "Run the script under `stayfinite run`, which finds where it begins."
        return risk_of("high", "unknown", f"{said}.", NOWHERE, fix=fix, score=2.0)
    origin = found[0]
    why = diagnose(origin, Context())
    said, where = f"{said}: {why.why}", places.line_of(origin)
    return risk_of("high", why.cause, said, where, fix=why.fix, score=2.0)


def other_line_risks(recorder: RangeTracer, places: Places) -> list[Risk]:
    """Of everything that was recorded besides single operations."""
    risks = [(half.site, _half_risk(half)) for half in recorder.halves.values()]
    for event, reach in recorder.births:
        is_nan = event.nan_type is NaNType.NAN and event.phase == "forward"
        if is_nan and reach.learned and not reach.is_handled(within=3):
            what = (
                f"{event.op.split('.')[1]} gives NaN already, in a value that no loss uses yet; "
                "the first step that does is lost."
            )
            cause = "zero_times_inf" if event.op.startswith("aten.mul") else "inf_minus_inf"
            risks.append((event.site, risk_of("high", cause, what, score=1.0)))
    for loop in recorder.loops.values():
        turns, growth = len(loop.sizes), loop.growth
        if turns >= _TURNS and growth > _GROWS:
            what = (
                f"The same weights are applied {turns} times to their own output, which grows "
                f"{growth:.3g} times at each turn; a longer sequence overflows."
            )
            evidence: Evidence = {"growth": growth, "turns": turns, "size": loop.sizes[-1]}
            score = 1 - 1 / growth
            risk = risk_of("medium", "exploding_recurrence", what, score=score, evidence=evidence)
            risks.append((loop.site, risk))
    for site in recorder.twice.values():
        what = (
            "The gradient of this norm is differentiated again (create_graph=True); at a zero "
            "vector that is 0 / 0, though the gradient itself is not."
        )
        risks.append((site, risk_of("medium", "norm_grad_at_zero", what)))
    return [places.locate(risk, site) for site, risk in risks if risk is not None]


def _half_risk(half: HalfRange) -> Risk | None:
    """What is risky about the float16 values of one line."""
    if half.too_large is not None:
        return risk_of(
            level="medium",
            cause="mask_value_overflow",
            what=f"{half.too_large:.3g} is {'-' if half.too_large < 0 else ''}Inf in "
            "float16; a row that is masked everywhere is NaN then.",
            evidence={"constant": half.too_large},
        )
    if not math.isfinite(half.size) or half.headroom >= _SOME:
        return None
    return risk_of(
        level="medium" if half.headroom < _LITTLE else "low",
        cause="low_precision_overflow",
        what=f"The values here reach {half.size:.3g} in float16, which ends at "
        f"{HIGHEST:g}: {half.headroom:.1f} doublings are left.",
        score=1 - half.headroom / _SOME,
        evidence={"largest": half.size, "headroom_bits": half.headroom},
    )


def optimizer_risks(optimizer: Optimizer, where: str, *, is_scaled: bool = False) -> list[Risk]:
    """What is wrong with an optimizer before its next update.

    `is_scaled`: the gradients are still multiplied by a loss scale, so their size says nothing.
    """
    risks: list[Risk] = []
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    for number, group in enumerate(groups):
        rate = _number(group.get("lr"))
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            what = f"The learning rate of group {number} is {rate}: no update with it is finite."
            evidence: Evidence = {"group": number, "lr": str(rate)}
            risks.append(risk_of("high", "bad_lr_schedule", what, where, evidence))
        eps = _number(group.get("eps"))
        is_half = any(param.dtype is torch.float16 for param in group["params"])
        if eps is not None and is_half and not float(np.float16(eps)) > 0:
            what = (
                f"{kind} has eps={eps:g} for float16 weights, where it is 0: a weight without "
                "gradient is updated by 0 / 0."
            )
            evidence = {"group": number, "eps": eps}
            risks.append(risk_of("high", "optimizer_eps", what, where, evidence))
    if not is_scaled:
        risks += _step_risks(optimizer, where)
    if isinstance(optimizer, LBFGS) and groups[0].get("line_search_fn") is None:
        what = "LBFGS has no line search, so that nothing stops a step that makes the loss explode."
        risks.append(risk_of("medium", "lbfgs_no_line_search", what, where))
    return risks


def _step_risks(optimizer: Optimizer, where: str) -> Iterator[Risk]:
    """Updates that are larger than the weights themselves."""
    is_normalised = type(optimizer).__name__ in _NORMALISED
    ratios = [
        ratio
        for group in optimizer.param_groups
        if not isinstance(optimizer, LBFGS)
        for ratio in _relative_steps(group, is_normalised=is_normalised)
    ]
    worst, usual = max(ratios, default=0.0), statistics.median_low(ratios) if ratios else 0.0
    if worst < _LARGE_STEP:
        return
    is_lasting = usual >= _LARGE_STEP and is_normalised
    warms_up = any(_peak(group) > _rate(group) for group in optimizer.param_groups)
    size = f"{worst:.3g} times as large as the weights of a layer"
    if is_lasting:
        size = f"{usual:.3g} times as large as the weights of most layers"
    when = "where its warm-up ends" if warms_up else "for a start without warm-up"
    what = f"An update is about {size}; the learning rate is too high {when}."
    level: Level = "medium" if worst >= _HUGE_STEP or is_lasting else "low"
    yield risk_of(level, "lr_too_high", what, where, {"update_to_weight": worst})


def _relative_steps(group: dict[str, Any], *, is_normalised: bool) -> Iterator[float]:
    rate = _peak(group) if is_normalised else _rate(group)
    for param in group["params"] if math.isfinite(rate) else ():
        if param.grad is None or param.dim() < 2 or param.grad.is_sparse:
            continue
        weight, gradient = _rms(param), 1.0 if is_normalised else _rms(param.grad)
        if weight > 0 and math.isfinite(gradient):
            yield rate * gradient / weight


def _rate(group: dict[str, Any]) -> float:
    return _number(group.get("lr")) or 0.0


def _peak(group: dict[str, Any]) -> float:
    """The highest rate that a schedule has written down for the group."""
    return max(_number(group.get(key)) or 0.0 for key in ("lr", "initial_lr", "max_lr"))


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@dataclass(kw_only=True)
class Scaling:
    """What was seen of loss scaling in the first steps."""

    uses_half: bool = False
    scale: float | None = None
    largest_gradient: float = 0.0  # of a float16 weight
    scales_itself: bool = False
    backward_at: str = ""


def scaling_risks(scaling: Scaling) -> Iterator[Risk]:
    """What is wrong between float16 and loss scale."""
    where, size = scaling.backward_at, scaling.largest_gradient
    if scaling.uses_half and scaling.scale is None and not scaling.scales_itself:
        what = (
            "The backward pass runs in float16 without a loss scale; gradients below 6e-8 become 0."
        )
        fix = (
            "Scale the loss: `scaler = torch.amp.GradScaler(device)`, "
            "`scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`; "
            "or use bfloat16."
        )
        yield risk_of("medium", "low_precision_underflow", what, where, fix=fix)
    if scaling.scale is None and HIGHEST / 16 < size < math.inf:
        headroom = math.log2(HIGHEST / size)
        level: Level = "medium" if headroom < 2 else "low"
        what = (
            f"Gradients reach {size:.3g} in float16, which ends at {HIGHEST:g}: "
            f"{headroom:.1f} doublings are left for a larger loss, or for more passes that add up."
        )
        fix = (
            "Lower the loss scale, or divide each loss by the number of passes before "
            "`backward()`; best keep float32 weights under autocast."
        )
        evidence: Evidence = {"largest": size, "headroom_bits": headroom}
        yield risk_of(level, "grad_accumulation_overflow", what, where, evidence, fix=fix)


def clip_risks(norm: float, limit: float, where: str, *, is_scaled: bool) -> Iterator[Risk]:
    """What is wrong with a call of clip_grad_norm_.

    `is_scaled`: the gradients still have the loss scale in them.
    """
    evidence: Evidence = {"norm": norm, "max_norm": limit}
    if is_scaled:
        what = (
            "Gradients are clipped while they are still multiplied by the loss scale; "
            f"max_norm={limit:g} meets a norm of {norm:.3g}."
        )
        fix = "Unscale them first: `scaler.unscale_(optimizer)` before `clip_grad_norm_`."
        yield risk_of("medium", "loss_scale_overflow", what, where, evidence, fix=fix)
    elif 0 < norm < math.inf and 0 < limit < math.inf:
        if 1 / _FAR_FROM_NORM < norm / limit < _FAR_FROM_NORM:
            return
        meaning = "cuts every update down" if norm > limit else "never acts on gradients like these"
        what = f"Clipping to {limit:g} {meaning}: their norm is {norm:.3g}."
        fix = (
            "Set max_norm to a few times the usual norm, or let "
            "`stayfinite.AdaptiveClipper(model).clip()` find it."
        )
        yield risk_of("low", "lr_too_high", what, where, evidence, fix=fix)


@dataclass(kw_only=True)
class FirstLosses:
    """The losses that backward passes on one line began from, before the first update and after."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def rise(self) -> float:
        """How many times higher the worst is; 1 where they are not all positive."""
        if not self.before or not self.after or min(*self.before, *self.after) <= 0:
            return 1.0
        return max(self.after) / max(self.before)


def rising_risks(losses: dict[str, FirstLosses]) -> Iterator[Risk]:
    """The lines whose loss has jumped."""
    for where, seen in losses.items():
        if seen.rise > _LOSS_TIMES:
            before, after = max(seen.before), max(seen.after)
            what = (
                f"One update has brought the loss from {before:.3g} to {after:.3g}; the "
                "learning rate is too high for a start without warm-up."
            )
            score, evidence = 1 - 1 / seen.rise, Evidence(before=before, after=after)
            yield risk_of("medium", "lr_too_high", what, where, evidence, score=score)


def stack_risks(model: nn.Module) -> Iterator[Risk]:
    """What is risky about how the model is built."""
    name = type(model).__name__
    modules = dict(model.named_modules())
    norms = {name: each for name, each in modules.items() if "Norm" in type(each).__name__}
    layers = sum(isinstance(module, nn.Linear | _ConvNd) for module in modules.values())
    if layers >= _DEEP and not norms:
        what = (
            f"{layers} layers follow one another without any normalisation; a gain that is "
            "a little off at each of them is far off at the end."
        )
        fix = (
            "Put a normalisation between them, `nn.LayerNorm(width)` or `nn.BatchNorm2d(c)`, "
            "or residual connections that begin at 0."
        )
        yield risk_of("medium", "bad_init", what, name, {"layers": layers}, fix=fix)
    for path, norm in norms.items():
        eps: Any = getattr(norm, "eps", None)
        is_half = any(param.dtype is torch.float16 for param in norm.parameters(recurse=False))
        if is_half and isinstance(eps, float) and 0 <= eps < _SMALL_EPS:
            what = (
                f"eps={eps:g} is 0 in float16; where the variance is 0 too, only a kernel "
                "that computes in float32 is saved by it."
            )
            where = path or name
            yield risk_of("low", "low_precision_underflow", what, where, {"eps": eps})


_LEVELS: dict[str, tuple[Level, str]] = {
    "non_finite": ("high", "bad_init"),
    "uninitialised": ("high", "uninitialized_memory"),
    "too_large": ("medium", "bad_init"),
    "near_zero": ("low", "bad_init"),
    "zero": ("low", "bad_init"),
    "constant": ("low", "bad_init"),
    "dead_units": ("low", "bad_init"),
}


def weight_risks(model: nn.Module) -> Iterator[Risk]:
    """Every kind of problem with the weights of the model, and which of them have it."""
    by_kind: dict[str, list[InitProblem]] = {}
    for problem in check_init(model):
        by_kind.setdefault(problem.kind, []).append(problem)
    for kind, (first, *others) in by_kind.items():
        level, cause = _LEVELS[kind]
        what = f"{first.detail[0].upper()}{first.detail[1:]}"
        if others:
            names = ", ".join(problem.name for problem in others[:_NAMED])
            more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            what += f"; the same of {names}{more}"
        evidence: Evidence = {"tensors": 1 + len(others)}
        yield risk_of(level, cause, f"{what}.", first.name, evidence, fix=first.fix)
