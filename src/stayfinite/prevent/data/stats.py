"""Statistics of columns over a stream of rows, in memory that does not grow with it."""

from __future__ import annotations

import torch
from torch import Tensor

KEPT_ROWS = 1024
"""Rows in the random sample that medians and quantiles are taken from."""

KEPT_EXTREMES = 32
"""How many of the largest, and of the smallest, values of each column are kept."""

_SEED = 20_250_601


class Moments:
    """Count, mean and variance of each column, over finite values.

    A block is centred on its own mean and joined with what came before (Chan, Golub, LeVeque
    1979), all in float64: no difference of large sums.
    """

    def __init__(self, columns: int) -> None:
        self.count = torch.zeros(columns, dtype=torch.float64)
        self.mean = torch.zeros(columns, dtype=torch.float64)
        self._squares = torch.zeros(columns, dtype=torch.float64)

    def add(self, block: Tensor) -> None:
        """Takes float64 rows; NaN stands for what is missing."""
        is_known = block.isfinite()
        if is_known.all():
            count = torch.full_like(self.count, len(block))
            mean = block.mean(0)
            squares = (block - mean).square_().sum(0)
        else:
            count = is_known.sum(0).double()
            mean = block.nan_to_num(0, 0, 0).sum(0) / count.clamp_min(1)
            squares = torch.where(is_known, block - mean, 0).square_().sum(0)
        self._join(count, mean, squares)

    def pooled(self) -> Moments:
        """The same values taken as one column."""
        one = Moments(1)
        for count, mean, squares in zip(self.count, self.mean, self._squares, strict=True):
            one._join(count, mean, squares)
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
    """The smallest and the largest finite value of each column."""

    def __init__(self, columns: int) -> None:
        self.low = torch.full((columns,), torch.inf, dtype=torch.float64)
        self.high = -self.low

    def add(self, low: Tensor, high: Tensor) -> None:
        self.low = torch.minimum(self.low, low.double())
        self.high = torch.maximum(self.high, high.double())

    @property
    def is_constant(self) -> Tensor:
        return self.low == self.high


class Sample:
    """A uniform random sample of the rows seen: those with the smallest of random keys.

    The keys come from a generator of its own, so that a stream always gives the same sample.
    """

    def __init__(self, columns: int, size: int = KEPT_ROWS) -> None:
        self._generator = torch.Generator("cpu").manual_seed(_SEED)
        self._keys = torch.full((size,), torch.inf, dtype=torch.float64)
        self._rows = torch.full((size, columns), torch.nan, dtype=torch.float64)

    def add(self, block: Tensor) -> None:
        keys = torch.rand(len(block), generator=self._generator, dtype=torch.float64)
        new = (keys < self._keys.max()).nonzero().flatten()
        if not len(new):
            return
        size = len(self._keys)
        kept = torch.cat([self._keys, keys[new]]).topk(size, largest=False, sorted=False).indices
        is_free = torch.ones(size, dtype=torch.bool)
        is_free[kept[kept < size]] = False
        free, new = is_free.nonzero().flatten(), new[kept[kept >= size] - size]
        self._keys[free], self._rows[free] = keys[new], block[new]

    @property
    def rows(self) -> Tensor:
        """The kept rows, in no special order."""
        return self._rows[self._keys.isfinite()]


class Extremes:
    """The largest values of each column, and where they were; give -x for the smallest.

    `places` are whatever numbers came with the rows.
    """

    def __init__(self, columns: int, size: int = KEPT_EXTREMES) -> None:
        self.values = torch.full((size, columns), -torch.inf, dtype=torch.float64)
        self.places = torch.full((size, columns), -1)

    def add(self, block: Tensor, highest: Tensor, places: Tensor) -> bool:
        """Takes float64 rows, the largest value of each column, and a number for each row.

        Whether any of them was kept.
        """
        new = (highest > self.values[-1]).nonzero().flatten()
        if not len(new):
            return False
        size = len(self.values)
        some = block[:, new].nan_to_num(-torch.inf, torch.inf, -torch.inf)
        values = torch.cat([self.values[:, new], some])
        where = torch.cat([self.places[:, new], places.unsqueeze(1).expand(-1, len(new))])
        # Sorted, so that the last one is what a new value has to beat.
        self.values[:, new], chosen = values.topk(size, dim=0)
        self.places[:, new] = where.gather(0, chosen)
        return True
