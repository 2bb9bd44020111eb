"""Many steps as few points: buckets of equal width, each with its mean, least and largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stayfinite.report.dashboard.columns import Columns
from stayfinite.report.dashboard.heat import UNKNOWN

Values = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Buckets over steps; runs that are laid over one another share them."""

    first: int
    width: int
    count: int

    @property
    def starts(self) -> Values:
        return self.first + self.width * np.arange(self.count, dtype=np.int64)


def grid_over(first: int, last: int, *, most: int) -> Grid:
    """At most so many buckets; their width is 1, 2 or 5 times a power of ten.

    So the buckets stay the same while a run grows, and the picture does not shiver.
    """
    least, width = max(1, -(-(last - first + 1) // max(most - 1, 1))), 1
    for factor in _round_numbers():
        width = factor
        if width >= least:
            break
    start = first // width * width
    return Grid(first=start, width=width, count=max(0, (last - start) // width + 1))


def _round_numbers() -> Any:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def bucketed(columns: Columns, names: list[str], grid: Grid) -> dict[str, dict[str, Any]]:
    """For each column, `mid`, `low` and `high` of the finite values, and the `bad` ones' count.

    None where nothing finite is known. `low` and `high` are left out where buckets are single
    steps.
    """
    with columns.lock:
        cuts = _cuts(columns.view("step"), grid)
        return {name: _column(columns.view(name), cuts, grid) for name in names}


def totals(columns: Columns, name: str, grid: Grid) -> list[int]:
    """The sum of a column of whole numbers in each bucket."""
    with columns.lock:
        cuts = _cuts(columns.view("step"), grid)
        sums = np.concatenate(([0], np.cumsum(columns.view(name), dtype=np.int64)))
        return [int(value) for value in sums[cuts[1:]] - sums[cuts[:-1]]]


def _cuts(steps: Values, grid: Grid) -> Values:
    """Where each bucket begins in the columns, and where the last one ends."""
    edges = grid.first + grid.width * np.arange(grid.count + 1, dtype=np.int64)
    return np.searchsorted(steps, edges)


def _column(values: Values, cuts: Values, grid: Grid) -> dict[str, Any]:
    is_filled = cuts[:-1] < cuts[1:]
    if not is_filled.any():
        return {"mid": [None] * grid.count, "bad": 0}
    inside, starts = values[cuts[0] : cuts[-1]], cuts[:-1][is_filled] - cuts[0]
    is_known = inside != UNKNOWN
    finite = np.where(np.isfinite(inside) & is_known, inside, np.nan)
    counts = np.add.reduceat(~np.isnan(finite), starts, dtype=np.int64)
    sums = np.add.reduceat(np.nan_to_num(finite), starts, dtype=np.float64)
    bad = np.add.reduceat(is_known & ~np.isfinite(inside), starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: dict[str, Any] = {"mid": _laid_out(sums / counts, is_filled)}
    if grid.width > 1:
        found["low"] = _laid_out(np.fmin.reduceat(finite, starts), is_filled)
        found["high"] = _laid_out(np.fmax.reduceat(finite, starts), is_filled)
    found["bad"] = _whole(bad, is_filled) if bad.any() else 0
    return found


def _laid_out(values: Values, is_filled: Values) -> list[float | None]:
    row = np.full(len(is_filled), np.nan)
    row[is_filled] = values
    return [None if value != value else float(f"{value:.6g}") for value in row.tolist()]


def _whole(values: Values, is_filled: Values) -> list[int]:
    row = np.zeros(len(is_filled), np.int64)
    row[is_filled] = values
    return row.tolist()
