"""Rows with values out of all proportion to the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stayfinite.prevent.data.inspection import Inspection
from stayfinite.prevent.data.judgement import Judgement, named_columns
from stayfinite.prevent.data.outliers import Limits, limits_of, usual_size
from stayfinite.prevent.data.roles import Role
from stayfinite.prevent.data.tally import Table, Tally
from stayfinite.prevent.data.wording import Said

_WILD = 1000.0


def limits_for(inspection: Inspection, tally: Tally) -> Limits | None:
    """Beyond which values of each column are outliers; None where nothing can be said.

    The columns are those of the tally's table.
    """
    is_judged = inspection.roles[tally.path] in (Role.INPUT, Role.TARGET)
    if not is_judged or not tally.dtype.startswith("float"):
        return None
    rows = tally.sample.rows
    rows = rows[:, :2] if tally.columns is None else rows[:, 2:]
    return limits_of(rows, _values(tally.table), usual_size(tally.elements) or 1.0)


def outliers(inspection: Inspection, tally: Tally) -> Iterator[Judgement]:
    limits = limits_for(inspection, tally)
    is_out = None if limits is None else limits.beyond(_values(tally.table))
    if limits is not None and is_out is not None and is_out.any():
        yield _judged(tally, limits, is_out)


def _values(table: Table) -> Tensor:
    """NaN where there are fewer rows than places for extremes."""
    values = torch.cat([table.largest.values, -table.smallest.values])
    return torch.where(values.isfinite(), values, torch.nan)


def _judged(tally: Tally, limits: Limits, is_out: Tensor) -> Judgement:
    table = tally.table
    places = torch.cat([table.largest.places, table.smallest.places])[is_out].unique().tolist()
    values, columns = _values(table)[is_out], is_out.nonzero()[:, 1]
    times = limits.times(values, columns)
    worst = int(times.argmax())
    value, column = float(values[worst]), columns[worst]
    is_more = bool(is_out.reshape(2, -1, is_out.shape[1]).all(1).any())
    rows = f"{'At least ' if is_more else ''}{len(places):,} row{'s' * (len(places) != 1)}"
    usual = f"{limits.center[column]:.3g} ± {limits.usual[column]:.3g}"
    said = Said(
        level="high" if times[worst] >= _WILD else "medium",
        what=f"{rows} out of scale{_where(tally, columns)}: up to {value:.4g}, "
        f"where {usual} is usual.",
        fix="Look at these rows. A mark for what is missing, such as -9999, has to go; a long tail "
        "can be bounded, `x.clamp(low, high)`, or shortened, `torch.log1p(x)`.",
        cause="unnormalized_input",
        evidence={"worst": value, "times": float(times[worst]), "rows": len(places)},
    )
    return Judgement(kind="outlier", said=said, places=places)


def _where(tally: Tally, columns: Tensor) -> str:
    if tally.columns is None or len(tally.columns.ranges.low) == 1:
        return ""
    return f" in {named_columns(columns.unique().tolist())}"
