"""Moving mean and deviation of the norm, and how many deviations a norm may be above."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stayfinite.prevent.clipping import options
from stayfinite.prevent.clipping.rule import WholeNorm, is_sample, times
from stayfinite.prevent.clipping.window import Window


@dataclass(frozen=True, kw_only=True)
class ZScore:
    """Clips norms that are more than `deviations` above their moving average (ZClip).

    By Kumar et al., 2025 (arXiv 2504.02507): a norm with the z-score z is clipped to
    mean + deviations**2 * std / z, and enters the averages as clipped; the first `warmup` norms
    are only averaged. New here: the limit is never above `most` times the median of the last
    `window` norms, nor above `max_norm`, also during warm-up; and when more than half of the
    window is above the limit, the averages begin again from the window.
    """

    deviations: float = 2.5
    decay: float = 0.97
    warmup: int = 25
    eps: float = 1e-6
    window: int = 100
    most: float = 5.0
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        options.positive(self, "deviations")
        options.between(self, "decay", 0, 1)
        options.whole(self, "warmup")
        options.positive(self, "eps")
        options.whole(self, "window", least=self.warmup)
        options.positive(self, "most")
        options.positive(self, "max_norm", finite=False)

    @property
    def mode(self) -> str:
        return "zscore"

    def begin(self) -> ZScoreStatistics:
        return ZScoreStatistics(self)


class ZScoreStatistics(WholeNorm):
    """Mean and standard deviation of the norm; a mean of 0 is none yet."""

    def __init__(self, rule: ZScore) -> None:
        super().__init__(rule.max_norm)
        self._rule = rule
        self._norms = Window(rule.window)
        self._mean = self._std = 0.0

    def limit(self) -> float:
        highest = self._highest()
        return highest if self._is_warming_up else min(highest, self._onset())

    def seen(self, norm: float) -> float:
        allowed = min(self._highest(), math.inf if self._is_warming_up else self._clipped(norm))
        self._norms.add(norm)
        if self._is_warming_up:
            if len(self._norms) >= self._rule.warmup:
                self._begin_again()
        else:
            self._average(min(norm, allowed))
            if self._norms.median() > self._onset():
                self._begin_again()
        return allowed

    @property
    def _is_warming_up(self) -> bool:
        return self._mean == 0

    def _highest(self) -> float:
        return times(self._norms.median(), self._rule.most) if len(self._norms) else math.inf

    def _onset(self) -> float:
        """Where clipping begins."""
        return times(self._mean + self._rule.deviations * self._std, 1.0)

    def _clipped(self, norm: float) -> float:
        """What is made of this norm; the further out it is, the less is left of the excess."""
        rule = self._rule
        z = (norm - self._mean) / (self._std + rule.eps)
        if not z > rule.deviations:
            return math.inf
        return times(self._mean + rule.deviations * self._std / (z / rule.deviations), 1.0)

    def _average(self, norm: float) -> None:
        decay = self._rule.decay
        self._mean = decay * self._mean + (1 - decay) * norm
        # As a length: the squares may overflow.
        old, new = math.sqrt(decay) * self._std, math.sqrt(1 - decay) * (norm - self._mean)
        self._std = min(math.hypot(old, new), sys.float_info.max)

    def _begin_again(self) -> None:
        """From the window, in which spikes count as clipped."""
        highest, count = self._highest(), len(self._norms)
        norms = [min(norm, highest) for norm in self._norms.values()]
        self._mean = sum(norm / count for norm in norms)
        root = math.sqrt(count)
        self._std = math.hypot(*((norm - self._mean) / root for norm in norms))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self._norms.to_tensor(), "mean": self._mean, "std": self._std}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        norms = state["norms"]
        self._norms.load(norms[norms > 0])
        is_sound = is_sample(state["mean"]) and 0 <= state["std"] < math.inf
        self._mean, self._std = (state["mean"], state["std"]) if is_sound else (0.0, 0.0)
