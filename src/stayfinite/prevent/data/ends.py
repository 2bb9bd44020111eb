"""The smallest and the largest value of each row of a tensor, and which rows are not finite."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_CHANNELS = 64


@dataclass(frozen=True, eq=False)
class Ends:
    """For each row its finite extremes, NaN where there are none, and whether it is all finite.

    `channels` has the smallest and the largest value of each channel over all rows; None for
    what has no channels.
    """

    low: Tensor
    high: Tensor
    is_bad: Tensor
    channels: tuple[Tensor, Tensor] | None

    @property
    def any_bad(self) -> bool:
        return bool(self.is_bad.any())


def ends_of(values: Tensor) -> Ends:
    """One pass over the memory when all is finite."""
    if not values.numel():
        nothing = torch.full((len(values),), torch.nan, dtype=torch.float64)
        return Ends(nothing, nothing, torch.zeros(len(values), dtype=torch.bool), None)
    low, high = _reduced(values)
    is_bad = ~(low.isfinite() & high.isfinite()).flatten(1).all(1)
    if is_bad.any():
        known = values.isfinite()
        # In place of NaN and Inf: what cannot be an extreme.
        low = _reduced(torch.where(known, values, torch.inf))[0]
        high = _reduced(torch.where(known, values, -torch.inf))[1]
    return Ends(_of_rows(low, -1), _of_rows(high, 1), is_bad, _of_channels(low, high))


def _reduced(values: Tensor) -> tuple[Tensor, Tensor]:
    """Over everything but the row and the channel."""
    if values.ndim == 1:
        return values.unsqueeze(1), values.unsqueeze(1)
    channel = channel_dim(values)
    dims = [dim for dim in range(1, values.ndim) if dim != channel]
    low, high = values.amin(dims), values.amax(dims)
    return (low, high) if low.ndim == 2 else (low.unsqueeze(1), high.unsqueeze(1))


def channel_dim(values: Tensor) -> int | None:
    """The dimension of the channels of images and signals: the second or the last one."""
    if values.ndim < 3:
        return None
    dim = 1 if values.shape[1] <= values.shape[-1] else values.ndim - 1
    return dim if values.shape[dim] <= MOST_CHANNELS else None


def _of_rows(ends: Tensor, sign: int) -> Tensor:
    ends = (ends.amax(1) if sign > 0 else ends.amin(1)).double()
    return torch.where(ends.isfinite(), ends, torch.nan)


def _of_channels(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor] | None:
    return (low.amin(0).double(), high.amax(0).double()) if low.shape[1] > 1 else None
