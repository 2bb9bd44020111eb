"""What options of a mode must be, said in the same words everywhere."""

from __future__ import annotations

import math
from typing import Any

from stayfinite.errors import ConfigError


def whole(options: Any, name: str, *, least: int = 1) -> None:
    """A whole number from `least` on."""
    value = getattr(options, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}.")


def between(options: Any, name: str, low: float, high: float) -> None:
    """A number in the closed interval."""
    value = getattr(options, name)
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be between {low:g} and {high:g}.")


def positive(options: Any, name: str, *, finite: bool = True) -> None:
    """A number greater than 0."""
    value = getattr(options, name)
    if not value > 0 or (finite and not math.isfinite(value)):
        said = "a finite number" if finite else "a number"
        raise ConfigError(f"{name} is {value!r}; it must be {said} greater than 0.")
