"""What a loss scaler counts besides good steps; on the device, so that counting does not wait."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from stayfinite.detect.flags import LateFlag

HysteresisMode: TypeAlias = Literal["interval", "consecutive"]


class DeviceCount:
    """A whole number: on the host until it is used on a device, and in pickles and copies."""

    def __init__(self, value: int) -> None:
        self._value = value
        self._tensor: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The count as a tensor, to be changed in place."""
        if self._tensor is None:
            self._tensor = torch.full((), self._value, dtype=torch.int32, device=device)
        return self._tensor

    def read(self) -> int:
        """The count; waits for the device."""
        return self._value if self._tensor is None else int(self._tensor.item())  # host sync

    def set(self, value: int) -> None:
        """Forget the old count."""
        self._value = value
        if self._tensor is not None:
            self._tensor.fill_(value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_value": self.read(), "_tensor": None}


class Tolerance(DeviceCount):
    """How many overflows are left until one lowers the scale."""

    def __init__(self, full: int, mode: HysteresisMode) -> None:
        super().__init__(full)
        self.full = full
        self.mode = mode

    def absorbs(self, is_bad: Tensor, growth_tracker: Tensor) -> Tensor:
        """Whether this step was an overflow that leaves the scale alone; counts the step.

        `growth_tracker` is that of after the step.
        """
        left = self.on(is_bad.device)
        left.sub_(is_bad.int()).clamp_(min=0)
        is_absorbed = is_bad & (left > 0)
        is_restored = is_bad.logical_not()
        if self.mode == "interval":
            is_restored &= growth_tracker == 0  # a whole interval has just been completed
        left.masked_fill_(is_restored, self.full)
        return is_absorbed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **super().__getstate__()}


class OverflowsAtFloor(DeviceCount):
    """Overflows in a row that no lower scale could have prevented."""

    def __init__(self) -> None:
        super().__init__(0)
        self._late: LateFlag | None = None

    def add(self, is_overflow_at_floor: Tensor) -> int:
        """Count a step and give the count; off the cpu that of the step before, without waiting."""
        count = self.on(is_overflow_at_floor.device)
        count.add_(1).mul_(is_overflow_at_floor)
        if count.is_cpu:
            return self.read()
        known, self._late = self._late, LateFlag(count.clone())
        return 0 if known is None else known.read()

    def set(self, value: int) -> None:
        """Forget the old count."""
        super().set(value)
        self._late = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_late": None}
