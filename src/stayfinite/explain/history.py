"""What the last steps looked like: the part of the evidence that one step cannot show."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_KEEP = 128
Ranges = dict[str, tuple[float, float]]  # largest magnitude and standard deviation


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One update that was attempted; numbers may be NaN, None is not known."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    scale: float | None = None
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """What the rules need to know of an optimizer."""

    kind: str = ""
    learning_rate: float | None = None
    eps: float | None = None
    momentum: float | None = None
    line_search: str | None = None
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Context:
    """All that is known besides the origin."""

    step: int = 0
    locations: tuple[str, ...] = ()
    history: tuple[StepFacts, ...] = ()
    optimizer: OptimizerFacts | None = None
    optimizer_count: int = 0
    scaler_skips: int = 0
    uses_scaler: bool = False
    scale: float | None = None
    input_ranges: dict[str, tuple[float, ...]] = field(default_factory=dict)
    initial_weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    weight_growth: float = 1.0
    poisoned_buffers: tuple[str, ...] = ()
    loaded_keys: tuple[str, ...] = ()
    bootstraps: bool = False
    is_adversarial: bool = False
    is_undone: bool = False  # the bad step, with all that it has changed

    @property
    def was_updated(self) -> bool:
        """Whether weights may have changed: no learning rate explains what comes before that.

        A step with a learning rate is an optimizer's. Without one, the history is of backward
        passes, and only from the second on may weights have been changed by hand before it.
        """
        applied = [step for step in self.history if not step.skipped]
        return len(applied) > 1 or any(step.learning_rate is not None for step in applied)


class History:
    """A ring of the last steps. Values may be device tensors; they are read only when asked for."""

    def __init__(self) -> None:
        self._ring: deque[dict[str, Any]] = deque(maxlen=_KEEP)
        self._first: list[dict[str, Any]] = []

    def add(self, **facts: Any) -> None:
        self._ring.append(facts)
        if len(self._first) < 8:
            self._first.append(facts)

    def steps(self) -> tuple[StepFacts, ...]:
        """Oldest first; the run's first few steps are always among them."""
        recent = list(self._ring)
        early = (
            [facts for facts in self._first if facts["step"] < recent[0]["step"]] if recent else []
        )
        return tuple(_read(facts) for facts in [*early, *recent])


def _read(facts: dict[str, Any]) -> StepFacts:
    numbers = {
        name: float(value) if value is not None else None
        for name, value in facts.items()
        if name in ("loss", "grad_norm", "learning_rate", "scale")
    }
    return StepFacts(step=facts["step"], skipped=bool(facts.get("skipped")), **numbers)


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that are known and finite."""
    return [value for value in values if value is not None and math.isfinite(value)]


def growth(values: list[float]) -> float:
    """How many times larger the last values got than the typical early one; 1 if unknown.

    Magnitudes are compared, so that a log-likelihood that falls without end counts too.
    """
    sizes = [abs(value) for value in values]
    if len(sizes) < 2:
        return 1.0
    late = max(sizes[-3:]) if len(sizes) > 4 else sizes[-1]
    early = statistics.median(sizes[:-3][:16]) if len(sizes) > 4 else sizes[0]
    return late / early if early > 0 else 1.0


def weight_growth(before: Ranges, now: Ranges) -> float:
    """How many times larger the fastest-growing weight is than at the start."""
    grown = [now[name][0] / max(size, 1e-2) for name, (size, _) in before.items() if name in now]
    return max((g for g in grown if math.isfinite(g)), default=1.0)
