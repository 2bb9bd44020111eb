"""DynamicLossScaler: a GradScaler with bounds, a second look, and a way out at the floor.

It goes by what torch's scaler keeps under private names (its scale, its growth tracker, what it
has found for each optimizer): there is no public way to add to what was found, or to hold back
a scale that is about to change. tests/amp/test_scaler_like_torch.py compares it with torch's.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from stayfinite.detect.finite import all_finite, nonfinite, surely_finite
from stayfinite.detect.hooks import tell_skipped
from stayfinite.detect.veto import LateFlag, is_ready, obeys_flag
from stayfinite.errors import ConfigError, RecordError, TrainingAbortedError
from stayfinite.training import gradients_of

HysteresisMode: TypeAlias = Literal["interval", "consecutive"]
OnFloor: TypeAlias = "Literal['warn', 'abort'] | Callable[[DynamicLossScaler], None]"

logger = logging.getLogger("stayfinite")
_SAVED = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
# The inverses of these are ordinary float32 numbers too; torch divides by multiplying with them.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


class DynamicLossScaler(GradScaler):
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
    scale cannot be the cause: "warn" logs it (in a long row each time after twice as many),
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
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device = "cpu" if accelerator is None else accelerator
        if not isinstance(device, (str, torch.device)):
            raise ConfigError(f"device is {device!r}; it must be a device such as 'cuda', or None.")
        if enabled:
            check_growth(growth_factor, backoff_factor, growth_interval)
            check_count("hysteresis", hysteresis)
            check_count("floor_patience", floor_patience)
            check_bounds(init_scale, min_scale, max_scale)
            if hysteresis_mode not in get_args(HysteresisMode):
                choices = " or ".join(map(repr, get_args(HysteresisMode)))
                raise ConfigError(f"hysteresis_mode is {hysteresis_mode!r}; it must be {choices}.")
            if on_floor not in ("warn", "abort") and not callable(on_floor):
                raise ConfigError(
                    f"on_floor is {on_floor!r}; it must be 'warn', 'abort' or a callable."
                )
        super().__init__(
            torch.device(device).type,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
        )
        if enabled and all(map(is_power_of_two, (init_scale, growth_factor, backoff_factor))):
            self.min_scale = 2.0 ** math.ceil(math.log2(min_scale))
            self.max_scale = 2.0 ** math.floor(math.log2(max_scale))
        else:  # what a scale can be, a float32
            self.min_scale = ctypes.c_float(min_scale).value
            self.max_scale = ctypes.c_float(max_scale).value
        self._init_scale = self._within_bounds(init_scale) if enabled else init_scale
        self.floor_patience, self.on_floor = floor_patience, on_floor
        self.hysteresis, self.hysteresis_mode = hysteresis, hysteresis_mode
        # Two more counts, kept as torch keeps its own: how many overflows are left until one
        # lowers the scale, and how many in a row no lower scale could have prevented.
        self._init_tolerance, self._init_at_floor = hysteresis, 0
        self._tolerance: Tensor | None = None
        self._at_floor: Tensor | None = None
        self._late: LateFlag | None = None

    @property
    def overflows_at_floor(self) -> int:
        """Overflows in a row with the scale at min_scale; waits for the device."""
        return self._init_at_floor if self._at_floor is None else int(self._at_floor.item())

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale the gradients unless that is done, and update unless one of them is bad.

        Returns what optimizer.step returns, None when it was skipped. Arguments are passed on,
        except for a closure, which is refused: its gradients would be scaled.
        """
        if self._enabled and args and callable(args[0]):
            args, kwargs = args[1:], {**kwargs, "closure": args[0]}
        # Where these are false, torch does what is to be done, or says what is wrong.
        if self._enabled and self._scale is not None and "closure" not in kwargs:
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
                gradients = gradients_of(optimizer)
                if not surely_finite(gradients, of=optimizer):
                    self._note(optimizer, nonfinite(gradients, writable=True))
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
        if self._scale is None:
            super().update()  # which says what is wrong
            return
        before = self._scale.clone()
        flags = [
            flag.to(before.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        super().update()
        is_bad = torch.stack(flags).any()
        if self.hysteresis > 1:
            self._scale.copy_(torch.where(self._absorbs(is_bad), before, self._scale))
        self._scale.clamp_(self.min_scale, self.max_scale)
        overflows = self._count_at_floor(is_bad & (before <= self.min_scale))
        if overflows and overflows % self.floor_patience == 0:
            self._escalate(overflows)

    def set_growth_factor(self, new_factor: float) -> None:
        """Change by how much the scale grows."""
        check_growth(new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change by how much the scale falls."""
        check_growth(backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Change how many good steps in a row let the scale grow."""
        check_growth(growth_interval=new_interval)
        super().set_growth_interval(new_interval)
        if self._enabled:
            # torch would never grow again if more good steps than that were counted.
            self._init_growth_tracker = min(self._init_growth_tracker, new_interval - 1)
            if self._growth_tracker is not None:
                self._growth_tracker.clamp_(max=new_interval - 1)

    def state_dict(self) -> dict[str, Any]:
        """What torch's scaler saves, and our two counts; torch can load it. Empty if disabled."""
        if not self._enabled:
            return {}
        ours = {
            "_hysteresis_tracker": self._tolerance_left(),
            "_overflows_at_floor": self.overflows_at_floor,
        }
        return {**super().state_dict(), **ours}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, ours or that of torch.amp.GradScaler.

        A scale outside the bounds, such as the 0 of a collapsed run, is brought within them.
        """
        if self._enabled and state_dict:
            state_dict = self._usable_state(state_dict)
            self._per_optimizer_states.clear()  # flags of steps that are being undone
        super().load_state_dict(state_dict)
        left = state_dict.get("_hysteresis_tracker", self.hysteresis)
        self._init_tolerance = min(left, self.hysteresis)
        self._init_at_floor = state_dict.get("_overflows_at_floor", 0)
        self._late = None
        if self._tolerance is not None and self._at_floor is not None:
            self._tolerance.fill_(self._init_tolerance)
            self._at_floor.fill_(self._init_at_floor)

    def _usable_state(self, state: dict[str, Any]) -> dict[str, Any]:
        missing = [key for key in _SAVED if key not in state]
        if missing:
            raise RecordError(
                f"this is not the state of a loss scaler: {', '.join(missing)} missing."
            )
        interval = state["growth_interval"]
        check_growth(state["growth_factor"], state["backoff_factor"], interval)
        return {
            **state,
            "scale": self._within_bounds(state["scale"]),
            "_growth_tracker": min(state["_growth_tracker"], interval - 1),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_init_tolerance": self._tolerance_left(),
            "_init_at_floor": self.overflows_at_floor,
            "_tolerance": None,
            "_at_floor": None,
            "_late": None,
        }

    def _tolerance_left(self) -> int:
        return self._init_tolerance if self._tolerance is None else int(self._tolerance.item())

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._tolerance = torch.full((), self._init_tolerance, dtype=torch.int32, device=dev)
        self._at_floor = torch.full((), self._init_at_floor, dtype=torch.int32, device=dev)

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
            # The fused kernel divides later, and by less than 1 what is finite may overflow. The
            # private function is one kernel for all; the public norm would be one for each.
            norms = [n.to(self._scale) for n in torch._foreach_norm(gradients, math.inf)]
            self._note(optimizer, (torch.stack(norms) / self._scale).isfinite().all().logical_not())
        return found

    def _note(self, optimizer: Optimizer, is_bad: Tensor | bool) -> None:
        """Add to what was found in this optimizer's gradients."""
        flag: Tensor = next(iter(self._found_inf_per_device(optimizer).values()))
        # Never above 1: a fused kernel takes back as many steps as the flag says.
        flag.copy_(torch.maximum(flag, torch.as_tensor(is_bad).to(flag, non_blocking=True)))

    def _must_not_be_called(self, optimizer: Optimizer) -> bool:
        """Whether torch would call it with a flag that says "bad", which it might not obey.

        torch's own fused ones obey once all their state exists: before, SGD keeps an
        uninitialised momentum buffer. One that takes the scaler itself, the older way, is left
        to its own means.
        """
        state = self._per_optimizer_states[id(optimizer)]
        if (
            state["stage"] is OptState.STEPPED
            or not getattr(optimizer, "_step_supports_amp_scaling", False)
            or "grad_scaler" in inspect.signature(optimizer.step).parameters
            or (obeys_flag(optimizer) and is_ready(optimizer))
        ):
            return False
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        return any(bool(flag) for flag in state["found_inf_per_device"].values())  # host sync

    def _skip(self, optimizer: Optimizer) -> float | None:
        self._note(optimizer, True)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        tell_skipped(self, optimizer)
        return None

    def _absorbs(self, is_bad: Tensor) -> Tensor:
        """Whether this step was an overflow that leaves the scale alone; counts the step."""
        left, growth_tracker = self._tolerance, self._growth_tracker
        assert left is not None
        left.sub_(is_bad.int()).clamp_(min=0)
        is_absorbed = is_bad & (left > 0)
        is_restored = is_bad.logical_not()
        if self.hysteresis_mode == "interval":
            is_restored &= growth_tracker == 0  # a whole interval has just been completed
        left.masked_fill_(is_restored, self.hysteresis)
        return is_absorbed

    def _count_at_floor(self, is_overflow: Tensor) -> int:
        """Count a step and give the count; off the cpu that of the step before, without waiting."""
        count = self._at_floor
        assert count is not None
        count.add_(1).mul_(is_overflow)
        if count.is_cpu:
            return int(count.item())
        known, self._late = self._late, LateFlag(count.clone())
        return 0 if known is None else known.read()

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


def check_growth(
    growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 1
) -> None:
    """Raise ConfigError unless the scale can grow and fall by these, and stays above 0."""
    if not 1.0 < growth_factor < math.inf:
        raise ConfigError(
            f"growth_factor is {growth_factor}; it must be a finite number above 1. "
            "For a scale that never grows, set max_scale to init_scale."
        )
    if not 0.0 < backoff_factor < 1.0:
        raise ConfigError(
            f"backoff_factor is {backoff_factor}; it must lie between 0 and 1. "
            "For a scale that never falls, set min_scale to init_scale."
        )
    check_count("growth_interval", growth_interval)


def check_count(name: str, count: int) -> None:
    """Raise ConfigError unless it counts something."""
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name} is {count}; it must be a whole number, at least 1.")


def check_bounds(init_scale: float, low: float, high: float) -> None:
    """Raise ConfigError unless SMALLEST_SCALE <= low <= init_scale <= high <= LARGEST_SCALE."""
    if not SMALLEST_SCALE <= low <= high <= LARGEST_SCALE:
        raise ConfigError(
            f"min_scale is {low} and max_scale is {high}; they must be in this order, "
            "between 2**-126 and 2**126."
        )
    if not low <= init_scale <= high:
        raise ConfigError(
            f"init_scale is {init_scale}; it must lie between min_scale ({low}) "
            f"and max_scale ({high})."
        )


def is_power_of_two(number: float) -> bool:
    """Whether it is 2**n for a whole n, of either sign."""
    return math.frexp(number)[0] == 0.5


_GIVEN = ("grad_scale", "found_inf")


class SpoiledGradients(Exception):
    """Raised through optimizer.step() before it has changed anything."""


@contextmanager
def last_look(optimizer: Optimizer) -> Iterator[None]:
    """Let optimizer.step() raise SpoiledGradients if its own pre-hooks made a gradient bad.

    Without such hooks, or with none but ours, nothing is attached and nothing is looked at.
    """
    # Nothing public lists the hooks of an optimizer; one that is not torch's kind has none.
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    hooks = [] if own is None else [*_global_optimizer_pre_hooks.values(), *own.values()]
    if all(str(getattr(hook, "__module__", "")).startswith("stayfinite.") for hook in hooks):
        yield
        return
    handle = optimizer.register_step_pre_hook(_refuse)  # the last one registered runs last
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def nothing_left_behind(optimizer: Optimizer) -> Iterator[None]:
    """Where a fused step() raises, torch leaves the scale on it: the next step divides twice."""
    before = {key: value for key, value in vars(optimizer).items() if key in _GIVEN}
    try:
        yield
    except BaseException:
        for key in _GIVEN:
            vars(optimizer).pop(key, None)
        vars(optimizer).update(before)
        raise


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not is_dynamo_compiling() and not all_finite(gradients_of(optimizer)):  # host sync
        raise SpoiledGradients
