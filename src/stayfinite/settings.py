"""How a guard watches, and the checks of options that several settings share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, Literal

from stayfinite.errors import ConfigError

ROUND = 16  # every parameter is looked at once in so many steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """How a guard watches.

    `trace` "start" traces from the beginning, "armed" from the tick `arm_at` of the guard's
    clock (backward passes and attempted updates). `again` "auto" runs the body of the loop that is
    running once more, in place, to see which operation made a value bad. `folder` is what files
    are named relative to.
    What goes bad in a step that is not looked at is found in the next one that is.
    `prove_seconds` is how long experiments on a bad step that can be run again may take.
    `change_seconds` is how long changes of the source may be tried on a bad step, in place.
    `is_undone` says that the run which this one repeats has undone its bad steps.
    `forecast` says that what is going to overflow or diverge is told before.
    """

    on_nan: Literal["stop", "warn", "recover"] = "stop"
    max_scaler_skips: int = 20
    trace: Literal["never", "armed", "start"] = "never"
    again: Literal["auto", "never"] = "auto"
    arm_at: int | None = None
    folder: str | None = None
    check_loss: bool = True
    check_gradients: bool = True
    check_parameters: bool = True
    check_every: int = 1
    prove_seconds: float = 0.0
    change_seconds: float = 0.0
    is_undone: bool = False
    forecast: bool = False

    @property
    def hears_files(self) -> bool:
        """Whether the files that data is read from are to be named."""
        return self.trace != "never" or self.prove_seconds > 0

    def __post_init__(self) -> None:
        if self.on_nan not in ("stop", "warn", "recover"):
            raise ConfigError(f"on_nan is {self.on_nan!r}; it must be 'stop', 'warn' or 'recover'.")
        if self.trace not in ("never", "armed", "start"):
            raise ConfigError(f"trace is {self.trace!r}; it must be 'never', 'armed' or 'start'.")
        if self.again not in ("auto", "never"):
            raise ConfigError(f"again is {self.again!r}; it must be 'auto' or 'never'.")
        for name in ("max_scaler_skips", "check_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be >= 1.")
        if not self.prove_seconds >= 0:
            raise ConfigError(f"prove_seconds is {self.prove_seconds}; it must be >= 0.")


def is_number(value: Any) -> bool:
    """Whether it is a finite number; True is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_whole(name: str, value: Any, least: int = 1) -> int:
    """The value; ConfigError if it is no whole number or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    return value


def require_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """ConfigError unless it is one of these words."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}.")
