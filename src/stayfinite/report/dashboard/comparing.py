"""Open runs side by side, in the words of `stayfinite compare`."""

from __future__ import annotations

from typing import Any

import numpy as np

from stayfinite.records import to_data
from stayfinite.report.comparison import compare
from stayfinite.report.dashboard.columns import Columns
from stayfinite.report.dashboard.heat import UNKNOWN
from stayfinite.report.dashboard.live import LiveRun
from stayfinite.report.store.reading import Run
from stayfinite.report.summary import Range, RunSummary, summarised


def compare_view(runs: dict[str, LiveRun]) -> dict[str, Any]:
    """The first run against each other one; empty with less than two."""
    readable = {name: run for name, run in runs.items() if run.ranks and not run.problem}
    if len(readable) < 2:
        return {"before": None, "pairs": []}
    (first, before), *others = readable.items()
    pairs = [
        {"run": name, **to_data(compare(before, after, summarise=summary_of))}
        for name, after in others
    ]
    return {"before": first, "pairs": pairs}


def summary_of(run: Run) -> RunSummary:
    """As of `stayfinite show`, from packed columns; without the worst layers."""
    columns = run.series if isinstance(run.series, Columns) else Columns()
    with columns.lock:
        return summarised(
            run,
            spread_of=lambda name: _spread(columns, name),
            terms={name: _spread(columns, f"term:{name}") for name in columns.terms},
            skipped=int(columns.view("skipped").sum()) if len(columns) else 0,
            seconds=columns.lasted,
        )


def _spread(columns: Columns, name: str) -> Range | None:
    values = columns.view(name)
    known = values[np.isfinite(values) & (values != UNKNOWN)]
    if not len(known):
        return None
    return Range(
        first=float(known[0]),
        last=float(known[-1]),
        low=float(known.min()),
        high=float(known.max()),
        median=float(np.median(known)),
    )
