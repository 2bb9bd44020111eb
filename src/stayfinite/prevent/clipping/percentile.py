"""A percentile of the norms so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stayfinite.prevent.clipping import options
from stayfinite.prevent.clipping.rule import WholeNorm, times
from stayfinite.prevent.clipping.window import Window


@dataclass(frozen=True, kw_only=True)
class Percentile:
    """Clips to a percentile of the last `window` norms, this one included (AutoClip).

    By Seetharaman et al., 2020 (arXiv 2007.14469), which takes all norms of the run; the 10th
    percentile, as there, clips nine steps of ten. New here: the limit is never further than a
    factor of `most` from the median of the window, and never above `max_norm`.
    """

    percentile: float = 10.0
    window: int = 1000
    most: float = 5.0
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        options.between(self, "percentile", 0, 100)
        options.whole(self, "window")
        options.positive(self, "most")
        options.positive(self, "max_norm", finite=False)

    @property
    def mode(self) -> str:
        return "percentile"

    def begin(self) -> PercentileStatistics:
        return PercentileStatistics(self)


class PercentileStatistics(WholeNorm):
    """The last norms."""

    def __init__(self, rule: Percentile) -> None:
        super().__init__(rule.max_norm)
        self._rule = rule
        self._norms = Window(rule.window)

    def limit(self) -> float:
        if not len(self._norms):
            return math.inf
        return self._near(self._norms.percentile(self._rule.percentile), self._norms.median())

    def seen(self, norm: float) -> float:
        # The median of those before: of very few, a spike would be half.
        median = self._norms.median() if len(self._norms) else norm
        self._norms.add(norm)
        return self._near(self._norms.percentile(self._rule.percentile), median)

    def _near(self, limit: float, median: float) -> float:
        most = self._rule.most
        return min(max(limit, times(median, 1 / most)), times(median, most))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self._norms.to_tensor()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        norms = state["norms"]
        self._norms.load(norms[norms > 0])
