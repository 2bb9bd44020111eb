"""What was done about one bad step, and what good steps looked like."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from stayfinite.recover.config import RecoveryStrategy

_KEPT = 1000  # values of good steps


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What was done about one bad step.

    `tried` are the strategies that could not help, each with its reason, and `bad_in_a_row` is
    which bad step of its streak this was. `back_at` is the step of a snapshot that was restored,
    `checkpoint` the file that was loaded, None where there was none. `lr`, `scale` and `dtype`
    (the narrowest of the parameters) are as they were found; None where there is none.

    >>> Recovery(step=7, location="loss", strategy=RecoveryStrategy.SKIP_STEP, succeeded=True).lr
    """

    step: int
    location: str
    strategy: RecoveryStrategy
    succeeded: bool
    detail: str = ""
    tried: tuple[tuple[RecoveryStrategy, str], ...] = ()
    cause: str | None = None
    module: str | None = None
    bad_in_a_row: int = 1
    back_at: int | None = None
    checkpoint: str | None = None
    lr: float | None = None
    scale: float | None = None
    dtype: str | None = None


class Observed:
    """Finite values of the last good steps; tensors are read only when they are asked for."""

    def __init__(self) -> None:
        self._values: deque[Any] = deque(maxlen=_KEPT)

    def add(self, value: Any) -> None:
        # A loss must not keep its graph alive.
        self._values.append(value.detach() if hasattr(value, "detach") else value)

    def values(self) -> list[float]:
        """Oldest first."""
        return [number for number in map(float, self._values) if math.isfinite(number)]
