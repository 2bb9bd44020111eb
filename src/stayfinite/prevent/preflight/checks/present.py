"""What is not finite already: the loss, a gradient, a weight after its first update."""

from __future__ import annotations

from collections.abc import Iterable

from stayfinite.explain.history import Context
from stayfinite.explain.rules import diagnose
from stayfinite.locate.events import Event
from stayfinite.locate.origin import origin_of
from stayfinite.prevent.preflight.scene import Scene
from stayfinite.prevent.risks import Risk

_NOWHERE = "the first step"


def present_risk(what: str, events: Iterable[Event], scene: Scene) -> Risk:
    """Something is not finite in the first steps; where it began, and why."""
    found = origin_of(events, folder=scene.folder)
    said = f"{what} is not finite in the first steps"
    if found is None:
        fix = "Run the script under `stayfinite run`, which finds where it begins."
        return _risk(f"{said}.", _NOWHERE, "unknown", fix)
    origin = found[0]
    diagnosis = diagnose(origin, Context())
    return _risk(f"{said}: {diagnosis.why}", scene.line_of(origin), diagnosis.cause, diagnosis.fix)


def _risk(what: str, where: str, cause: str, fix: str) -> Risk:
    return Risk(level="high", cause=cause, what=what, where=where, fix=fix, score=2.0)
