"""Statistics of columns over a stream of rows, in memory that does not grow with it.

Rows come in blocks of float64, in which NaN stands for what is missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT_ROWS = 512
"""Rows in the random sample that medians and quantiles are taken from."""

KEPT_EXTREMES = 16
"""How many of the largest, and of the smallest, values of each column are kept."""

_SEED = 20_250_601
_IN_CACHE = 1 << 15


class Moments:
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
            self._add(piece, is_whole)

    def _add(self, block: Tensor, is_whole: bool) -> None:
        if is_whole:
            count = torch.full_like(self.count, len(block))
            mean = block.mean(0)
            squares = (block - mean).square_().sum(0)
        else:
            is_known = ~block.isnan()
            count = is_known.sum(0).double()
            mean = torch.where(is_known, block, 0).sum(0) / count.clamp_min(1)
            squares = torch.where(is_known, block - mean, 0).square_().sum(0)
        self._join(count, mean, squares)

    def pooled(self) -> Moments:
        """The same values taken as one column."""
        one = Moments(1)
        one.count = self.count.sum(0, keepdim=True)
        one.mean = (self.mean * self.count).sum(0, keepdim=True) / one.count.clamp_min(1)
        apart = (self.mean - one.mean).square() * self.count
        one._squares = (self._squares + apart).sum(0, keepdim=True)
        return one

    def _join(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        total = (self.count + count).clamp_min(1)
        apart = mean - self.mean
        self._squares += squares + apart * apart * (self.count * count / total)
        self.mean += apart * (count / total)
        self.count += count

    @property
    def std(self) -> Tensor:
        return (self._squares / self.count.clamp_min(1)).sqrt()


class Ranges:
    """The smallest and the largest value of each column."""

    def __init__(self, columns: int) -> None:
        self.low = torch.full((columns,), torch.inf, dtype=torch.float64)
        self.high = -self.low

    def add(self, low: Tensor, high: Tensor) -> None:
        """Takes the smallest and largest values of a block; NaN where a column has none."""
        self.low = torch.fmin(self.low, low.double())
        self.high = torch.fmax(self.high, high.double())


class Sample:
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
    """The largest values of each column, or with sign -1 the smallest, and where they were.

    `places` are whatever numbers came with the rows. Places that nothing fills are NaN.
    """

    def __init__(self, columns: int, sign: int, size: int = KEPT_EXTREMES) -> None:
        self._sign = sign
        self._seen = 0
        self._sizes = torch.full((size, columns), -torch.inf, dtype=torch.float64)
        self.places = torch.full((size, columns), -1)

    def add(self, block: Tensor, ends: Tensor, places: Tensor) -> None:
        """Takes rows, the largest (or smallest) value of each column, and a number for each row."""
        columns = (ends * self._sign > self._sizes[-1]).nonzero().flatten()
        if not len(columns):
            self._seen += len(block)
            return
        start, sizes = 0, block[:, columns] * self._sign
        while start < len(block):
            # Few rows at first: they set the bar for the others.
            end = start + max(self._seen, len(self._sizes))
            self._take(columns, sizes[start:end], places[start:end])
            self._seen += len(sizes[start:end])
            start = end

    def _take(self, columns: Tensor, sizes: Tensor, places: Tensor) -> None:
        rows, where = (sizes > self._sizes[-1, columns]).nonzero(as_tuple=True)
        if len(rows):
            new = _stacked(sizes[rows, where], places[rows], where, len(columns))
            self._keep(columns, *new)

    def _keep(self, columns: Tensor, sizes: Tensor, numbers: Tensor) -> None:
        sizes = torch.cat([self._sizes[:, columns], sizes])
        numbers = torch.cat([self.places[:, columns], numbers])
        # Sorted, so that the last one is what a new value has to beat.
        self._sizes[:, columns], chosen = sizes.topk(len(self._sizes), dim=0)
        self.places[:, columns] = numbers.gather(0, chosen)

    @property
    def values(self) -> Tensor:
        return torch.where(self._sizes.isfinite(), self._sizes * self._sign, torch.nan)


def _stacked(values: Tensor, numbers: Tensor, columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
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
