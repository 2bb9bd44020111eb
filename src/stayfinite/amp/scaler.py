"""DynamicLossScaler: a GradScaler with bounds, a second look, and a way out at the floor."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from stayfinite.amp.counts import CountingScaler, HysteresisMode
from stayfinite.amp.limits import (
    check_backoff_factor,
    check_bounds,
    check_choices,
    check_count,
    check_growth_factor,
    device_type,
    is_power_of_two,
    narrowed,
)
from stayfinite.amp.stepping import (
    SpoiledGradients,
    is_called_when_bad,
    last_look,
    nothing_left_behind,
)
from stayfinite.detect.gradients import gradients_of
from stayfinite.detect.hooks import tell_skipped
from stayfinite.detect.quick import surely_finite
from stayfinite.detect.scan import nonfinite
from stayfinite.errors import ConfigError, RecordError, TrainingAbortedError

OnFloor: TypeAlias = "Literal['warn', 'abort'] | Callable[[DynamicLossScaler], None]"

logger = logging.getLogger("stayfinite")
_SAVED = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class DynamicLossScaler(CountingScaler):
    """Loss scaling that stays finite, in the place of torch.amp.GradScaler.

    The scale never leaves [min_scale, max_scale]. With factors and an init_scale that are powers
    of two it stays one; bounds that are none are narrowed to the next inside.

    Gradients are judged when they are unscaled and again last thing before the update, after
    clipping and after the optimizer's hooks. Bad at either time, the step is skipped and counts
    as an overflow.

    So many overflows as `hysteresis` says lower the scale, each further one lowers it again,
    until the tolerance is restored: in the mode "interval" by `growth_interval` good steps in a
    row (Megatron-LM, DeepSpeed), in the mode "consecutive" by any good step (apex, NeMo,
    DeepSpeed's consecutive_hysteresis).

    After `floor_patience` overflows in a row at min_scale, and again after as many more, the
    scale cannot be to blame: "warn" logs it (in a long row each time after twice as many),
    "abort" lets update() raise TrainingAbortedError, and a callable is called with the scaler.
    `overflows_at_floor` is the count. On an accelerator it is read one update late, so that
    nothing waits.

    `device` is where the losses are; by default the accelerator if there is one, else the cpu.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler = DynamicLossScaler("cpu", init_scale=2.0**10)
    >>> scaler.scale((weight * float("inf")).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> weight.tolist(), scaler.get_scale()
    ([1.0, 1.0], 512.0)
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
        hysteresis: int = 1,
        hysteresis_mode: HysteresisMode = "interval",
        floor_patience: int = 10,
        on_floor: OnFloor = "warn",
    ) -> None:
        if enabled:
            check_growth_factor(growth_factor)
            check_backoff_factor(backoff_factor)
            check_count("growth_interval", growth_interval)
            check_count("hysteresis", hysteresis)
            check_count("floor_patience", floor_patience)
            check_bounds(init_scale, min_scale, max_scale)
            check_choices(hysteresis_mode, on_floor)
        super().__init__(
            device_type(device),
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            hysteresis=hysteresis,
            hysteresis_mode=hysteresis_mode,
        )
        steps = (init_scale, growth_factor, backoff_factor) if enabled else ()
        self.min_scale, self.max_scale = narrowed(min_scale, max_scale, *steps)
        self._init_scale = self._within_bounds(init_scale) if enabled else init_scale
        self.floor_patience = floor_patience
        self.on_floor = on_floor

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale the gradients unless that is done, and update unless one of them is bad.

        Returns what optimizer.step returns, None when it was skipped. Arguments are passed on,
        except for a closure, which is refused: its gradients would be scaled.
        """
        if self._enabled and args and callable(args[0]):
            args, kwargs = args[1:], {**kwargs, "closure": args[0]}
        # Where these are false, torch does what is to be done, or says what is wrong.
        if self._enabled and self._scale is not None and "closure" not in kwargs:
            self._look_again(optimizer)
            if self._must_not_be_called(optimizer):
                return self._skip(optimizer)
        try:
            with last_look(optimizer), nothing_left_behind(optimizer):
                return super().step(optimizer, *args, **kwargs)
        except SpoiledGradients:
            return self._skip(optimizer)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Lower or raise the scale after the steps of all optimizers, or set it.

        A new scale is brought within the bounds; NaN is refused.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            value = new_scale.detach() if isinstance(new_scale, Tensor) else new_scale
            super().update(self._within_bounds(value))  # host sync
            return
        before = None if self._scale is None else self._scale.clone()
        flags = self._flags()
        super().update()
        if before is not None:
            self._finish_update(before, torch.stack(flags).any())

    def set_growth_factor(self, new_factor: float) -> None:
        """Change by how much the scale grows."""
        check_growth_factor(new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change by how much the scale falls."""
        check_backoff_factor(new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Change how many good steps in a row let the scale grow."""
        check_count("growth_interval", new_interval)
        super().set_growth_interval(new_interval)
        if self._enabled:
            # torch would never grow again if more good steps than that were counted.
            self._init_growth_tracker = min(self._init_growth_tracker, new_interval - 1)
            if self._growth_tracker is not None:
                self._growth_tracker.clamp_(max=new_interval - 1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, ours or that of torch.amp.GradScaler.

        A scale outside the bounds, such as the 0 of a collapsed run, is brought within them.
        """
        if self._enabled and state_dict:
            state_dict = self._checked(state_dict)
            self._per_optimizer_states.clear()  # flags of steps that are being undone
        super().load_state_dict(state_dict)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # torch would refuse to step an optimizer that has no gradients this time.
        return found or {found_inf.device: found_inf}

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        found = super()._check_inf_per_device(optimizer)
        gradients = [g for g in gradients_of(optimizer) if g.numel()]
        if self.min_scale < 1.0 and gradients and self._scale is not None:
            # The fused kernel divides later, and by less than 1 what is finite may overflow.
            norms = [n.to(self._scale) for n in torch._foreach_norm(gradients, math.inf)]
            self._note(optimizer, (torch.stack(norms) / self._scale).isfinite().all().logical_not())
        return found

    def _note(self, optimizer: Optimizer, is_bad: Tensor | bool) -> None:
        """Add to what was found in this optimizer's gradients."""
        flag: Tensor = next(iter(self._found_inf_per_device(optimizer).values()))
        # Never above 1: a fused kernel takes back as many steps as the flag says.
        flag.copy_(torch.maximum(flag, torch.as_tensor(is_bad).to(flag, non_blocking=True)))

    def _look_again(self, optimizer: Optimizer) -> None:
        if self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.UNSCALED:
            return
        gradients = gradients_of(optimizer)
        if not surely_finite(gradients, of=optimizer):
            self._note(optimizer, nonfinite(gradients, writable=True))

    def _must_not_be_called(self, optimizer: Optimizer) -> bool:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED or not is_called_when_bad(optimizer):
            return False
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        return any(bool(flag) for flag in state["found_inf_per_device"].values())  # host sync

    def _skip(self, optimizer: Optimizer) -> float | None:
        self._note(optimizer, True)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        tell_skipped(self, optimizer)
        return None

    def _flags(self) -> list[Tensor]:
        device = None if self._scale is None else self._scale.device
        return [
            flag.to(device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]

    def _finish_update(self, before: Tensor, is_bad: Tensor) -> None:
        scale, _ = self._check_scale_growth_tracker("update")
        if self.hysteresis > 1:
            scale.copy_(torch.where(self._absorbs(is_bad), before, scale))
        scale.clamp_(self.min_scale, self.max_scale)
        overflows = self._count_at_floor(is_bad & (before <= self.min_scale))
        if overflows and overflows % self.floor_patience == 0:
            self._escalate(overflows)

    def _escalate(self, overflows: int) -> None:
        message = (
            f"the last {overflows} steps overflowed with the loss scale at its floor of "
            f"{self.min_scale:g}: the scale is not the cause. Look for a loss or gradient that is "
            "not finite at any scale, or train this part in bfloat16 or float32."
        )
        if callable(self.on_floor):
            self.on_floor(self)
        elif self.on_floor == "abort":
            raise TrainingAbortedError(message)
        elif is_power_of_two(overflows // self.floor_patience):
            logger.warning("stayfinite: %s", message)

    def _within_bounds(self, scale: float | Tensor) -> float:
        if math.isnan(scale):
            raise ConfigError("the new loss scale is NaN; it must be a number above 0.")
        return min(max(float(scale), self.min_scale), self.max_scale)

    def _checked(self, state: dict[str, Any]) -> dict[str, Any]:
        missing = [key for key in _SAVED if key not in state]
        if missing:
            raise RecordError(f"this is no state of a loss scaler: {', '.join(missing)} missing.")
        check_growth_factor(state["growth_factor"])
        check_backoff_factor(state["backoff_factor"])
        check_count("growth_interval", state["growth_interval"])
        return {
            **state,
            "scale": self._within_bounds(state["scale"]),
            "_growth_tracker": min(state["_growth_tracker"], state["growth_interval"] - 1),
        }
