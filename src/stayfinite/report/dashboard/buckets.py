"""Many steps as few points: buckets of equal width, each with its mean, least and largest."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from stayfinite.report.dashboard.columns import Columns
from stayfinite.report.dashboard.heat import UNKNOWN

Values = np.ndarray[Any, Any]

_BLOCK = 1 << 16  # steps that are looked at together


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
        values, cuts = columns.view(name), _cuts(columns.view("step"), grid)
        return [int(values[start:end].sum()) for start, end in itertools.pairwise(cuts)]


def _cuts(steps: Values, grid: Grid) -> Values:
    """Where each bucket begins in the columns, and where the last one ends."""
    edges = grid.first + grid.width * np.arange(grid.count + 1, dtype=np.int64)
    return np.searchsorted(steps, edges)


def _column(values: Values, cuts: Values, grid: Grid) -> dict[str, Any]:
    # In blocks: what is computed on the way must not take the memory that the columns save.
    size = max(1, _BLOCK // grid.width)
    blocks = [_block(values, cuts[at : at + size + 1]) for at in range(0, grid.count, size)]
    mid, low, high, bad = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    found: dict[str, Any] = {"mid": _listed(mid)}
    if grid.width > 1:
        found |= {"low": _listed(low), "high": _listed(high)}
    return found | {"bad": bad.astype(int).tolist() if bad.any() else 0}


def _block(values: Values, cuts: Values) -> tuple[Values, Values, Values, Values]:
    """Mean, least, largest and the count of what is not finite, in each bucket."""
    is_filled = cuts[:-1] < cuts[1:]
    mid, low, high, bad = (np.full(len(is_filled), start) for start in (np.nan,) * 3 + (0.0,))
    if is_filled.any():
        inside, starts = values[cuts[0] : cuts[-1]], cuts[:-1][is_filled] - cuts[0]
        is_known = inside != UNKNOWN
        is_finite = np.isfinite(inside) & is_known
        finite = np.where(is_finite, inside, np.nan)
        sums = np.add.reduceat(np.where(is_finite, inside, 0), starts, dtype=np.float64)
        counts = np.add.reduceat(is_finite, starts, dtype=np.int64)
        mid[is_filled] = np.divide(sums, counts, where=counts > 0, out=np.full(len(sums), np.nan))
        low[is_filled] = np.fmin.reduceat(finite, starts)
        high[is_filled] = np.fmax.reduceat(finite, starts)
        bad[is_filled] = np.add.reduceat(is_known & ~is_finite, starts, dtype=np.int64)
    return mid, low, high, bad


def _listed(values: Values) -> list[float | None]:
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]
