"""What the page asks for, as plain data: steps as few points, incidents, comparisons."""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stayfinite import text as wording
from stayfinite.records import Incident, to_data
from stayfinite.report.dashboard.live_runs import (
    FIRST,
    UNKNOWN,
    Columns,
    Entry,
    LiveRun,
    RunIndex,
)
from stayfinite.report.incident_view import IncidentView, view_of
from stayfinite.report.run_summary import compare, forecast_rows, has_recovered
from stayfinite.text import FULL, plain

Query = Mapping[str, str]
View = Callable[[RunIndex, Query], Any]
"""Gives the answer to a question, or None where there is nothing."""

METRICS = ("loss", "norm", "lr", "scale", "seconds")
_MOST_POINTS = 2000
_MOST_CELLS = 400_000
_MOST_COLUMNS = 400
_WIDTH = 96  # cells of a source line


def as_json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    """A number for JSON, with the digits that it has; not finite ones are words."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else to_data(value)
    return value


def ids_in(query: Query) -> list[str]:
    return [each for each in query.get("runs", "").split(",") if each][:16]


def _number(query: Query, name: str, default: int) -> int:
    text = query.get(name, "")
    is_number = text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 16
    return int(text) if is_number else default


def _opened(index: RunIndex, query: Query) -> dict[str, LiveRun]:
    """The open runs of these names; names that are not there are passed over."""
    found = {identity: index.open(identity) for identity in ids_in(query)}
    return {identity: run for identity, run in found.items() if run is not None}


def runs_view(index: RunIndex) -> dict[str, Any]:
    """The list of runs, newest first."""
    entries = sorted(index.entries.values(), key=lambda each: each.path.name, reverse=True)
    return {
        "places": [str(place) for place in index.places],
        "looked": index.has_looked,
        "runs": [_run_view(entry) for entry in entries],
    }


def _run_view(entry: Entry) -> dict[str, Any]:
    """One run in the list; `state` is how it ended, or "running", "starting", "unreadable"."""
    run, problem = entry.glance, entry.glance.problem
    ended = ("recovered" if has_recovered(run) else run.exit) if run.has_begun else "starting"
    view: dict[str, Any] = {
        "id": entry.id,
        "name": entry.path.name,
        "state": "unreadable" if problem else ended,
        "problem": problem,
        "version": run.version,
        "progress": None,
    }
    if problem or not run.has_begun:
        return view
    if entry.live is not None:
        view["version"] = entry.live.version
        view["progress"] = 1.0 if entry.is_read else round(entry.live.progress, 2)
    info, last = run.info, run.last
    return view | {
        "script": Path(info.script).name,
        "command": " ".join(info.command),
        "started": info.started,
        "lasted": _plain(last.get("time")),
        "host": info.host,
        "commit": info.commit,
        "dirty": info.is_dirty,
        "seed": None if info.seed is None else str(info.seed),
        "versions": info.versions,
        "ranks": len(run.ranks),
        "world": info.world,
        "steps": run.steps,
        "last": {name: _plain(last.get(name)) for name in METRICS},
        "incidents": len(run.incidents),
        "forecasts": len(run.forecasts),
        "spikes": sum(forecast.is_spike for forecast in run.forecasts),
        "broken": sum(rank.broken for rank in (entry.live or run).ranks),
    }


def series_view(index: RunIndex, query: Query) -> dict[str, Any]:
    """The curves of several runs over the same buckets of steps."""
    runs, optimizer = _opened(index, query), _number(query, "optimizer", FIRST)
    columns = {identity: run.columns(optimizer) for identity, run in runs.items()}
    ends = [(each["step"][0], each["step"][-1]) for each in columns.values() if len(each)]
    low = _number(query, "first", min((end[0] for end in ends), default=0))
    high = _number(query, "last", max((end[1] for end in ends), default=-1))
    points = _number(query, "points", 0) or 800
    grid = grid_over(low, high, most=max(2, min(points, _MOST_POINTS)))
    return {
        "steps": [int(step) for step in grid.edges[:-1]],
        "width": grid.width,
        "runs": {identity: _curves(each, grid) for identity, each in columns.items()},
        "optimizers": sorted({n for run in runs.values() for n in run.optimizers}),
    }


def _curves(columns: Columns, grid: Grid) -> dict[str, Any]:
    if not len(columns):
        return {"count": 0, "curves": {}, "skipped": []}
    skipped = totals(columns, "skipped", grid)
    names = [*METRICS, *(f"term:{name}" for name in columns.terms)]
    return {
        "count": len(columns),
        "curves": buckets_of(columns, names, grid),
        "skipped": skipped if any(skipped) else [],
        "skips": int(sum(skipped)),
    }


Values = np.ndarray[Any, Any]

_BLOCK = 1 << 16  # steps that are looked at together


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Buckets over steps; runs that are laid over one another share them."""

    first: int
    width: int
    count: int

    @property
    def edges(self) -> Values:
        """Where each bucket begins, and where the last one ends."""
        return self.first + self.width * np.arange(self.count + 1, dtype=np.int64)


