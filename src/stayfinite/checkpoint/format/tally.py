"""What the checks need to know of a tensor's values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stayfinite.detect.parts import float_parts, pieces

_DIRECT = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_AT_ONCE = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """The extremes of the finite values, and which non-finite kinds there are."""

    low: float = math.inf
    high: float = -math.inf
    has_nan: bool = False
    has_pos_inf: bool = False
    has_neg_inf: bool = False

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


def tally(tensor: Tensor) -> Tally:
    """The tally of a tensor of any dtype and layout."""
    return together(
        _of_reals(piece if part.dtype in _DIRECT else piece.float())
        for part in float_parts(tensor.detach())
        for piece in _few(part)
    )


def together(tallies: Iterable[Tally]) -> Tally:
    """The tally of all of them."""
    known = list(tallies)
    if len(known) == 1:
        return known[0]
    return Tally(
        low=min((each.low for each in known), default=math.inf),
        high=max((each.high for each in known), default=-math.inf),
        has_nan=any(each.has_nan for each in known),
        has_pos_inf=any(each.has_pos_inf for each in known),
        has_neg_inf=any(each.has_neg_inf for each in known),
    )


def _few(part: Tensor) -> Iterable[Tensor]:
    """As few pieces as can be looked at without a copy of the whole."""
    if part.dtype in _DIRECT and part.is_contiguous():
        return [part]
    return (piece for _, piece in pieces(part, _AT_ONCE))


def _of_reals(values: Tensor) -> Tally:
    if not values.numel():
        return Tally()
    low, high = (extreme.item() for extreme in values.aminmax())  # host sync
    if math.isfinite(low) and math.isfinite(high):
        return Tally(low=low, high=high)
    finite = _of_reals(values[values.isfinite()])
    return Tally(
        low=finite.low,
        high=finite.high,
        has_nan=bool(values.isnan().any()),
        has_pos_inf=bool(values.isposinf().any()),
        has_neg_inf=bool(values.isneginf().any()),
    )
