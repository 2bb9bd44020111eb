"""Rows with values out of all proportion to the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stayfinite.prevent.data.ends import Ends
from stayfinite.prevent.data.inspection import Inspection
from stayfinite.prevent.data.judgement import Judgement, named_columns
from stayfinite.prevent.data.leaves import Leaf
from stayfinite.prevent.data.outliers import Limits, limits_of, usual_size
from stayfinite.prevent.data.roles import Role
from stayfinite.prevent.data.tally import Tally, flat
from stayfinite.prevent.data.wording import Said

_WILD = 1000.0


@dataclass(frozen=True, eq=False)
class Fence:
    """What lies outside is an outlier: by the columns of a table, or by the ends of each row."""

    limits: Limits
    has_columns: bool

    def rows_outside(self, leaf: Leaf, ends: Ends) -> Tensor:
        """For each row of the leaf whether it reaches outside."""
        block = torch.stack([ends.low, ends.high], dim=1)
        if self.has_columns:
            block = flat(leaf.values).double()
            block = torch.where(block.isfinite(), block, torch.nan)
        if block.shape[1] != len(self.limits.center):
            return torch.zeros(len(block), dtype=torch.bool)
        return self.limits.beyond(block).any(1)


def fences(inspection: Inspection) -> dict[str, Fence]:
    """For each tensor that has outliers what they are outside of."""
    made = {path: fence_for(inspection, tally) for path, tally in inspection.tallies.items()}
    return {
        path: fence
        for path, fence in made.items()
        if fence and fence.limits.beyond(inspection.tallies[path].table.extremes).any()
    }


def fence_for(inspection: Inspection, tally: Tally) -> Fence | None:
    """None where nothing can be said: for other than floating inputs and targets, or few rows."""
    is_judged = inspection.roles[tally.path] in (Role.INPUT, Role.TARGET)
    if not is_judged or not tally.dtype.startswith("float"):
        return None
    has_columns, rows = tally.columns is not None, tally.sample.rows
    rows = rows[:, 2:] if has_columns else rows[:, :2]
    limits = limits_of(rows, tally.table.extremes, usual_size(tally.elements) or 1.0)
    return None if limits is None else Fence(limits, has_columns)


def outliers(inspection: Inspection, tally: Tally) -> Iterator[Judgement]:
    fence = fence_for(inspection, tally)
    if fence is not None:
        is_out = fence.limits.beyond(tally.table.extremes)
        if is_out.any():
            yield _judged(inspection, tally, fence.limits, is_out)


def _judged(inspection: Inspection, tally: Tally, limits: Limits, is_out: Tensor) -> Judgement:
    table = tally.table
    places = table.places[is_out].unique().tolist()
    is_more = bool(is_out.reshape(2, -1, is_out.shape[1]).all(1).any())
    if tally.path in inspection.outliers:  # of a second pass, which saw all of them
        places, is_more = inspection.outliers[tally.path], False
    values, columns = table.extremes[is_out], is_out.nonzero()[:, 1]
    times = limits.times(values, columns)
    worst = int(times.argmax())
    value, column = float(values[worst]), columns[worst]
    rows = f"{'At least ' if is_more else ''}{len(places):,} row{'s' * (len(places) != 1)}"
    usual = f"{limits.center[column]:.3g} ± {limits.usual[column]:.3g}"
    said = Said(
        level="high" if min(float(times[worst]), abs(value)) >= _WILD else "medium",
        what=f"{rows} out of scale{_where(tally, columns)}: up to {value:.4g}, "
        f"where {usual} is usual.",
        fix="Look at these rows. A mark for what is missing, such as -9999, has to go; a long tail "
        "can be bounded, `x.clamp(low, high)`, or shortened, `torch.log1p(x)`.",
        cause="unnormalized_input",
        evidence={"worst": value, "times": float(times[worst]), "rows": len(places)},
    )
    return Judgement(kind="outlier", path=tally.path, said=said, places=places)


def _where(tally: Tally, columns: Tensor) -> str:
    if tally.columns is None or tally.columns.width == 1:
        return ""
    return f" in {named_columns(columns.unique().tolist())}"
