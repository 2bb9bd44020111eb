"""What a page shows of an incident, whether it is a file or the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stayfinite import text as wording
from stayfinite.records import Incident, TensorSummary
from stayfinite.report.excerpt import SourceLine, excerpt


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """One tensor of the bad operation; `facts` are its numbers as text, by their heading."""

    role: str
    name: str
    remark: str
    facts: Mapping[str, str]
    tensor: TensorSummary


@dataclass(frozen=True, kw_only=True)
class IncidentView:
    """An incident in words; what is not known is empty."""

    incident: Incident
    headline: str
    spot: str
    source: list[SourceLine]
    birth: str
    op: str
    tensors: list[TensorView]
    patch: list[str]


def view_of(incident: Incident, *, folder: Path | None, width: int) -> IncidentView:
    """`folder` is that of the script, `width` how many cells of a source line are shown."""
    origin, diagnosis = incident.origin, incident.diagnosis
    inputs = [("input", each) for each in origin.inputs] if origin else []
    outputs = [("output", each) for each in origin.outputs] if origin else []
    patch = (diagnosis.patch or "") if diagnosis else ""
    return IncidentView(
        incident=incident,
        headline=wording.headline(incident),
        spot=wording.spot(origin),
        source=excerpt(origin, folder=folder, width=width) if origin else [],
        birth=wording.birth(incident, origin) if origin else "",
        op=wording.full_op(origin) if origin else "",
        tensors=[
            TensorView(
                role=role,
                name=wording.plain(tensor.name),
                remark=wording.remark(tensor),
                facts={name: column(tensor) for name, column in wording.FULL.items()},
                tensor=tensor,
            )
            for role, tensor in [*inputs, *outputs]
        ],
        patch=[line for line in patch.split("\n") if line],
    )
