"""A loss that is many times higher after one update than before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from stayfinite.explain.causes import CAUSES
from stayfinite.prevent.risks import Risk

_TIMES = 5.0


@dataclass(kw_only=True)
class Losses:
    """The losses that backward passes on one line began from, before the first update and after."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def rise(self) -> float:
        """How many times higher the worst is; 1 where they are not all positive."""
        both = self.before and self.after
        return max(self.after) / max(self.before) if both and self._are_positive else 1.0

    @property
    def _are_positive(self) -> bool:
        return min(*self.before, *self.after) > 0


def rising_risks(losses: dict[str, Losses]) -> list[Risk]:
    """The lines whose loss has jumped."""
    return [_risk(where, seen) for where, seen in losses.items() if seen.rise > _TIMES]


def _risk(where: str, seen: Losses) -> Risk:
    before, after = max(seen.before), max(seen.after)
    return Risk(
        level="medium",
        cause="lr_too_high",
        what=f"One update has brought the loss from {before:.3g} to {after:.3g}; the learning rate "
        "is too high for a start without warm-up.",
        where=where,
        fix=CAUSES["lr_too_high"].fix,
        score=1 - 1 / seen.rise,
        evidence={"before": before, "after": after},
    )
