"""The last values of a series, in the order in which they came and in order of size."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor


class Window:
    """Up to `length` finite numbers; a new one pushes the oldest out."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def values(self) -> Iterable[float]:
        """The oldest first."""
        return tuple(self._last)

    def add(self, value: float) -> None:
        if len(self._last) == self._length:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        self._last.append(value)
        insort(self._sorted, value)

    def median(self) -> float:
        return _middle(self._sorted)

    def deviation(self) -> float:
        """The median distance from the median."""
        middle = self.median()
        return _middle(sorted([abs(value - middle) for value in self._sorted]))

    def percentile(self, percent: float) -> float:
        """Between two values it lies on the line that joins them."""
        place = (len(self._sorted) - 1) * percent / 100
        below = math.floor(place)
        share = place - below
        if not share:
            return self._sorted[below]
        return self._sorted[below] * (1 - share) + self._sorted[below + 1] * share

    def to_tensor(self) -> Tensor:
        return torch.tensor(self._last, dtype=torch.float64, device="cpu")

    def load(self, values: Tensor) -> None:
        """Hold these instead; what is not finite is left out."""
        kept = [value for value in values.tolist() if math.isfinite(value)]
        self._last = deque(kept[-self._length :])
        self._sorted = sorted(self._last)


def _middle(values: list[float]) -> float:
    half = len(values) // 2
    if len(values) % 2:
        return values[half]
    return values[half - 1] / 2 + values[half] / 2  # the sum of the two may overflow
