"""The loss scale, whoever keeps it."""

from __future__ import annotations

import math
from typing import Any

from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

FLOOR = 1.0
"""Below a scale of 1 the loss would be made smaller, which no overflow needs."""


def current_scale(scaler: Any) -> float | None:
    """The scale of an enabled scaler; None without one."""
    if scaler is None or not callable(getattr(scaler, "get_scale", None)):
        return None
    is_enabled = getattr(scaler, "is_enabled", None)
    if callable(is_enabled) and not is_enabled():
        return None
    return float(scaler.get_scale())  # host sync


def floor_of(scaler: Any) -> float:
    """The least scale it allows; FLOOR where it has no opinion."""
    given = getattr(scaler, "min_scale", None)
    return float(given) if isinstance(given, (int, float)) and given > 0 else FLOOR


def set_scale(scaler: Any, value: float) -> None:
    """Give the scaler a new scale, and let it wait as long as after an overflow to raise it."""
    if not isinstance(scaler, GradScaler):
        scaler.update(value)
    elif scaler._scale is None:  # nothing has been scaled yet
        scaler._init_scale = value
    else:
        # update(value) would forget which optimizers are unscaled, in the middle of a step.
        scaler._scale.fill_(value)
        if scaler._growth_tracker is not None:
            scaler._growth_tracker.zero_()


def gradient_scale(scaler: Any, optimizer: Optimizer) -> float:
    """What the optimizer's gradients are multiplied with now: 1 once they are unscaled."""
    scale = current_scale(scaler)
    if scale is None or not isinstance(scaler, GradScaler):
        return 1.0
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return scale if stage is OptState.READY and math.isfinite(scale) else 1.0


def forget_found_inf(scaler: Any, optimizer: Optimizer) -> None:
    """The bad values that the scaler has found are gone: let it make this step after all."""
    if isinstance(scaler, GradScaler) and scaler.is_enabled():
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for flag in found.values():
            flag.zero_()


def let_loop_go_on(scaler: Any, optimizer: Optimizer) -> None:
    """The unscaled gradients were taken away: whatever the loop calls next is to work.

    Between "ready", where step() refuses to go without gradients, and "unscaled", where
    unscale_() refuses to come again, there is no state in torch in which both are allowed.
    """
    if isinstance(scaler, GradScaler) and scaler.is_enabled():
        state = scaler._per_optimizer_states.get(id(optimizer))
        if state is not None and state["stage"] is OptState.UNSCALED:
            state["stage"] = None
