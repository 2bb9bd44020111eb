"""The incidents of a guard in a notebook, and a run without its source.

Neither jinja2 nor rich is loaded before something is shown: rich draws from python's generator
when it is imported.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stayfinite.records import Diagnosis, Hop, Incident, Origin, Outcome
from stayfinite.report.html.markup import Causes
from stayfinite.report.store.writer import RunInfo


class GuardReport:
    """What a guard has seen up to now; later incidents do not change it."""

    def __init__(
        self,
        incidents: Sequence[Incident],
        *,
        steps: int,
        causes: Causes,
        folder: Path | None = None,
    ) -> None:
        """`folder` is what the files of the incidents are named relative to."""
        self.incidents = tuple(incidents)
        self.steps = steps
        self._causes, self._folder = causes, folder

    def _repr_html_(self) -> str:
        with _unchanged_random():
            from stayfinite.report.html.page import incidents_fragment

            return incidents_fragment(
                self.incidents, steps=self.steps, causes=self._causes, folder=self._folder
            )

    def __repr__(self) -> str:
        with _unchanged_random():
            from stayfinite.report.html.page import alike, counted
            from stayfinite.report.terminal import as_text

            told = [as_text(first, folder=self._folder) for first, _ in alike(self.incidents)]
        return "\n".join([counted(len(self.incidents), self.steps).text, *told]).rstrip()


@contextmanager
def _unchanged_random() -> Iterator[None]:
    """What draws and lays out may draw random numbers, even when it is loaded."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


LEFT_OUT = "(left out)"
_CODE = re.compile(r"`[^`]*`")
_FILE = re.compile(r"[^\s'\"(]*(?:[/\\][^\s'\"(]*|\.py\b[^\s'\")]*)")
_NO_PLACE: dict[str, Any] = {"file": None, "line": None, "code": ""}


def without_source(incident: Incident, causes: Causes) -> Incident:
    """The incident, told in general words where its own would quote the code."""
    secrets = sorted(set(_secrets(incident)), key=len, reverse=True)
    return replace(
        incident,
        origin=incident.origin and _origin(incident.origin),
        diagnosis=incident.diagnosis and _diagnosis(incident.diagnosis, causes, secrets),
        outcome=incident.outcome and _outcome(incident.outcome, secrets),
    )


def info_without_source(info: RunInfo) -> RunInfo:
    """What the run was made with, less script, command and folders."""
    config = {key: value for key, value in info.config.items() if not _has_path(value)}
    return replace(info, script="", command=(), cwd="", sources={}, config=config)


def scrubbed(text: str, secrets: list[str]) -> str:
    """The text without quoted code, without files, and without these strings."""
    for secret in secrets:
        text = text.replace(secret, LEFT_OUT)
    return _FILE.sub(LEFT_OUT, _CODE.sub(LEFT_OUT, text))


def _secrets(incident: Incident) -> Iterator[str]:
    origin = incident.origin
    if origin is None:
        return
    places: list[Origin | Hop] = [origin, *origin.lineage]
    texts = [text for place in places for text in (place.code, place.file or "")]
    texts += [origin.function or "", str(origin.facts.get("expression", ""))]
    yield from (line.strip() for text in texts for line in text.split("\n") if len(line) > 3)


def _origin(origin: Origin) -> Origin:
    hops = tuple(replace(hop, **_NO_PLACE) for hop in origin.lineage)
    unmarked = replace(origin, end_line=None, columns=None, function=None, facts={})
    return replace(unmarked, lineage=hops, **_NO_PLACE)


def _diagnosis(diagnosis: Diagnosis, causes: Causes, secrets: list[str]) -> Diagnosis:
    known = causes.get(diagnosis.cause)
    return replace(
        diagnosis,
        why=known.why if known else scrubbed(diagnosis.why, secrets),
        fix=known.fix if known else scrubbed(diagnosis.fix, secrets),
        patch=None,
        evidence=tuple(scrubbed(text, secrets) for text in diagnosis.evidence),
    )


def _outcome(outcome: Outcome, secrets: list[str]) -> Outcome:
    return replace(outcome, detail=scrubbed(outcome.detail, secrets))


def _has_path(value: Any) -> bool:
    return bool(_FILE.search(str(value)))
