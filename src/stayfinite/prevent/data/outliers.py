"""Which values are out of scale, judged by medians and quantiles that they cannot move."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST_ROWS = 32
"""With fewer rows nothing is called an outlier."""

FACTOR = 30.0
"""An outlier is so many times farther from the median than ordinary values are."""

_GAP = 5.0
_FEWEST_APART = 8
_OF_CENTER = 0.1
_ASKED = 1 << 16


@dataclass(frozen=True, eq=False)
class Limits:
    """Beyond these a value of the column is an outlier. `usual` is an ordinary distance."""

    low: Tensor
    high: Tensor
    center: Tensor
    usual: Tensor

    def beyond(self, block: Tensor) -> Tensor:
        return (block < self.low) | (block > self.high)

    def times(self, values: Tensor, columns: Tensor) -> Tensor:
        """How many times farther from the median than is usual in their columns."""
        return (values - self.center[columns]).abs() / self.usual[columns]


def limits_of(sample: Tensor, extremes: Tensor, scale: float) -> Limits | None:
    """Limits for each column of a sample of rows; None if there are too few.

    `extremes` are the largest and smallest values of each column. `scale` is what is usual where
    nearly all values of a column are the same. NaN stands for missing values.

    A value is an outlier if it is 30 times farther from the median than three times the upper
    quartile of the distances, and there is a gap of 5 times before it: a long tail has no gaps.
    Without a gap it has to be 30 times the 99th percentile. So up to a quarter of the rows may be
    outliers and do not hide one another.
    """
    if len(sample) < FEWEST_ROWS:
        return None
    columns = sample.T.contiguous()  # sorting is faster along memory
    center = columns.nanmedian(1, keepdim=True).values
    distances = (columns - center).abs()
    quartile, tail = _quantiles(distances)
    usual = _usual(distances, quartile, center.squeeze(1), scale)
    ordered = torch.cat([distances, (extremes.T - center).abs()], dim=1).sort(1).values
    past_tail = FACTOR * torch.maximum(tail.nan_to_num(0), usual)
    edge = torch.minimum(_after_gap(ordered, FACTOR * usual), past_tail)
    center = center.squeeze(1)
    return Limits(center - edge, center + edge, center, usual)


def _quantiles(distances: Tensor) -> tuple[Tensor, Tensor]:
    """The upper quartile and the 99th percentile of each row."""
    parts = torch.tensor([0.75, 0.99], dtype=torch.float64)
    quartile, tail = distances.nanquantile(parts, dim=1, interpolation="higher")
    return quartile, tail


def _usual(distances: Tensor, quartile: Tensor, center: Tensor, scale: float) -> Tensor:
    apart = torch.where(distances > 0, distances, torch.nan)
    is_rare = (distances > 0).sum(1) < _FEWEST_APART
    # Most values are the same: one-hot, counts, zeros of padding. The others give the scale.
    is_mostly_same = (distances == 0).sum(1) * 2 > distances.isfinite().sum(1)
    usual = torch.where(is_mostly_same, apart.nanmedian(1).values, quartile) * 3
    usual = torch.where(is_mostly_same & is_rare, scale, usual)
    usual = torch.maximum(usual.nan_to_num(scale), _OF_CENTER * center.abs().nan_to_num(0))
    return torch.where(usual > 0, usual, scale)


def _after_gap(ordered: Tensor, least: Tensor) -> Tensor:
    """For each row the middle of the first gap before a large distance; Inf if there is none."""
    before, after, least = ordered[:, :-1], ordered[:, 1:], least.unsqueeze(1)
    is_edge = (after > least) & (after >= _GAP * before)
    middle = torch.where(is_edge, (before * after).sqrt().maximum(least), torch.inf)
    return middle.amin(1)


def usual_size(elements: Tensor) -> float:
    """The median size of values that are not 0; 0 if there are none. Of many, some are asked."""
    rows = max(1, _ASKED // max(elements.shape[1], 1))
    sizes = elements[:rows].abs()
    sizes = sizes[sizes > 0]
    return float(sizes.median()) if len(sizes) else 0.0
