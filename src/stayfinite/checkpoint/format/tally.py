"""What the checks need to know of a tensor's values, gathered piece by piece."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stayfinite.detect.parts import float_parts, pieces

_DIRECT = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_AT_ONCE = 1 << 18


class Tally:
    """Kinds of non-finite values, and the extremes of the finite ones."""

    __slots__ = ("has_nan", "has_neg_inf", "has_pos_inf", "high", "low")

    def __init__(self) -> None:
        self.has_nan = self.has_pos_inf = self.has_neg_inf = False
        self.low, self.high = math.inf, -math.inf

    @property
    def is_finite(self) -> bool:
        return not (self.has_nan or self.has_pos_inf or self.has_neg_inf)

    @property
    def has_finite(self) -> bool:
        """Whether there is any finite float; not so for integers and empty tensors."""
        return self.low <= self.high

    @property
    def largest(self) -> float:
        """The largest finite magnitude; 0 when there is none."""
        return max(abs(self.low), abs(self.high)) if self.has_finite else 0.0

    @property
    def words(self) -> str:
        """Which non-finite kinds there are."""
        kinds = {"NaN": self.has_nan, "+Inf": self.has_pos_inf, "-Inf": self.has_neg_inf}
        return " and ".join(name for name, is_there in kinds.items() if is_there)

    def add(self, tensor: Tensor) -> None:
        """Count the values of a tensor of any dtype and layout."""
        for part in float_parts(tensor.detach()):
            if part.dtype in _DIRECT and part.is_contiguous():
                self._add_real(part)
            else:
                for _, piece in pieces(part, _AT_ONCE):
                    self._add_real(piece if part.dtype in _DIRECT else piece.float())

    def _add_real(self, values: Tensor) -> None:
        low, high = torch.stack(values.aminmax()).tolist()  # host sync
        if math.isfinite(low) and math.isfinite(high):
            self.low, self.high = min(self.low, low), max(self.high, high)
            return
        self.has_nan |= bool(values.isnan().any())
        self.has_pos_inf |= bool(values.isposinf().any())
        self.has_neg_inf |= bool(values.isneginf().any())
        finite = values[values.isfinite()]
        if finite.numel():
            self._add_real(finite)


def tally(tensor: Tensor) -> Tally:
    """The tally of one tensor."""
    result = Tally()
    result.add(tensor)
    return result
