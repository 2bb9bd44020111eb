"""A budget of seconds, which many attempts share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Budget:
    """Seconds that may be spent in all, from the first time that it is asked."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _end: float | None = None

    @property
    def left(self) -> float:
        if self._end is None:
            self._end = self.clock() + self.seconds
        return self._end - self.clock()
