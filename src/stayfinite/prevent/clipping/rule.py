"""What a mode is: options, and what is learnt from one call to the next."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stayfinite.clip.gradients import clip_whole
from stayfinite.clip.memory import Drop
from stayfinite.clip.result import ClipResult
from stayfinite.clip.targets import Gradient


class Statistics(Protocol):
    """What one clipper has learnt. A bad sample never enters it."""

    @property
    def threshold(self) -> float:
        """The norm of all gradients from which on they are clipped; inf where there is none."""

    @property
    def thresholds(self) -> dict[str, float]:
        """The same for each tensor by itself, where each has its own."""

    def clip(self, gradients: Sequence[Gradient], drop: Drop) -> ClipResult: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Rule(Protocol):
    """The options of a mode."""

    @property
    def mode(self) -> str: ...

    def begin(self) -> Statistics:
        """With nothing learnt yet."""


class WholeNorm:
    """The clip of those who look at nothing but the norm of all gradients together."""

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm

    @property
    def threshold(self) -> float:
        return min(self._max_norm, self.limit())

    @property
    def thresholds(self) -> dict[str, float]:
        return {}

    def limit(self) -> float:
        """What has been learnt; inf before the first norm."""
        raise NotImplementedError

    def seen(self, norm: float) -> float:
        """What this norm may be at most; it is learnt from."""
        raise NotImplementedError

    def clip(self, gradients: Sequence[Gradient], drop: Drop) -> ClipResult:
        return clip_whole(gradients, self._allowed, drop=drop)

    def _allowed(self, norm: float, is_sound: bool) -> float:
        if not (is_sound and is_sample(norm)):
            return self.threshold
        return min(self._max_norm, self.seen(norm))


def is_sample(norm: float) -> bool:
    """Whether a norm can be learnt from."""
    return 0 < norm < math.inf


def times(number: float, factor: float) -> float:
    """The product of two positive numbers, never 0 and never inf."""
    return min(max(number * factor, sys.float_info.min), sys.float_info.max)
