"""Optimizers: learning rates, epsilons, line searches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import LBFGS, Optimizer

from stayfinite.explain.causes import CAUSES
from stayfinite.prevent.risks import Level, Risk

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


def _risk(level: Level, cause: str, what: str, where: str, **evidence: Any) -> Risk:
    fix = CAUSES[cause].fix
    return Risk(level=level, cause=cause, what=what, where=where, fix=fix, evidence=evidence)


def _rates(optimizer: Optimizer, where: str) -> Iterator[Risk]:
    for number, group in enumerate(optimizer.param_groups):
        rate = _number(group.get("lr"))
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            what = f"The learning rate of group {number} is {rate}; the update spoils all weights."
            yield _risk("high", "bad_lr_schedule", what, where, group=number, lr=str(rate))


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
        yield _risk("high", "optimizer_eps", what, where, group=number, eps=eps)


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
        yield _risk(level, "lr_too_high", what, where, update_to_weight=worst)


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
        yield _risk("medium", "lbfgs_no_line_search", what, where)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