def grid_over(first: int, last: int, *, most: int) -> Grid:
    """At most so many buckets; their width is 1, 2 or 5 times a power of ten.

    So the buckets stay the same while a run grows, and the picture does not shiver.
    """
    least = max(1, -(-(last - first + 1) // max(most - 1, 1)))
    rounds = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    width = next(number for number in rounds if number >= least)
    start = first // width * width
    return Grid(first=start, width=width, count=max(0, (last - start) // width + 1))


def buckets_of(columns: Columns, names: list[str], grid: Grid) -> dict[str, dict[str, Any]]:
    """For each column, `mid`, `low` and `high` of the finite values, and the `bad` ones' count.

    None where nothing finite is known. `low` and `high` are left out where buckets are single
    steps.
    """
    with columns.lock:
        cuts = np.searchsorted(columns.view("step"), grid.edges)
        return {name: _column(columns.view(name), cuts, grid) for name in names}


def totals(columns: Columns, name: str, grid: Grid) -> list[int]:
    """The sum of a column of whole numbers in each bucket."""
    with columns.lock:
        # The view is a function's own, so that it is gone before the lock is.
        return _sums(columns.view(name), np.searchsorted(columns.view("step"), grid.edges))


def _sums(values: Values, cuts: Values) -> list[int]:
    return [int(values[start:end].sum()) for start, end in itertools.pairwise(cuts)]


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


def heat_view(index: RunIndex, query: Query) -> dict[str, Any] | None:
    """Layers x sampled steps; the values are float32 in base64, layer by layer."""
    run = index.open(query.get("run", ""))
    if run is None:
        return None
    columns = run.columns(_number(query, "optimizer", FIRST))
    window = {"first": _number(query, "first", 0), "last": _number(query, "last", 1 << 62)}
    with columns.lock:
        heat = columns.heat
        most = max(50, min(_MOST_COLUMNS, _MOST_CELLS // max(len(heat.names), 1)))
        steps, values = heat.table(query.get("kind", "norm"), most=most, **window)
        names = list(heat.names)
    data = base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()
    return {"layers": names, "steps": steps, "values": data, "unknown": UNKNOWN}


def layer_view(index: RunIndex, query: Query) -> dict[str, Any] | None:
    """One layer at every sampled step."""
    run, name = index.open(query.get("run", "")), query.get("name", "")
    if run is None:
        return None
    columns = run.columns(_number(query, "optimizer", FIRST))
    with columns.lock:
        found = columns.heat.history(name)
    if found is None:
        return None
    shown = {
        key: [None if value == UNKNOWN else _plain(value) for value in values]
        for key, values in found.items()
    }
    return {"layer": name, **shown}


def incidents_view(index: RunIndex, query: Query) -> dict[str, Any]:
    """A line for each incident and each forecast, the newest first; spikes come last."""
    runs = {identity: index.known(identity) for identity in ids_in(query)}
    found = [
        {"run": identity, "number": number, **_line(incident)}
        for identity, run in runs.items()
        for number, incident in enumerate(run.incidents if run is not None else ())
    ]
    newest_first = sorted(found, key=lambda line: (line["time"], line["step"]), reverse=True)
    foretold = [
        {"run": identity, **to_data(row)}
        for identity, run in runs.items()
        for row in (forecast_rows(run) if run is not None else ())
    ]
    latest_first = sorted(foretold, key=lambda line: (line["is_spike"], -line["step"]))
    return {"incidents": newest_first, "forecasts": latest_first}


def incident_view(index: RunIndex, query: Query) -> dict[str, Any] | None:
    """All that is known of one incident; None if there is none of this number."""
    run, number = index.known(query.get("run", "")), _number(query, "number", -1)
    if run is None or not 0 <= number < len(run.incidents):
        return None
    incident, script = run.incidents[number], run.info.script
    folder = Path(script).parent if script else Path(run.info.cwd or ".")
    view, diagnosis = view_of(incident, folder=folder, width=_WIDTH), incident.diagnosis
    return {
        **_line(incident),
        "first": _first_operation(view),
        "tensors": _tensors(view),
        "fix": plain(diagnosis.fix) if diagnosis else "",
        "patch": [plain(line) for line in view.patch],
        "evidence": [plain(each) for each in diagnosis.evidence] if diagnosis else [],
        "noticed": [
            f"{wording.KINDS[report.nan_type]} in {wording.place(report)}"
            for report in incident.reports
            if report.has_nan
        ],
    }


def _line(incident: Incident) -> dict[str, Any]:
    diagnosis = incident.diagnosis
    return {
        "step": incident.step,
        "rank": incident.rank,
        "time": incident.time,
        "headline": wording.headline(incident),
        "spot": wording.spot(incident.origin) if incident.origin else "",
        "library": wording.library(incident.origin),
        "cause": plain(diagnosis.cause) if diagnosis else "",
        "why": plain(diagnosis.why) if diagnosis else "",
        "confidence": wording.CONFIDENCE[diagnosis.confidence] if diagnosis else "",
        "done": plain(wording.what_was_done(incident)) if incident.outcome else "",
    }


def _first_operation(view: IncidentView) -> dict[str, Any] | None:
    origin = view.incident.origin
    if origin is None:
        return None
    return {
        "spot": view.spot,
        "library": view.library,
        "source": [{"number": line.number, "parts": line.parts} for line in view.source],
        "birth": view.birth if origin.op else "",
        "op": view.op,
        "exact": origin.exact,
        "path": [
            {"kind": hop.kind, "words": wording.hop_words(hop, first=n == 0)}
            for n, hop in enumerate(origin.lineage)
        ],
        "reached": wording.noticed(view.incident),
    }


def _tensors(view: IncidentView) -> dict[str, Any] | None:
    if not view.tensors:
        return None
    rows = [
        {
            "role": each.role,
            "name": each.name,
            "cells": list(each.facts.values()),
            "remark": each.remark,
            "bad": bool(each.tensor.bad_count),
            "histogram": [
                [float(limit) if abs(limit) < math.inf else None, count]
                for limit, count in each.tensor.histogram
            ],
        }
        for each in view.tensors
    ]
    return {"columns": [*FULL], "rows": rows}


def compare_view(index: RunIndex, query: Query) -> dict[str, Any]:
    """The first run against each other one; empty with less than two."""
    runs = _opened(index, query)
    readable = {name: run for name, run in runs.items() if run.ranks and not run.problem}
    if len(readable) < 2:
        return {"before": None, "pairs": []}
    (first, before), *others = readable.items()
    pairs = [{"run": name, **to_data(compare(before, after))} for name, after in others]
    return {"before": first, "pairs": pairs}


VIEWS: dict[str, View] = {
    "series": series_view,
    "heat": heat_view,
    "layer": layer_view,
    "incidents": incidents_view,
    "incident": incident_view,
    "compare": compare_view,
}
"""What can be asked for, by the last word of its path."""
