"""Statistics of all batches, in memory that does not grow, and what is out of scale.

Rows come in blocks of float64, in which NaN stands for what is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stayfinite.prevent.data.batch import Ends, Leaf

PICKED = 256
"""Up to so many columns a matrix is a table. Of longer rows so many elements, evenly spread, go
into mean, spread and sample."""

KEPT_ROWS = 512
"""Rows in the random sample that medians and quantiles are taken from."""

KEPT_EXTREMES = 16
"""How many of the largest, and of the smallest, values of each column are kept."""

FEWEST_ROWS = 32
"""With fewer rows nothing is called an outlier."""

FACTOR = 30.0
"""An outlier is so many times farther from the median than ordinary values are."""

_BLOCK = 1 << 18
_MOST_ROWS = 4096
_SEED = 20_250_601
_IN_CACHE = 1 << 15
_GAP = 5.0
_FEWEST_APART = 8
_OF_CENTER = 0.1
_ASKED = 1 << 16


class TensorStatistics:
    """One tensor, such as batch.0, over all batches. Of integers only the range is kept.

    A matrix of one width, up to 256, is a table with statistics for each column. Of anything else
    each row gives its smallest and largest value, and some of its elements for mean, spread and
    sample; `channels` are the smallest and the largest value of each column or channel. Rows wait
    until they are many.
    """

    def __init__(self, leaf: Leaf) -> None:
        values = leaf.values
        self.path, self.is_sparse = leaf.path, leaf.is_sparse
        self.dtype = str(values.dtype).removeprefix("torch.")
        self.shape: tuple[int, ...] | None = tuple(values.shape[1:])
        self.rows = self.values = 0
        self.lowest, self.highest = math.inf, -math.inf
        width = flat(values).shape[1] if values.is_floating_point() else 0
        is_table = values.ndim <= 2 and width <= PICKED
        self._picked = min(width, PICKED)
        self.ends = Extremes(2)
        self.columns = Extremes(width) if is_table else None
        self.channels: tuple[Tensor, Tensor] | None = None
        self.moments = RunningMoments(width if is_table else 1)
        self.sample = RowSample(2 + self._picked)
        # Rows wait here; what is allocated for every batch anew costs more than the arithmetic.
        most = min(_MOST_ROWS, _BLOCK // (2 + self._picked))
        self._block = torch.empty(most, 2 + self._picked, dtype=torch.float64)
        self._places = torch.empty(most, dtype=torch.int64)
        self._waiting = 0

    def add(self, leaf: Leaf, places: Tensor) -> None:
        """Takes a leaf that is not empty; `places` numbers its rows."""
        ends = leaf.ends
        if self.shape is not None and self.shape != tuple(leaf.values.shape[1:]):
            # Rows of another shape: from now on columns mean nothing.
            self.settle()
            if self.columns is not None:
                self.columns, self.moments = None, self.moments.pooled()
            self.shape = None
        if self.rows == 0:
            self.channels = ends.channels
        elif self.channels and ends.channels and len(self.channels[0]) == len(ends.channels[0]):
            (low, high), (new_low, new_high) = self.channels, ends.channels
            self.channels = low.minimum(new_low), high.maximum(new_high)
        else:
            self.channels = None
        low, high = ends.low, ends.high
        if ends.any_bad:
            low, high = low.nan_to_num(torch.inf), high.nan_to_num(-torch.inf)
        self.lowest = min(self.lowest, float(low.amin()))
        self.highest = max(self.highest, float(high.amax()))
        self.rows += len(leaf.values)
        self.values += leaf.values.numel()
        if leaf.values.is_floating_point():
            elements = flat(leaf.values)
            if (width := elements.shape[1]) != self._picked:
                elements = elements[:, torch.arange(self._picked) * width // max(self._picked, 1)]
            self._wait(ends, elements, places)

    def _wait(self, ends: Ends, elements: Tensor, places: Tensor) -> None:
        done = 0
        while done < len(places):
            taken = min(len(places) - done, len(self._places) - self._waiting)
            here, there = slice(self._waiting, self._waiting + taken), slice(done, done + taken)
            self._block[here, 0], self._block[here, 1] = ends.low[there], ends.high[there]
            self._block[here, 2:], self._places[here] = elements[there], places[there]
            self._waiting, done = self._waiting + taken, done + taken
            if self._waiting == len(self._places):
                self.settle()

    def settle(self) -> None:
        """Takes in the rows that wait."""
        if not self._waiting:
            return
        rows, places = self._block[: self._waiting], self._places[: self._waiting]
        self._waiting = 0
        is_whole = bool(rows.sum().isfinite())
        if not is_whole:
            rows.masked_fill_(~rows.isfinite(), torch.nan)
        self.sample.add(rows)
        self.ends.add(rows[:, :2], places, is_whole=is_whole)
        block = rows[:, 2:]
        if self.columns is not None:
            self.columns.add(block, places, is_whole=is_whole)
        self.moments.add(block if self.columns else block.reshape(-1, 1), is_whole=is_whole)

    @property
    def table(self) -> Extremes:
        """The columns, or the two ends of each row."""
        return self.ends if self.columns is None else self.columns

    @property
    def elements(self) -> Tensor:
        """The sampled rows, element by element; NaN stands for what is not finite."""
        return self.sample.rows[:, 2:]

    @property
    def usual(self) -> float:
        """The median size of what is not 0."""
        return usual_size(self.elements)

    def limits(self) -> OutlierLimits | None:
        """For each column of a table, or for the two ends of each row; None for too few rows."""
        rows = self.sample.rows[:, :2] if self.columns is None else self.elements
        return limits_of(rows, self.table.values, self.usual or 1.0)

    def rows_beyond(self, limits: OutlierLimits, leaf: Leaf) -> Tensor:
        """For each row of the leaf whether it has an outlier, by what `limits` gave."""
        block = torch.stack([leaf.ends.low, leaf.ends.high], dim=1)
        if self.columns is not None:
            block = flat(leaf.values).double()
            block = torch.where(block.isfinite(), block, torch.nan)
        if block.shape[1] != len(limits.center):
            return torch.zeros(len(block), dtype=torch.bool)
        return limits.beyond(block).any(1)


def flat(values: Tensor) -> Tensor:
    """Rows of a matrix; one column for a vector."""
    return values.flatten(1) if values.ndim > 1 else values.unsqueeze(1)


class RunningMoments:
    """Count, mean and variance of each column.

    A block is centred on its own mean and joined with what came before (Chan, Golub, LeVeque
    1979): no difference of large sums.
    """

    def __init__(self, columns: int) -> None:
        self.count = torch.zeros(columns, dtype=torch.float64)
        self.mean = torch.zeros(columns, dtype=torch.float64)
        self._squares = torch.zeros(columns, dtype=torch.float64)

    def add(self, block: Tensor, *, is_whole: bool) -> None:
        """`is_whole` says that nothing is missing."""
        for piece in block.split(max(1, _IN_CACHE // block.shape[1])):
            if is_whole:
                count = torch.full_like(self.count, len(piece))
                mean = piece.mean(0)
                squares = (piece - mean).square_().sum(0)
            else:
                is_known = ~piece.isnan()
                count = is_known.sum(0).double()
                mean = torch.where(is_known, piece, 0).sum(0) / count.clamp_min(1)
                squares = torch.where(is_known, piece - mean, 0).square_().sum(0)
            total = (self.count + count).clamp_min(1)
            apart = mean - self.mean
            self._squares += squares + apart * apart * (self.count * count / total)
            self.mean += apart * (count / total)
            self.count += count

    def pooled(self) -> RunningMoments:
        """The same values taken as one column."""
        one = RunningMoments(1)
        one.count = self.count.sum(0, keepdim=True)
        one.mean = (self.mean * self.count).sum(0, keepdim=True) / one.count.clamp_min(1)
        apart = (self.mean - one.mean).square() * self.count
        one._squares = (self._squares + apart).sum(0, keepdim=True)
        return one

    @property
    def std(self) -> Tensor:
        return (self._squares / self.count.clamp_min(1)).sqrt()


class RowSample:
    """A uniform random sample of the rows seen: those with the smallest of random keys.

    The keys come from a generator of its own, so that a stream always gives the same sample.
    """

    def __init__(self, columns: int, size: int = KEPT_ROWS) -> None:
        self._generator = torch.Generator("cpu").manual_seed(_SEED)
        self._keys = torch.full((size,), torch.inf, dtype=torch.float64)
        self._rows = torch.full((size, columns), torch.nan, dtype=torch.float64)
        self._worst = torch.inf

    def add(self, block: Tensor) -> None:
        keys = torch.rand(len(block), generator=self._generator, dtype=torch.float64)
        new = (keys < self._worst).nonzero().flatten()
        if not len(new):
            return
        size = len(self._keys)
        kept = torch.cat([self._keys, keys[new]]).topk(size, largest=False, sorted=False).indices
        is_free = torch.ones(size, dtype=torch.bool)
        is_free[kept[kept < size]] = False
        free, new = is_free.nonzero().flatten(), new[kept[kept >= size] - size]
        self._keys[free] = keys[new]
        self._rows[free] = block[new]
        self._worst = float(self._keys.max())

    @property
    def rows(self) -> Tensor:
        """The kept rows, in no special order."""
        return self._rows[self._keys.isfinite()]


class Extremes:
    """The largest and the smallest values of each column, and where they were.

    Columns mean something: features, or the two ends of each row. `places` are whatever numbers
    came with the rows.
    """

    def __init__(self, columns: int, size: int = KEPT_EXTREMES) -> None:
        self.width = columns
        self._seen = 0
        # What is small is large with the other sign: each column is kept twice.
        self._sizes = torch.full((size, 2 * columns), -torch.inf, dtype=torch.float64)
        self._places = torch.full((size, 2 * columns), -1)

    def add(self, block: Tensor, places: Tensor, *, is_whole: bool) -> None:
        """Takes rows, and a number for each; `is_whole` says that nothing is missing."""
        if is_whole:
            low, high = block.amin(0), block.amax(0)
        else:
            low, high = block.nan_to_num(torch.inf).amin(0), block.nan_to_num(-torch.inf).amax(0)
        columns = (torch.cat([high, -low]) > self._sizes[-1]).nonzero().flatten()
        if not len(columns):
            self._seen += len(block)
            return
        signs = torch.where(columns < self.width, 1.0, -1.0)
        start, sizes = 0, block[:, columns % self.width] * signs
        while start < len(block):
            # Few rows at first: they set the bar for the others.
            end = start + max(self._seen, len(self._sizes))
            self._take(columns, sizes[start:end], places[start:end])
            self._seen += len(sizes[start:end])
            start = end

    def _take(self, columns: Tensor, sizes: Tensor, places: Tensor) -> None:
        rows, where = (sizes > self._sizes[-1, columns]).nonzero(as_tuple=True)
        if not len(rows):
            return
        new, numbers = _stack(sizes[rows, where], places[rows], where, len(columns))
        sizes = torch.cat([self._sizes[:, columns], new])
        numbers = torch.cat([self._places[:, columns], numbers])
        # Sorted, so that the last one is what a new value has to beat.
        self._sizes[:, columns], chosen = sizes.topk(len(self._sizes), dim=0)
        self._places[:, columns] = numbers.gather(0, chosen)

    @property
    def values(self) -> Tensor:
        """The largest of each column, then the smallest; NaN in places not filled."""
        sizes = torch.where(self._sizes.isfinite(), self._sizes, torch.nan)
        return torch.cat([sizes[:, : self.width], -sizes[:, self.width :]])

    @property
    def places(self) -> Tensor:
        """Where they were."""
        return torch.cat([self._places[:, : self.width], self._places[:, self.width :]])


def _stack(values: Tensor, numbers: Tensor, columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The values of each column on top of one another, and their numbers beside them."""
    order = columns.argsort(stable=True)
    counts = columns.bincount(minlength=width)
    starts = counts.cumsum(0) - counts
    columns = columns[order]
    rows = torch.arange(len(columns)) - starts[columns]
    stacked = torch.full((int(counts.max()), width), -torch.inf, dtype=torch.float64)
    beside = torch.full(stacked.shape, -1)
    stacked[rows, columns], beside[rows, columns] = values[order], numbers[order]
    return stacked, beside


