"""The incidents of a guard in a notebook, and a run without its source.

Neither jinja2 nor rich is loaded before something is shown: rich draws from python's generator
when it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stayfinite.causes import CAUSES
from stayfinite.records import Hop, Incident, Origin
from stayfinite.report.sinks import unchanged_random
from stayfinite.report.store.writer import RunInfo


class GuardReport:
    """What a guard has seen up to now; later incidents do not change it."""

    def __init__(
        self, incidents: Sequence[Incident], *, steps: int, folder: Path | None = None
    ) -> None:
        """`folder` is what the files of the incidents are named relative to."""
        self.incidents = tuple(incidents)
        self.steps = steps
        self._folder = folder

    def _repr_html_(self) -> str:
        with unchanged_random():
            from stayfinite.report.html.page import incidents_fragment

            return incidents_fragment(self.incidents, steps=self.steps, folder=self._folder)

    def __repr__(self) -> str:
        with unchanged_random():
            from stayfinite.report.html.page import groups_of, verdict_of
            from stayfinite.report.terminal import as_text

            texts = [as_text(first, folder=self._folder) for first, _ in groups_of(self.incidents)]
        return "\n".join([verdict_of(len(self.incidents), self.steps).text, *texts]).rstrip()


LEFT_OUT = "(removed)"
_CODE = re.compile(r"`[^`]*`")
_FILE = re.compile(r"[^\s'\"(]*(?:[/\\][^\s'\"(]*|\.py\b[^\s'\")]*)")
_NO_PLACE: dict[str, Any] = {"file": None, "line": None, "code": ""}


def without_source(incident: Incident) -> Incident:
    """The incident, told in general words where its own would quote the code."""
    origin, diagnosis, outcome = incident.origin, incident.diagnosis, incident.outcome
    secrets = _secrets(origin) if origin else []
    if origin is not None:
        hops = tuple(replace(hop, **_NO_PLACE) for hop in origin.lineage)
        unmarked = replace(origin, end_line=None, columns=None, function=None, facts={})
        origin = replace(unmarked, lineage=hops, **_NO_PLACE)
    if diagnosis is not None:
        words = CAUSES.get(diagnosis.cause, diagnosis)
        diagnosis = replace(
            diagnosis,
            why=scrub(words.why, secrets) if words is diagnosis else words.why,
            fix=scrub(words.fix, secrets) if words is diagnosis else words.fix,
            patch=None,
            evidence=tuple(scrub(text, secrets) for text in diagnosis.evidence),
        )
    if outcome is not None:
        outcome = replace(outcome, detail=scrub(outcome.detail, secrets))
    return replace(incident, origin=origin, diagnosis=diagnosis, outcome=outcome)


def info_without_source(info: RunInfo) -> RunInfo:
    """What the run was made with, less script, command and folders."""
    config = {key: value for key, value in info.config.items() if not _FILE.search(str(value))}
    return replace(info, script="", command=(), cwd="", sources={}, config=config)


def scrub(text: str, secrets: Sequence[str]) -> str:
    """The text without quoted code, without files, and without these strings."""
    for secret in secrets:
        text = text.replace(secret, LEFT_OUT)
    return _FILE.sub(LEFT_OUT, _CODE.sub(LEFT_OUT, text))


def _secrets(origin: Origin) -> list[str]:
    """Lines of code and names of files, the longest first."""
    places: list[Origin | Hop] = [origin, *origin.lineage]
    texts = [text for place in places for text in (place.code, place.file or "")]
    texts += [origin.function or "", str(origin.facts.get("expression", ""))]
    lines = {line.strip() for text in texts for line in text.split("\n") if len(line) > 3}
    return sorted(lines, key=len, reverse=True)
