"""What a loss scaler accepts, and between which two numbers its scale is kept."""

from __future__ import annotations

import ctypes
import math

import torch

from stayfinite.errors import ConfigError

# The inverses of these are ordinary float32 numbers too; torch divides by multiplying with them.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
_MODES = ("interval", "consecutive")


def check_growth_factor(factor: float) -> None:
    """Raise ConfigError unless the scale grows by it."""
    if not 1.0 < factor < math.inf:
        raise ConfigError(
            f"growth_factor is {factor}; it must be a finite number above 1. "
            "For a scale that never grows, set max_scale to init_scale."
        )


def check_backoff_factor(factor: float) -> None:
    """Raise ConfigError unless the scale falls by it and stays above 0."""
    if not 0.0 < factor < 1.0:
        raise ConfigError(
            f"backoff_factor is {factor}; it must lie between 0 and 1. "
            "For a scale that never falls, set min_scale to init_scale."
        )


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


def check_choices(hysteresis_mode: str, on_floor: object) -> None:
    """Raise ConfigError unless both are known."""
    if hysteresis_mode not in _MODES:
        choices = " or ".join(map(repr, _MODES))
        raise ConfigError(f"hysteresis_mode is {hysteresis_mode!r}; it must be {choices}.")
    if on_floor not in ("warn", "abort") and not callable(on_floor):
        raise ConfigError(f"on_floor is {on_floor!r}; it must be 'warn', 'abort' or a callable.")


def device_type(device: str | torch.device | None) -> str:
    """The kind of device; of None, the accelerator's if there is one."""
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else found.type
    if isinstance(device, (str, torch.device)):
        return torch.device(device).type
    raise ConfigError(f"device is {device!r}; it must be a device such as 'cuda', or None.")


def narrowed(low: float, high: float, *steps: float) -> tuple[float, float]:
    """The bounds, at powers of two if all of `steps` are: then a scale stays one that is one.

    Else they are rounded to what a scale can be, a float32.
    """
    if steps and all(map(is_power_of_two, steps)):
        return 2.0 ** math.ceil(math.log2(low)), 2.0 ** math.floor(math.log2(high))
    return ctypes.c_float(low).value, ctypes.c_float(high).value


def is_power_of_two(number: float) -> bool:
    """Whether it is 2**n for a whole n, of either sign."""
    return math.frexp(number)[0] == 0.5
