"""Whether a replay went bad as the capsule says: at the same operation, line and value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stayfinite.records import Incident


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


def compared(there: Incident, here: Incident | None, *, with_step: bool = True) -> list[Point]:
    """The incident of the capsule beside that of the replay, which may have had none.

    Where only one step was replayed, its number is not compared.
    """
    facts, others = dict(_facts(there)), dict(_facts(here)) if here is not None else {}
    return [
        Point(name=name, there=value, here=others.get(name, "finite"), decides=decides)
        for (name, decides), value in _deciding(facts)
        if with_step or name != "step"
    ]


def reproduces(points: list[Point]) -> bool:
    return bool(points) and all(point.is_same for point in points if point.decides)


def _deciding(facts: dict[str, str]) -> Iterator[tuple[tuple[str, bool], str]]:
    for name, value in facts.items():
        yield (name, name in ("operation", "line", "value")), value


def _facts(incident: Incident) -> Iterator[tuple[str, str]]:
    origin = incident.origin
    if origin is not None and origin.exact:
        yield "operation", " in ".join(filter(None, (origin.op or origin.phase, origin.node)))
        yield "line", f"{origin.file}:{origin.line}" if origin.file else "unknown"
        yield "module", origin.module if origin.module else "none"
        if origin.outputs:
            bad = origin.outputs[0]
            yield "value", f"{bad.nan_type.value} in {bad.bad_count} of {bad.numel}"
            yield "first at", str(list(bad.first_bad_index or ()))
    elif incident.reports:
        report = incident.reports[0]
        yield "operation", "unknown"
        yield "value", f"{report.location} is {report.nan_type.value}"
    yield "step", str(incident.step)
