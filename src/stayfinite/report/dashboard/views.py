"""What the page asks for, as plain data."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stayfinite.records import to_data
from stayfinite.report.dashboard.buckets import bucketed, grid_over, totals
from stayfinite.report.dashboard.columns import Columns
from stayfinite.report.dashboard.heat import UNKNOWN
from stayfinite.report.dashboard.live import GlancedRun, LiveRun
from stayfinite.report.dashboard.shelf import Entry, Shelf
from stayfinite.report.store.reading import Run

METRICS = ("loss", "norm", "lr", "scale", "seconds")
_MOST_POINTS = 2000
_MOST_CELLS = 400_000
_MOST_COLUMNS = 400


def shelf_view(shelf: Shelf) -> dict[str, Any]:
    """The list of runs, newest first."""
    entries = sorted(shelf.entries.values(), key=lambda each: each.path.name, reverse=True)
    return {
        "places": [str(place) for place in shelf.places],
        "looked": shelf.has_looked,
        "runs": [run_view(entry) for entry in entries],
    }


def run_view(entry: Entry) -> dict[str, Any]:
    """One run in the list; `state` is how it ended, or "running", "starting", "unreadable"."""
    run, problem = entry.glance, entry.glance.problem
    view: dict[str, Any] = {
        "id": entry.id,
        "name": entry.path.name,
        "state": "unreadable" if problem else run.exit if run.has_begun else "starting",
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
        "broken": sum(rank.broken for rank in (entry.live or run).ranks),
    }


def series_view(
    runs: dict[str, LiveRun],
    *,
    first: int | None = None,
    last: int | None = None,
    points: int = 800,
    optimizer: int | None = None,
) -> dict[str, Any]:
    """The curves of several runs over the same buckets of steps."""
    columns = {identity: run.columns(optimizer) for identity, run in runs.items()}
    ends = [(each["step"][0], each["step"][-1]) for each in columns.values() if len(each)]
    low = min((end[0] for end in ends), default=0) if first is None else first
    high = max((end[1] for end in ends), default=-1) if last is None else last
    grid = grid_over(low, high, most=max(2, min(points, _MOST_POINTS)))
    return {
        "steps": [int(step) for step in grid.starts],
        "width": grid.width,
        "runs": {identity: _curves(each, grid) for identity, each in columns.items()},
        "optimizers": sorted({n for run in runs.values() for n in run.optimizers}),
    }


def _curves(columns: Columns, grid: Any) -> dict[str, Any]:
    names = [*METRICS, *(f"term:{name}" for name in columns.terms)]
    if not len(columns):
        return {"count": 0, "curves": {}, "skipped": []}
    found = bucketed(columns, names, grid)
    skipped = totals(columns, "skipped", grid)
    return {
        "count": len(columns),
        "curves": found,
        "skipped": skipped if any(skipped) else [],
        "skips": int(sum(skipped)),
    }


def heat_view(
    run: LiveRun, *, kind: str, first: int, last: int, optimizer: int | None = None
) -> dict[str, Any]:
    """Layers x sampled steps; the values are float32 in base64, layer by layer."""
    columns = run.columns(optimizer)
    with columns.lock:
        heat = columns.heat
        most = max(50, min(_MOST_COLUMNS, _MOST_CELLS // max(len(heat.names), 1)))
        steps, values = heat.table(kind, most=most, first=first, last=last)
        names = list(heat.names)
    data = base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()
    return {"layers": names, "steps": steps, "values": data, "unknown": UNKNOWN}


def layer_view(run: LiveRun, name: str, optimizer: int | None = None) -> dict[str, Any] | None:
    columns = run.columns(optimizer)
    with columns.lock:
        found = columns.heat.history(name)
    if found is None:
        return None
    shown = {key: [_known(value) for value in found[key]] for key in ("norms", "headroom")}
    return {"layer": name, "steps": found["steps"], **shown}


def forecasts_view(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """Forecasts as they were recorded, the newest first."""
    found = [
        {"run": identity, "forecast": to_data(each)}
        for identity, run in runs.items()
        for rank in run.ranks
        for each in rank.forecasts
    ]
    return found[::-1]


def as_json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def chosen(shelf: Shelf, identities: Sequence[str]) -> dict[str, LiveRun]:
    """The open runs of these names; names that are not there are passed over."""
    found = {identity: shelf.open(identity) for identity in identities if identity}
    return {identity: run for identity, run in found.items() if run is not None}


def glanced(shelf: Shelf, identities: Sequence[str]) -> dict[str, GlancedRun]:
    """What the list knows of these runs: their incidents, while their steps are still read."""
    found = {identity: shelf.entries.get(identity) for identity in identities}
    return {identity: entry.glance for identity, entry in found.items() if entry is not None}


def _known(value: float) -> float | str | None:
    return None if value == UNKNOWN else _plain(value)


def _plain(value: Any) -> Any:
    """A number for JSON, with the digits that it has; not finite ones are words."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else to_data(value)
    return value
