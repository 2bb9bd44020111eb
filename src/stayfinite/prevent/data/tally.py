"""What is remembered of one tensor of the batches, over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from stayfinite.prevent.data.ends import Ends
from stayfinite.prevent.data.leaves import Leaf
from stayfinite.prevent.data.stats import Extremes, Moments, Ranges, Sample

WIDEST_TABLE = 2048
"""Up to so many columns a matrix is a table: each column has statistics of its own."""

PICKED = 256
"""Of longer rows so many elements, evenly spread, go into mean, spread and sample."""


class Table:
    """The extremes of columns that mean something: features, or the two ends of each row."""

    def __init__(self, columns: int) -> None:
        self.ranges = Ranges(columns)
        self.largest, self.smallest = Extremes(columns), Extremes(columns)

    def add(self, block: Tensor, places: Tensor) -> bool:
        """Whether any of these rows is now among the extremes."""
        low = block.nan_to_num(torch.inf).amin(0)
        high = block.nan_to_num(-torch.inf).amax(0)
        self.ranges.add(low, high)
        is_high = self.largest.add(block, high, places)
        return self.smallest.add(-block, -low, places) or is_high


class Tally:
    """One tensor, such as batch.0, over all batches.

    A matrix of one width is a table, with statistics for each column. Of anything else each row
    gives its smallest and largest value, and some of its elements for mean, spread and sample.
    """

    def __init__(self, leaf: Leaf) -> None:
        values = leaf.values
        self.path, self.is_sparse = leaf.path, leaf.is_sparse
        self.dtype = str(values.dtype).removeprefix("torch.")
        self.shape: tuple[int, ...] | None = tuple(values.shape[1:])
        self.rows = self.values = 0
        width = flat(values).shape[1]
        is_table = values.ndim <= 2 and width <= WIDEST_TABLE
        self._picked = width if is_table else min(width, PICKED)
        self.ends = Table(2)
        self.columns = Table(width) if is_table else None
        self.channels: Ranges | None = None
        self.moments = Moments(width if is_table else 1)
        self.sample = Sample(2 + self._picked)

    def add(self, leaf: Leaf, ends: Ends, places: Tensor) -> bool:
        """Whether any of these rows is now among the extremes; `places` numbers the rows.

        The leaf must not be empty.
        """
        if self.shape != tuple(leaf.values.shape[1:]):
            self._lose_shape()
        self._add_channels(ends)
        self.rows += len(leaf.values)
        self.values += leaf.values.numel()
        both = torch.stack([ends.low, ends.high], dim=1)
        block = self._some(flat(leaf.values)).double()
        if ends.any_bad:
            block = torch.where(block.isfinite(), block, torch.nan)
        self.sample.add(torch.cat([both, block], dim=1))
        self.moments.add(block if self.columns else block.reshape(-1, 1))
        is_column_end = self.columns is not None and self.columns.add(block, places)
        return self.ends.add(both, places) or is_column_end

    def _lose_shape(self) -> None:
        """Rows of another shape: from now on columns mean nothing."""
        if self.columns is not None:
            self.columns, self.moments = None, self.moments.pooled()
        self.shape = None

    def _some(self, flat: Tensor) -> Tensor:
        if flat.shape[1] == self._picked:
            return flat
        return flat[:, torch.arange(self._picked) * flat.shape[1] // max(self._picked, 1)]

    def _add_channels(self, ends: Ends) -> None:
        if ends.channels is None:
            self.channels = None
        elif self.rows == 0:
            self.channels = Ranges(len(ends.channels[0]))
        if self.channels is not None and ends.channels is not None:
            same = len(self.channels.low) == len(ends.channels[0])
            self.channels = self.channels if same else None
        if self.channels is not None and ends.channels is not None:
            self.channels.add(*ends.channels)

    @property
    def table(self) -> Table:
        """The columns, or the two ends of each row."""
        return self.ends if self.columns is None else self.columns

    @property
    def highest(self) -> float:
        return float(self.ends.ranges.high[1])

    @property
    def lowest(self) -> float:
        return float(self.ends.ranges.low[0])

    @property
    def elements(self) -> Tensor:
        """The sampled rows, element by element; NaN stands for what is not finite."""
        return self.sample.rows[:, 2:]


def flat(values: Tensor) -> Tensor:
    """Rows of a matrix; one column for a vector."""
    return values.flatten(1) if values.ndim > 1 else values.unsqueeze(1)