@dataclass(frozen=True, eq=False)
class OutlierLimits:
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


def limits_of(sample: Tensor, extremes: Tensor, scale: float) -> OutlierLimits | None:
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
    middle = columns.nanmedian(1, keepdim=True).values
    distances, center = (columns - middle).abs(), middle.squeeze(1)
    parts = torch.tensor([0.75, 0.99], dtype=torch.float64)
    quartile, tail = distances.nanquantile(parts, dim=1, interpolation="higher")
    usual = _usual_distances(distances, quartile, center, scale)
    past_tail = FACTOR * torch.maximum(tail.nan_to_num(0), usual)
    # The middle of the first gap before a large distance; Inf if there is none.
    ordered = torch.cat([distances, (extremes.T - middle).abs()], dim=1).sort(1).values
    before, after, least = ordered[:, :-1], ordered[:, 1:], (FACTOR * usual).unsqueeze(1)
    is_edge = (after > least) & (after >= _GAP * before)
    gap = torch.where(is_edge, (before * after).sqrt().maximum(least), torch.inf).amin(1)
    edge = torch.minimum(gap, past_tail)
    return OutlierLimits(center - edge, center + edge, center, usual)


def _usual_distances(distances: Tensor, quartile: Tensor, center: Tensor, scale: float) -> Tensor:
    apart = torch.where(distances > 0, distances, torch.nan)
    is_rare = (distances > 0).sum(1) < _FEWEST_APART
    # Most values are the same: one-hot, counts, zeros of padding. The others give the scale.
    is_mostly_same = (distances == 0).sum(1) * 2 > distances.isfinite().sum(1)
    usual = torch.where(is_mostly_same, apart.nanmedian(1).values, quartile) * 3
    usual = torch.where(is_mostly_same & is_rare, scale, usual)
    usual = torch.maximum(usual.nan_to_num(scale), _OF_CENTER * center.abs().nan_to_num(0))
    return torch.where(usual > 0, usual, scale)


def usual_size(elements: Tensor) -> float:
    """The median size of values that are not 0; 0 if there are none. Of many, some are asked."""
    rows = max(1, _ASKED // max(elements.shape[1], 1))
    sizes = elements[:rows].abs()
    sizes = sizes[sizes > 0]
    return float(sizes.median()) if len(sizes) else 0.0
