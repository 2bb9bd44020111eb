"""The smallest and the largest value of each row of a tensor, and which rows are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_CHANNELS = 64
MOST_COLUMNS = 2048


@dataclass(frozen=True, eq=False)
class Ends:
    """For each row its finite extremes, NaN where there are none, and whether it is not finite.

    `channels` has the smallest and the largest value of each channel, or column of a matrix, over
    all rows; None where there are none or too many.
    """

    low: Tensor
    high: Tensor
    is_bad: Tensor
    any_bad: bool = False
    channels: tuple[Tensor, Tensor] | None = None


def ends_of(values: Tensor) -> Ends:
    """One pass over the memory for each end when all is finite."""
    is_bad = torch.zeros(len(values), dtype=torch.bool)
    if not values.numel():
        nothing = torch.full((len(values),), torch.nan, dtype=torch.float64)
        return Ends(nothing, nothing, is_bad)
    low, high = _reduced(values)
    floors = tops = values
    if values.is_floating_point() and not _surely_finite(low, high):
        is_bad = ~(low.isfinite() & high.isfinite()).all(1)
        known = values.isfinite()
        # In place of NaN and Inf: what cannot be an extreme.
        floors, tops = torch.where(known, values, torch.inf), torch.where(known, values, -torch.inf)
        low, high = _reduced(floors)[0], _reduced(tops)[1]
    any_bad = bool(is_bad.any())
    channels = _channels(floors, tops, low, high)
    low, high = low.amin(1).double(), high.amax(1).double()
    if any_bad:
        has_none = low > high
        low, high = low.masked_fill(has_none, torch.nan), high.masked_fill(has_none, torch.nan)
    return Ends(low, high, is_bad, any_bad, channels)


def _channels(
    floors: Tensor, tops: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor] | None:
    if floors.ndim == 2 and floors.is_floating_point() and floors.shape[1] <= MOST_COLUMNS:
        return floors.amin(0).double(), tops.amax(0).double()
    return (low.amin(0).double(), high.amax(0).double()) if low.shape[1] > 1 else None


def _surely_finite(low: Tensor, high: Tensor) -> bool:
    # The difference is NaN or Inf where one of the two is, and so is the sum.
    return math.isfinite(float((high.double() - low.double()).sum()))


def _reduced(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest over everything but the row and the channel: two matrices."""
    if values.ndim == 1:
        return values.unsqueeze(1), values.unsqueeze(1)
    channel = channel_dim(values)
    dims = [dim for dim in range(1, values.ndim) if dim != channel]
    low, high = values.amin(dims), values.amax(dims)
    return (low, high) if channel is not None else (low.unsqueeze(1), high.unsqueeze(1))


def channel_dim(values: Tensor) -> int | None:
    """The dimension of the channels of images and signals: the second or the last one."""
    if values.ndim < 3:
        return None
    dim = 1 if values.shape[1] <= values.shape[-1] else values.ndim - 1
    return dim if values.shape[dim] <= MOST_CHANNELS else None
