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
    """Limits for each column of a sample of rows; NaN and Inf in it stand for missing values.

    `extremes` are the largest and smallest values of each column. `scale` is what is usual where
    nearly all values of a column are the same.

    A value is an outlier if it is 30 times farther from the median than three times the upper
    quartile of the distances, and there is a gap of 5 times before it: a long tail has no gaps.
    Without a gap it has to be 30 times the 99th percentile. So up to a quarter of the rows may be
    outliers and do not hide one another.
    """
    if len(sample) < FEWEST_ROWS:
        return None
    center = sample.nanmedian(0).values
    distances = _known(sample - center)
    usual = _usual(distances, center, scale)
    ordered = torch.cat([distances, _known(extremes - center)]).sort(0).values
    edge = torch.minimum(_after_gap(ordered, FACTOR * usual), _past_tail(distances, usual))
    return Limits(center - edge, center + edge, center, usual)


def _known(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values.abs(), torch.nan)


def _usual(distances: Tensor, center: Tensor, scale: float) -> Tensor:
    quartile = _quantile(distances, 0.75)
    apart = torch.where(distances > 0, distances, torch.nan)
    middle = apart.nanmedian(0).values
    is_rare = (distances > 0).sum(0) < _FEWEST_APART
    # Most values are the same: one-hot, counts, zeros of padding. The others give the scale.
    is_mostly_same = (distances == 0).sum(0) * 2 > distances.isfinite().sum(0)
    usual = torch.where(is_mostly_same, middle, quartile) * 3
    usual = torch.where(is_mostly_same & is_rare, scale, usual)
    usual = torch.maximum(usual.nan_to_num(scale), _OF_CENTER * center.abs().nan_to_num(0))
    return torch.where(usual > 0, usual, scale)


def _after_gap(ordered: Tensor, least: Tensor) -> Tensor:
    """For each column the middle of the first gap before a large distance; Inf if there is none."""
    before, after = ordered[:-1], ordered[1:]
    is_edge = (after > least) & (after >= _GAP * before)
    middle = torch.where(is_edge, (before * after).sqrt().maximum(least), torch.inf)
    return middle.amin(0)


def _past_tail(distances: Tensor, usual: Tensor) -> Tensor:
    return FACTOR * torch.maximum(_quantile(distances, 0.99).nan_to_num(0), usual)


def _quantile(values: Tensor, part: float) -> Tensor:
    return values.nanquantile(part, dim=0, interpolation="higher")


def usual_size(elements: Tensor) -> float:
    """The median size of the values that are not 0; 0 if there are none."""
    sizes = elements.abs()
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    return float(sizes.median()) if len(sizes) else 0.0
