"""What a loss scaler counts besides good steps; on the device, so that counting does not wait."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from stayfinite.detect.flags import LateFlag

HysteresisMode: TypeAlias = Literal["interval", "consecutive"]


class CountingScaler(GradScaler):
    """torch's scaler with two more counts, kept and saved as it keeps and saves its own.

    `_tolerance` is how many overflows are left until one lowers the scale, `_at_floor` how many
    in a row no lower scale could have prevented.
    """

    def __init__(
        self,
        device: str,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        *,
        hysteresis: int,
        hysteresis_mode: HysteresisMode,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.hysteresis = hysteresis
        self.hysteresis_mode = hysteresis_mode
        self._init_tolerance, self._init_at_floor = hysteresis, 0
        self._tolerance: Tensor | None = None
        self._at_floor: Tensor | None = None
        self._late: LateFlag | None = None

    @property
    def overflows_at_floor(self) -> int:
        """Overflows in a row with the scale at min_scale; waits for the device."""
        return self._init_at_floor if self._at_floor is None else int(self._at_floor.item())

    def state_dict(self) -> dict[str, Any]:
        """What torch's scaler saves, and our two counts; torch can load it. Empty if disabled."""
        if not self._enabled:
            return {}
        left = self._init_tolerance if self._tolerance is None else int(self._tolerance.item())
        ours = {"_hysteresis_tracker": left, "_overflows_at_floor": self.overflows_at_floor}
        return {**super().state_dict(), **ours}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, ours or that of torch.amp.GradScaler."""
        super().load_state_dict(state_dict)
        left = state_dict.get("_hysteresis_tracker", self.hysteresis)
        self._init_tolerance = min(left, self.hysteresis)
        self._init_at_floor = state_dict.get("_overflows_at_floor", 0)
        self._late = None
        if self._tolerance is not None and self._at_floor is not None:
            self._tolerance.fill_(self._init_tolerance)
            self._at_floor.fill_(self._init_at_floor)

    def __getstate__(self) -> dict[str, Any]:
        counts = CountingScaler.state_dict(self)
        return {
            **super().__getstate__(),
            "_init_tolerance": counts.get("_hysteresis_tracker", self.hysteresis),
            "_init_at_floor": counts.get("_overflows_at_floor", 0),
            "_tolerance": None,
            "_at_floor": None,
            "_late": None,
        }

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._tolerance = torch.full((), self._init_tolerance, dtype=torch.int32, device=dev)
        self._at_floor = torch.full((), self._init_at_floor, dtype=torch.int32, device=dev)

    def _absorbs(self, is_bad: Tensor) -> Tensor:
        """Whether this step was an overflow that leaves the scale alone; counts the step."""
        left, growth_tracker = self._tolerance, self._growth_tracker
        assert left is not None
        left.sub_(is_bad.int()).clamp_(min=0)
        is_absorbed = is_bad & (left > 0)
        is_restored = is_bad.logical_not()
        if self.hysteresis_mode == "interval":
            is_restored &= growth_tracker == 0  # a whole interval has just been completed
        left.masked_fill_(is_restored, self.hysteresis)
        return is_absorbed

    def _count_at_floor(self, is_overflow: Tensor) -> int:
        """Count a step and give the count; off the cpu that of the step before, without waiting."""
        count = self._at_floor
        assert count is not None
        count.add_(1).mul_(is_overflow)
        if count.is_cpu:
            return int(count.item())
        known, self._late = self._late, LateFlag(count.clone())
        return 0 if known is None else known.read()
