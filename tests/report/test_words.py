"""Files have names for the kinds of bad values; people read words, wherever they look."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import record

from stayfinite.amp.epoch import incident_line
from stayfinite.capsule.reproduces import compare_incidents
from stayfinite.explain.rules import named_evidence
from stayfinite.integrations.webhook import _slack
from stayfinite.records import Diagnosis, Incident, NaNReport, NaNType, Origin
from stayfinite.report.dashboard.live_runs import RunIndex, id_of
from stayfinite.report.dashboard.views import incident_view
from stayfinite.report.html.page import page_of
from stayfinite.report.store.reading import read_run
from stayfinite.report.terminal import as_text
from stayfinite.text import one_line

KINDS = [(NaNType.POS_INF, "Inf"), (NaNType.NEG_INF, "-Inf")]


def recorded(show: Callable[[Path], str]) -> Callable[[Incident, Path], str]:
    return lambda incident, folder: show(record(folder / "run", incidents=[incident]))


def text(incident: Incident, folder: Path) -> str:
    return as_text(incident, verbose=True, folder=folder)


def slack(incident: Incident, folder: Path) -> str:
    return str(_slack(incident)["text"])


def line(incident: Incident, folder: Path) -> str:
    return one_line(incident)


def log(incident: Incident, folder: Path) -> str:
    return incident_line(incident)


@recorded
def page(run: Path) -> str:
    return page_of(read_run(run), advice=[], with_source=True)


@recorded
def dashboard(run: Path) -> str:
    index = RunIndex([run])
    index.look()
    return json.dumps(incident_view(index, {"run": id_of(run), "number": "0"}))


@pytest.mark.parametrize("show", [text, slack, line, log, page, dashboard])
@pytest.mark.parametrize(("kind", "word"), KINDS)
def test_people_read_words(
    show: Callable[[Incident, Path], str],
    kind: NaNType,
    word: str,
    tmp_path: Path,
    incidents: dict[str, Incident],
) -> None:
    incident = incidents["forward"]
    assert incident.origin is not None
    hops = tuple(replace(hop, nan_type=kind) for hop in incident.origin.lineage)
    incident = replace(
        incident,
        reports=(NaNReport(True, kind, "loss", ()),),
        origin=replace(incident.origin, lineage=hops),
    )
    said = show(incident, tmp_path)
    assert word in said
    assert "pos_inf" not in said
    assert "neg_inf" not in said


@pytest.mark.parametrize("flag", ["pos_inf", "inf"])
def test_terms_of_a_loss_are_told_in_words(flag: str) -> None:
    facts = {"sums": [{"where": ["train.py", 9], "terms": [["box", ""], ["dfl", flag]]}]}
    origin = Origin(phase="forward", facts=facts)
    (said,) = named_evidence(origin, Diagnosis(cause="exp_overflow", why="", fix=""))
    assert said == "of the terms of the loss (box, dfl) only dfl is Inf (line 9)"


@pytest.mark.parametrize(("kind", "word"), KINDS)
def test_replays_are_compared_in_words(kind: NaNType, word: str) -> None:
    incident = Incident(step=1, reports=(NaNReport(True, kind, "loss"),))
    points = [point for point in compare_incidents(incident, incident) if point.name == "value"]
    assert [(point.there, point.here) for point in points] == [(f"loss is {word}",) * 2]
