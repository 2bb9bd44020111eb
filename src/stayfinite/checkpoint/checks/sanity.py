"""What is wrong with a checkpoint in itself: values that no training can go on from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stayfinite.checkpoint.format.contents import Contents, ModuleRecord, OptimizerRecord, part_name
from stayfinite.checkpoint.format.held import Held, leaves
from stayfinite.checkpoint.problems import Problem, matches

# Squares by their nature: the next step takes their root.
SECOND_MOMENTS = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf"}
)
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_ABSURD_RATE = 1e3  # no update of a training that works is a thousand times its gradient
_SETTINGS = ("eps", "weight_decay", "momentum", "alpha", "dampening", "betas")
_OBSERVED = ("min_val", "max_val")


def own_problems(contents: Contents, *, nonfinite_ok: Sequence[str] = ()) -> Iterator[Problem]:
    """Everything that can be said without the objects it is meant for."""
    fine = (*nonfinite_ok, *contents.nonfinite_ok)
    for number, model in enumerate(contents.models):
        part = part_name("model", number, len(contents.models))
        yield from module_problems(model, part, nonfinite_ok=fine)
    for number, average in enumerate(contents.averages):
        part = part_name("ema", number, len(contents.averages))
        yield from _average_problems(average, part, fine)
    for number, optimizer in enumerate(contents.optimizers):
        part = part_name("optimizer", number, len(contents.optimizers))
        yield from _optimizer_problems(optimizer, part)
    for number, scheduler in enumerate(contents.schedulers):
        part = part_name("scheduler", number, len(contents.schedulers))
        yield from _scheduler_problems(scheduler, part)
    if isinstance(contents.scaler, dict):
        yield from _scaler_problems(contents.scaler)


def module_problems(
    record: ModuleRecord, part: str, *, nonfinite_ok: Sequence[str] = ()
) -> Iterator[Problem]:
    """Bad values among the tensors of a model."""
    for name, held in record.tensors.items():
        key = f"{part}.{name}"
        kind = record.kinds.get(name)
        if not matches(name, nonfinite_ok) and not _is_fine(name, kind, held):
            yield _nonfinite(key, held)
        if name.rpartition(".")[2] == "running_var":
            yield from _variance_problems(key, held)


def _is_fine(name: str, kind: str | None, held: Held) -> bool:
    """Whether all is finite, or non-finite on purpose: a mask, or an observer that saw nothing."""
    tally = held.tally
    if tally.is_finite:
        return True
    if tally.has_nan or kind == "parameter" or "running_" in name:
        return False
    if name.endswith(_OBSERVED):
        return True
    if held.numel < 2:
        return False
    if kind is None:  # it may be a weight: only 0 beside Inf is surely a mask
        return tally.low == tally.high == 0
    return tally.low == tally.high or not tally.has_pos_inf


def _nonfinite(key: str, held: Held) -> Problem:
    count = f"of shape {list(held.shape)}" if held.shape else "a single value"
    return Problem(kind="nonfinite", key=key, message=f"holds {held.tally.words} ({count}).")


def _variance_problems(key: str, held: Held) -> Iterator[Problem]:
    tally = held.tally
    if not tally.has_finite:
        return
    if tally.low < 0:
        message = f"a variance is negative ({tally.low:.3g}): its square root is NaN."
        yield Problem(kind="variance", key=key, message=message)
    elif tally.high == 0:
        message = "every variance is 0: outputs are multiplied by 1/sqrt(eps)."
        yield Problem(kind="variance", key=key, message=message)
    elif tally.low == 0:
        message = "a variance is 0: that channel was constant, and 1/sqrt(eps) scales it."
        yield Problem(kind="variance", key=key, message=message, is_error=False)


def _average_problems(average: Any, part: str, fine: Sequence[str]) -> Iterator[Problem]:
    if isinstance(average, ModuleRecord):
        yield from module_problems(average, part, nonfinite_ok=fine)
        return
    for held in leaves(average):
        if not held.tally.is_finite and not matches(held.key, fine):
            yield _nonfinite(held.key, held)


def _optimizer_problems(record: OptimizerRecord, part: str) -> Iterator[Problem]:
    for number, group in enumerate(record.state_dict.get("param_groups", ())):
        yield from _group_problems(group, f"{part}.param_groups.{number}")
    names = record.names or ()
    for index, state in record.state_dict.get("state", {}).items():
        known = isinstance(index, int) and index < len(names)
        name = (names[index] if known else None) or index
        yield from _state_problems(state, f"{part}.state.{name}")


def _group_problems(group: Mapping[str, Any], part: str) -> Iterator[Problem]:
    for name in _RATES:
        yield from _rate_problems(numbers(group.get(name)), f"{part}.{name}")
    for name in _SETTINGS:
        if not all(map(math.isfinite, numbers(group.get(name)))):
            message = f"is {group[name]}, which is not finite."
            yield Problem(kind="optimizer", key=f"{part}.{name}", message=message)


def _rate_problems(rates: Sequence[float], key: str) -> Iterator[Problem]:
    for rate in dict.fromkeys(rates):
        if not math.isfinite(rate) or rate < 0:
            message = f"the learning rate is {rate}; it must be finite and not negative."
            yield Problem(kind="learning_rate", key=key, message=message)
        elif rate > _ABSURD_RATE:
            message = (
                f"the learning rate is {rate:.3g}, which is absurd: training that goes on with it "
                "diverges. Set it anew after loading."
            )
            yield Problem(kind="learning_rate", key=key, message=message, is_error=False)


def numbers(value: Any) -> list[float]:
    """The numbers in a setting: one, several, or a tensor with one of them."""
    if isinstance(value, Held):
        return _extremes(value)
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [float(value)] if is_number else []


def _extremes(held: Held) -> list[float]:
    tally = held.tally
    if not tally.is_finite:
        return [math.nan]
    return [tally.low, tally.high] if tally.has_finite else []


def _state_problems(state: Any, part: str) -> Iterator[Problem]:
    for name, value in state.items() if isinstance(state, dict) else ():
        key = f"{part}.{name}"
        for held in leaves(value):
            if not held.tally.is_finite:
                yield _nonfinite(key, held)
            elif name in SECOND_MOMENTS and held.tally.has_finite and held.tally.low < 0:
                message = f"a mean of squares is negative ({held.tally.low:.3g}): its root is NaN."
                yield Problem(kind="optimizer", key=key, message=message)
        if any(not math.isfinite(n) or (name == "step" and n < 0) for n in _plain_numbers(value)):
            yield Problem(kind="optimizer", key=key, message=f"is {value}.")


def _plain_numbers(value: Any) -> list[float]:
    return [] if isinstance(value, Held) else numbers(value)


def _scheduler_problems(state: Any, part: str) -> Iterator[Problem]:
    for name in ("base_lrs", "_last_lr", "max_lrs", "min_lrs"):
        rates = numbers(state.get(name)) if isinstance(state, dict) else []
        yield from _rate_problems(rates, f"{part}.{name}")


def _scaler_problems(state: Mapping[str, Any]) -> Iterator[Problem]:
    for scale in numbers(state.get("scale")):
        if not math.isfinite(scale) or scale <= 0:
            message = f"the loss scale is {scale}; it must be finite and above 0."
            yield Problem(kind="scaler", key="scaler.scale", message=message)
