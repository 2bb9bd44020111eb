"""Whether a replay went bad as the capsule says: at the same operation, line and value."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stayfinite.records import Incident

_DECIDING = ("operation", "line", "value")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One thing that was compared; what does not decide is only told."""

    name: str
    there: str
    here: str
    decides: bool = True

    @property
    def is_same(self) -> bool:
        return self.there == self.here


def compare_incidents(
    there: Incident, here: Incident | None, *, with_step: bool = True
) -> list[Point]:
    """The incident of the capsule beside that of the replay, which may have had none.

    Where only one step was replayed, its number is not compared.
    """
    is_exact = there.origin is not None and there.origin.exact
    facts = _operation_facts if is_exact else _noticed_facts
    others = {} if here is None else facts(here)
    points: list[Point] = []
    for name, value in facts(there).items():
        other = others.get(name, "none")
        if name == "line" and any(map(os.path.isabs, (value, other))):
            # Files outside the project have another folder on each machine: the name decides.
            value, other = map(os.path.basename, (value, other))
        points.append(Point(name=name, there=value, here=other, decides=name in _DECIDING))
    if with_step:
        step = "none" if here is None else str(here.step)
        points.append(Point(name="step", there=str(there.step), here=step, decides=False))
    return points


def reproduces(points: list[Point]) -> bool:
    """Whether everything that decides is the same."""
    return all(point.is_same for point in points if point.decides)


def _operation_facts(incident: Incident) -> dict[str, str]:
    origin = incident.origin
    if origin is None:
        return {}
    facts = {
        "operation": " in ".join(filter(None, (origin.op or origin.phase, origin.node))),
        "line": f"{origin.file}:{origin.line}" if origin.file else "unknown",
        "module": origin.module or "none",
    }
    if origin.outputs:
        bad = origin.outputs[0]
        facts["value"] = f"{bad.nan_type.word} in {bad.bad_count} of {bad.numel}"
        facts["first at"] = str(list(bad.first_bad_index or ()))
    return facts


def _noticed_facts(incident: Incident) -> dict[str, str]:
    """All that is known where nobody has traced."""
    seen = [f"{report.location} is {report.nan_type.word}" for report in incident.reports[:1]]
    return {"value": "".join(seen) or "unknown"}
