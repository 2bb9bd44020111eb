"""What is remembered of one tensor of the batches, over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from stayfinite.prevent.data.ends import Ends
from stayfinite.prevent.data.leaves import Leaf
from stayfinite.prevent.data.stats import Extremes, Moments, Ranges, Sample

PICKED = 256
"""Up to so many columns a matrix is a table. Of longer rows so many elements, evenly spread, go
into mean, spread and sample."""

_BLOCK = 1 << 18
_MOST_ROWS = 4096


class Table:
    """The extremes of columns that mean something: features, or the two ends of each row."""

    def __init__(self, columns: int) -> None:
        self.width = columns
        self.largest, self.smallest = Extremes(columns, 1), Extremes(columns, -1)

    def add(self, block: Tensor, places: Tensor, *, is_whole: bool) -> None:
        if is_whole:
            low, high = block.amin(0), block.amax(0)
        else:
            low, high = block.nan_to_num(torch.inf).amin(0), block.nan_to_num(-torch.inf).amax(0)
        self.largest.add(block, high, places)
        self.smallest.add(block, low, places)

    @property
    def extremes(self) -> Tensor:
        """The largest and the smallest values of each column; NaN in places not filled."""
        return torch.cat([self.largest.values, self.smallest.values])

    @property
    def places(self) -> Tensor:
        """Where they were."""
        return torch.cat([self.largest.places, self.smallest.places])


class Tally:
    """One tensor, such as batch.0, over all batches. Of integers only the range is kept.

    A matrix of one width, up to 256, is a table with statistics for each column. Of anything else
    each row gives its smallest and largest value, and some of its elements for mean, spread and
    sample; `channels` are the ranges of columns or channels. Rows wait until they are many.
    """

    def __init__(self, leaf: Leaf) -> None:
        values = leaf.values
        self.path, self.is_sparse = leaf.path, leaf.is_sparse
        self.dtype = str(values.dtype).removeprefix("torch.")
        self.shape: tuple[int, ...] | None = tuple(values.shape[1:])
        self.rows = self.values = 0
        width = flat(values).shape[1] if values.is_floating_point() else 0
        is_table = values.ndim <= 2 and width <= PICKED
        self._picked = width if is_table else min(width, PICKED)
        self.range = Ranges(1)
        self.ends = Table(2)
        self.columns = Table(width) if is_table else None
        self.channels: Ranges | None = None
        self.moments = Moments(width if is_table else 1)
        self.sample = Sample(2 + self._picked)
        # Rows wait here; what is allocated for every batch anew costs more than the arithmetic.
        room = min(_MOST_ROWS, _BLOCK // (2 + self._picked))
        self._block = torch.empty(room, 2 + self._picked, dtype=torch.float64)
        self._places = torch.empty(room, dtype=torch.int64)
        self._waiting = 0

    def add(self, leaf: Leaf, ends: Ends, places: Tensor) -> None:
        """Takes a leaf that is not empty; `places` numbers its rows."""
        if self.shape is not None and self.shape != tuple(leaf.values.shape[1:]):
            self._lose_shape()
        self._add_channels(ends)
        self._widen(ends)
        self.rows += len(leaf.values)
        self.values += leaf.values.numel()
        if leaf.values.is_floating_point():
            self._wait(ends, self._some(flat(leaf.values)), places)

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

    def _widen(self, ends: Ends) -> None:
        if ends.any_bad:
            self.range.add(
                ends.low.nan_to_num(torch.inf).amin(), ends.high.nan_to_num(-torch.inf).amax()
            )
        else:
            self.range.add(ends.low.amin(), ends.high.amax())

    def _lose_shape(self) -> None:
        """Rows of another shape: from now on columns mean nothing."""
        self.settle()
        if self.columns is not None:
            self.columns, self.moments = None, self.moments.pooled()
        self.shape = None

    def _some(self, flat: Tensor) -> Tensor:
        if flat.shape[1] == self._picked:
            return flat
        return flat[:, torch.arange(self._picked) * flat.shape[1] // max(self._picked, 1)]

    def _add_channels(self, ends: Ends) -> None:
        found = ends.channels
        if self.rows == 0 and found is not None:
            self.channels = Ranges(len(found[0]))
        if self.channels is None or found is None or len(found[0]) != len(self.channels.low):
            self.channels = None
        else:
            self.channels.add(*found)

    @property
    def table(self) -> Table:
        """The columns, or the two ends of each row."""
        return self.ends if self.columns is None else self.columns

    @property
    def lowest(self) -> float:
        return float(self.range.low)

    @property
    def highest(self) -> float:
        return float(self.range.high)

    @property
    def elements(self) -> Tensor:
        """The sampled rows, element by element; NaN stands for what is not finite."""
        return self.sample.rows[:, 2:]


def flat(values: Tensor) -> Tensor:
    """Rows of a matrix; one column for a vector."""
    return values.flatten(1) if values.ndim > 1 else values.unsqueeze(1)
