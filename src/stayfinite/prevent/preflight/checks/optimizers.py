"""Optimizers: learning rates, epsilons, line searches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import LBFGS, Optimizer

from stayfinite.explain.causes import CAUSES
from stayfinite.prevent.risks import Level, Risk

# Their first update has the size of the learning rate, whatever the gradient is.
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
    worst = max(
        (step for group in optimizer.param_groups for step in _relative_steps(optimizer, group)),
        default=0.0,
    )
    if worst >= _LARGE_STEP:
        level: Level = "medium" if worst >= _HUGE_STEP else "low"
        what = (
            f"The first update is about {worst:.3g} times as large as the weights of a layer; "
            "the learning rate is too high for a start without warm-up."
        )
        yield _risk(level, "lr_too_high", what, where, update_to_weight=worst)


def _relative_steps(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[float]:
    rate = _number(group.get("lr"))
    if rate is None or not math.isfinite(rate) or isinstance(optimizer, LBFGS):
        return
    is_normalised = type(optimizer).__name__ in _NORMALISED
    for param in group["params"]:
        if param.grad is None or param.dim() < 2 or param.grad.is_sparse:
            continue
        weight, gradient = _rms(param), 1.0 if is_normalised else _rms(param.grad)
        if weight > 0 and math.isfinite(gradient):
            yield rate * gradient / weight


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
