"""The default: how far the logarithm of the norm may be from the median of the last ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stayfinite.errors import ConfigError
from stayfinite.prevent.clipping import options
from stayfinite.prevent.clipping.rule import WholeNorm, times
from stayfinite.prevent.clipping.window import Window

_NORMAL = 1.4826  # standard deviations in a median deviation, for a normal distribution


@dataclass(frozen=True, kw_only=True)
class Robust:
    """Clips to the median of the last `window` norms times a factor.

    The factor is `deviations` standard deviations of the logarithms of these norms, estimated
    from their median deviation, but at least `least` and at most `most`. It is `most` until
    there are `warmup` norms. Half of the window may be spikes without any effect on the limit.
    The limit is never above `max_norm`, which is also the limit before the first norm.
    """

    window: int = 128
    deviations: float = 6.0
    least: float = 3.0
    most: float = 5.0
    warmup: int = 16
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        options.whole(self, "window", least=2)
        options.whole(self, "warmup")
        options.positive(self, "deviations")
        options.positive(self, "max_norm", finite=False)
        options.positive(self, "most")
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"least is {self.least!r} and most is {self.most!r}; "
                "they must be at least 1, and least not above most."
            )

    @property
    def mode(self) -> str:
        return "robust"

    def begin(self) -> RobustStatistics:
        return RobustStatistics(self)


class RobustStatistics(WholeNorm):
    """The logarithms of the last norms."""

    def __init__(self, rule: Robust) -> None:
        super().__init__(rule.max_norm)
        self._rule = rule
        self._logs = Window(rule.window)
        self._limit = math.inf

    def limit(self) -> float:
        return self._limit

    def seen(self, norm: float) -> float:
        allowed = self._limit
        self._logs.add(math.log(norm))
        self._limit = self._learnt()
        return allowed

    def _learnt(self) -> float:
        return times(math.exp(self._logs.median()), self._factor()) if len(self._logs) else math.inf

    def _factor(self) -> float:
        rule = self._rule
        if len(self._logs) < rule.warmup:
            return rule.most
        # Cut before exp, which may overflow.
        wanted = min(rule.deviations * _NORMAL * self._logs.deviation(), math.log(rule.most))
        return max(math.exp(wanted), rule.least)

    def state_dict(self) -> dict[str, Any]:
        return {"logs": self._logs.to_tensor()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._logs.load(state["logs"])
        self._limit = self._learnt()
