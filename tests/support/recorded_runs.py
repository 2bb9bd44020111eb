"""Run directories with known content, written as a training would write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stayfinite.records import Forecast, Incident, RunResult, to_json
from stayfinite.report.store.writer import RESULT, End, LayerRow, RunInfo, StepRow, StoreWriter

INFO = RunInfo(
    started=1_700_000_000.0,
    script="/home/me/train.py",
    command=("train.py", "--lr", "0.1"),
    cwd="/home/me",
    host="node7",
    python="3.12.1",
    platform="Linux",
    versions={"torch": "2.10.0"},
    commit="0123abc",
    seed=7,
    config={"on_nan": "recover", "folder": "/home/me"},
)
_MOST_INCIDENTS = 50  # that a guard keeps; the result has them all
LAYERS = ("encoder.0.weight", "encoder.0.bias", "head.weight")


def record(
    folder: Path,
    *,
    steps: int = 60,
    incidents: Sequence[Incident] = (),
    forecasts: Sequence[Forecast] = (),
    layers: Sequence[str] = LAYERS,
    terms: Sequence[str] = (),
    scale: float | None = None,
    end: str | None = "finite",
    has_result: bool = True,
    skipped_by_scaler: int = 0,
    seconds: float = 0.1,
    **info: Any,
) -> Path:
    """A run of smooth losses and norms; its bad steps are skipped, with a loss of NaN."""
    writer = StoreWriter(folder, lambda: replace(INFO, **info))
    bad = {incident.step for incident in incidents}
    rows = [_row(step, step in bad, scale, terms, seconds) for step in range(steps)]
    writer.steps(rows[:1])
    writer.layers(layers)
    for step in range(0, steps, 16):
        writer.norms(LayerRow(step=step, **_sizes(step, len(layers))))
    writer.steps(rows[1:])
    for forecast in forecasts:
        writer.forecast(forecast)
    for incident in incidents[:_MOST_INCIDENTS]:
        writer.incident(incident)
    exit_ = "incident" if incidents else "finite"
    if end is not None:
        writer.end(End(exit=exit_ if end == "finite" else end, time=float(steps)))
    writer.close()
    if has_result:
        counted = {"steps": steps, "skipped_by_scaler": skipped_by_scaler, "exit": exit_}
        result = RunResult(incidents=tuple(incidents), **counted)
        (folder / RESULT).write_text(to_json(result), encoding="utf-8")
    return folder


def _row(
    step: int, is_bad: bool, scale: float | None, terms: Sequence[str], seconds: float
) -> StepRow:
    loss = 2.0 / (1 + step / 10) + 0.05 * math.sin(step)
    return StepRow(
        step=step,
        time=seconds * step,
        seconds=seconds,
        loss=math.nan if is_bad else loss,
        norm=None if is_bad else 1.0 + 0.5 * math.cos(step / 3),
        lr=0.1,
        scale=scale,
        skipped=is_bad,
        terms={name: loss / (2 + at) for at, name in enumerate(terms)} or None,
    )


def _sizes(step: int, layers: int) -> dict[str, list[float]]:
    norms = [10 ** (-3 + 4 * at / layers + 0.3 * math.sin(step / 50)) for at in range(layers)]
    return {"norms": norms, "headroom": [120.0] * layers}
