"""An incident as the page shows it: the five parts of a report, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from stayfinite.records import Incident, Origin, TensorSummary
from stayfinite.report import wording
from stayfinite.report.columns import FULL, remark
from stayfinite.report.excerpt import SourceLine, excerpt
from stayfinite.report.store.reading import Run
from stayfinite.report.wording import plain

_WIDTH = 96


def incidents_view(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """A line for each incident, the newest first."""
    found = [
        {"run": identity, "number": number, **_line(incident)}
        for identity, run in runs.items()
        for number, incident in enumerate(run.incidents)
    ]
    return sorted(found, key=lambda line: (line["time"], line["step"]), reverse=True)


def incident_view(run: Run, number: int) -> dict[str, Any] | None:
    """All that is known of one incident; None if there is none of this number."""
    if not 0 <= number < len(run.incidents):
        return None
    incident = run.incidents[number]
    script = run.info.script
    folder = Path(script).parent if script else Path(run.info.cwd or ".")
    return {
        **_line(incident),
        "first": _first_operation(incident, folder),
        "tensors": _tensors(incident.origin),
        "fix": plain(incident.diagnosis.fix) if incident.diagnosis else "",
        "patch": _patch(incident),
        "evidence": [plain(each) for each in incident.diagnosis.evidence]
        if incident.diagnosis
        else [],
        "noticed": [
            f"{wording.KINDS[report.nan_type]} in {wording.place(report)}"
            for report in incident.reports
            if report.has_nan
        ],
    }


def _line(incident: Incident) -> dict[str, Any]:
    diagnosis, outcome = incident.diagnosis, incident.outcome
    return {
        "step": incident.step,
        "rank": incident.rank,
        "time": incident.time,
        "headline": wording.headline(incident),
        "spot": wording.spot(incident.origin) if incident.origin else "",
        "cause": plain(diagnosis.cause) if diagnosis else "",
        "why": plain(diagnosis.why) if diagnosis else "",
        "confidence": wording.CONFIDENCE[diagnosis.confidence] if diagnosis else "",
        "done": ": ".join(filter(None, (plain(outcome.strategy), plain(outcome.detail))))
        if outcome
        else "",
    }


def _first_operation(incident: Incident, folder: Path) -> dict[str, Any] | None:
    origin = incident.origin
    if origin is None:
        return None
    lines = excerpt(origin, folder=folder, width=_WIDTH)
    return {
        "spot": wording.spot(origin),
        "source": [{"number": line.number, "parts": _marked(line)} for line in lines],
        "birth": wording.birth(incident, origin) if origin.op else "",
        "op": wording.full_op(origin),
        "exact": origin.exact,
        "path": [
            {"kind": hop.kind, "words": wording.hop_words(hop, first=n == 0)}
            for n, hop in enumerate(origin.lineage)
        ],
        "reached": wording.noticed(incident),
    }


def _marked(line: SourceLine) -> list[str]:
    """The text before the marked part, in it, and after it."""
    start, end = (_characters(line.text, cells) for cells in (line.start, line.end))
    return [line.text[:start], line.text[start:end], line.text[end:]]


def _characters(text: str, cells: int) -> int:
    """How many characters fill so many cells."""
    return next((n for n in range(len(text)) if cell_len(text[:n]) >= cells), len(text))


def _tensors(origin: Origin | None) -> dict[str, Any] | None:
    if origin is None or not (origin.inputs or origin.outputs):
        return None
    rows = [("input", each) for each in origin.inputs]
    rows += [("output", each) for each in origin.outputs]
    return {"columns": [*FULL], "rows": [_tensor(role, tensor) for role, tensor in rows]}


def _tensor(role: str, tensor: TensorSummary) -> dict[str, Any]:
    return {
        "role": role,
        "name": plain(tensor.name),
        "cells": [column(tensor) for column in FULL.values()],
        "remark": remark(tensor),
        "bad": bool(tensor.bad_count),
        "histogram": [[_finite(limit), count] for limit, count in tensor.histogram],
    }


def _finite(limit: float) -> float | None:
    return float(limit) if abs(limit) < float("inf") else None


def _patch(incident: Incident) -> list[str]:
    patch = incident.diagnosis.patch if incident.diagnosis else None
    return [plain(line) for line in (patch or "").split("\n") if line]
