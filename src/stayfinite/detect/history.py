"""What a detector remembers of its checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stayfinite.records import NaNReport


@dataclass
class CheckHistory:
    """Counts over checks; a check is one call that looked, and a hit is one that found something.

    Checks of the same step (or of one that is over) count as one step in the streaks.
    """

    checks: int = 0
    skipped: int = 0
    hits: int = 0
    by_type: Counter[str] = field(default_factory=Counter)
    by_location: Counter[str] = field(default_factory=Counter)
    first_bad_step: int | None = None
    last_bad_step: int | None = None
    longest_streak: int = 0
    _step: int = -1
    _is_bad_step: bool = False
    _streak_before: int = 0

    def looked(self, step: int, bad: Sequence[NaNReport]) -> None:
        self.checks += 1
        if step > self._step:
            self._streak_before = self.streak
            self._step, self._is_bad_step = step, False
        if bad:
            self._hit(step, bad)

    def _hit(self, step: int, bad: Sequence[NaNReport]) -> None:
        self.hits += 1
        self.by_type.update(report.nan_type.value for report in bad)
        self.by_location.update(report.location for report in bad)
        self._is_bad_step = True
        self.longest_streak = max(self.longest_streak, self.streak)
        self.last_bad_step = step
        if self.first_bad_step is None:
            self.first_bad_step = step

    @property
    def streak(self) -> int:
        """Bad steps in a row, up to now."""
        return self._streak_before + 1 if self._is_bad_step else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "checks": self.checks,
            "skipped": self.skipped,
            "hits": self.hits,
            "hit_rate": self.hits / self.checks if self.checks else 0.0,
            "hits_by_type": dict(self.by_type),
            "hits_by_location": dict(self.by_location),
            "first_bad_step": self.first_bad_step,
            "last_bad_step": self.last_bad_step,
            "current_streak": self.streak,
            "longest_streak": self.longest_streak,
        }
