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
from stayfinite.report.summary import Range, RunSummary, incident_row


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
    """As of `stayfinite show`, from packed columns."""
    columns = run.series if isinstance(run.series, Columns) else Columns()
    rows = tuple(incident_row(incident) for incident in run.incidents)
    with columns.lock:
        paces = _spread(columns, "seconds")
        return RunSummary(
            path=str(run.path),
            started=run.info.started,
            script=run.info.script,
            steps=run.steps,
            exit=run.exit,
            ranks=len(run.ranks),
            incidents=rows,
            bad_steps=len({row.step for row in rows}),
            skipped_steps=int(columns.view("skipped").sum()) if len(columns) else 0,
            causes={},
            loss=_spread(columns, "loss"),
            terms={
                name: found
                for name in columns.terms
                if (found := _spread(columns, f"term:{name}")) is not None
            },
            norm=_spread(columns, "norm"),
            scale=_spread(columns, "scale"),
            rate=_spread(columns, "lr"),
            seconds_per_step=paces.median if paces else None,
            seconds=columns.lasted,
            worst_layers=(),
            broken_lines=sum(rank.broken for rank in run.ranks),
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
