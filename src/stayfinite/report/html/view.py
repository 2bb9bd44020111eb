"""What the page shows of an incident, worked out before it is laid out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stayfinite.records import Diagnosis, Incident, TensorSummary
from stayfinite.report import wording
from stayfinite.report.columns import FULL, remark
from stayfinite.report.html.histogram import doublings_left, histogram
from stayfinite.report.html.lineage import Lineage, lineage
from stayfinite.report.html.source import CodeLine, code_lines
from stayfinite.report.html.svg import Plot
from stayfinite.report.html.words import Causes, title_of

_MOST_TENSORS = 8


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """One tensor: its numbers, and its values by size."""

    role: str
    name: str
    remark: str
    facts: dict[str, str]
    plot: Plot | None
    is_bad: bool


@dataclass(frozen=True, kw_only=True)
class PatchLine:
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class IncidentView:
    """The five parts of an incident, its lineage and what surrounds it."""

    anchor: str
    incident: Incident
    headline: str
    title: str
    spot: str
    code: list[CodeLine]
    birth: str
    names: str
    tensors: list[TensorView]
    more_tensors: int
    patch: list[PatchLine]
    checks: list[str]
    lineage: Lineage | None
    timeline: list[Plot]
    also_at: list[int]
    source_left_out: bool


def incident_view(
    incident: Incident,
    *,
    anchor: str,
    causes: Causes,
    folder: Path | None,
    timeline: list[Plot],
    afterwards: str = "",
    also_at: Sequence[int] = (),
    source_left_out: bool = False,
) -> IncidentView:
    """`afterwards` says how training went on."""
    origin, diagnosis = incident.origin, incident.diagnosis
    tensors = list(_tensors(incident))
    return IncidentView(
        anchor=anchor,
        incident=incident,
        headline=wording.headline(incident),
        title=title_of(diagnosis.cause, causes) if diagnosis else "Not explained",
        spot=_spot(incident, source_left_out),
        code=code_lines(origin, folder=folder),
        birth=wording.birth(incident, origin) if origin else "",
        names=wording.full_op(origin) if origin else "",
        tensors=tensors[:_MOST_TENSORS],
        more_tensors=max(len(tensors) - _MOST_TENSORS, 0),
        patch=_patch(diagnosis),
        checks=list(filter(None, (*_checks(incident), afterwards))),
        lineage=lineage(incident),
        timeline=timeline,
        also_at=list(also_at),
        source_left_out=source_left_out,
    )


def _spot(incident: Incident, source_left_out: bool) -> str:
    spot = wording.spot(incident.origin)
    return spot.replace("(no source line)", "(source left out)") if source_left_out else spot


def _tensors(incident: Incident) -> Iterator[TensorView]:
    origin = incident.origin
    if origin is None:
        return
    yield from (_tensor("input", each) for each in origin.inputs)
    yield from (_tensor("output", each) for each in origin.outputs)


def _tensor(role: str, tensor: TensorSummary) -> TensorView:
    return TensorView(
        role=role,
        name=wording.plain(tensor.name),
        remark=remark(tensor),
        facts={
            **{name: column(tensor) for name, column in FULL.items()},
            "doublings left": doublings_left(tensor),
        },
        plot=histogram(tensor),
        is_bad=bool(tensor.bad_count),
    )


def _patch(diagnosis: Diagnosis | None) -> list[PatchLine]:
    lines = (diagnosis.patch or "").rstrip("\n").split("\n") if diagnosis else []
    return [PatchLine(kind=_patch_kind(line), text=line) for line in lines if line]


def _patch_kind(line: str) -> str:
    if line.startswith(("+++ ", "--- ", "@@")):
        return "place"
    return {"+": "new", "-": "old"}.get(line[0], "same")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")


def _checks(incident: Incident) -> Iterator[str]:
    origin, diagnosis = incident.origin, incident.diagnosis
    if origin is not None:
        seen = "The operation was seen at work, with the inputs that are shown here."
        yield seen if origin.exact else _sentence(wording.INFERRED)
    yield from map(_sentence, diagnosis.evidence if diagnosis else ())
    if diagnosis is not None and diagnosis.confidence != "proven":
        yield (
            "The cause follows from the operation and its inputs; no replay has proven it. "
            "Apply the fix, run again, and put the two runs side by side: "
            "`stayfinite compare BEFORE AFTER`."
        )
