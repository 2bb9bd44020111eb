"""Without source the page has no line of code and no path."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import record

from stayfinite.records import Incident, Outcome
from stayfinite.recover.advice import recommendations_of
from stayfinite.report.html.notebook import scrub
from stayfinite.report.html.page import page_of
from stayfinite.report.store.reading import read_run

KINDS = ("forward", "backward", "data", "optimizer", "unknown")
Incidents = dict[str, Incident]


def hidden(path: Path) -> str:
    run = read_run(path)
    return page_of(run, advice=recommendations_of(run), with_source=False)


def talkative(incident: Incident, folder: Path) -> Incident:
    """Quotes its code and its file wherever there is a free text."""
    origin, diagnosis = incident.origin, incident.diagnosis
    assert origin is not None
    assert diagnosis is not None
    secret = f"secret_code(x) at {folder}/train.py:8 and `loss = secret_code(y)`"
    return replace(
        incident,
        origin=replace(
            origin,
            code="secret_code(x)",
            facts={"expression": "secret_code(x)", "path": str(folder)},
            lineage=tuple(replace(hop, code="secret_code(x)") for hop in origin.lineage),
        ),
        diagnosis=replace(diagnosis, why=secret, fix=secret, patch=secret, evidence=(secret,)),
        outcome=Outcome(strategy="skip", detail=secret),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cause", ["log_of_zero", "not_in_the_catalogue"])
def test_nothing_of_the_source_is_left(
    kind: str, cause: str, folder: Path, incidents: Incidents
) -> None:
    bad = talkative(incidents[kind], folder)
    assert bad.diagnosis is not None
    bad = replace(bad, diagnosis=replace(bad.diagnosis, cause=cause))
    script = folder / "train.py"
    words = {"script": str(script), "cwd": str(folder), "command": (str(script), "--lr", "1")}
    config = {"folder": str(folder), "on_nan": "stop"}
    run = record(folder / "20260101-train", incidents=[bad], config=config, **words)
    page = re.sub(r"<style>.*?</style>", "", hidden(run), flags=re.S)
    lines = [
        line
        for line in map(str.strip, script.read_text(encoding="utf-8").splitlines())
        if len(line) > 1
    ]
    for secret in ("secret_code", "train.py", "20260101-train", str(folder), *lines):
        assert secret not in page
    assert "on_nan" in page
    assert "Source code and paths are not in this report." in page


def test_what_is_said_in_general_stays(folder: Path, incidents: Incidents) -> None:
    page = hidden(record(folder / "run", incidents=[incidents["forward"]]))
    assert "log(0) is -Inf and its gradient 1 / 0 is Inf" in page
    assert "Inf</b> first appeared at log" in page
    assert "encoder.0.weight" in page


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("finite with `x + 1`", "finite with (removed)"),
        ("in /a/b/c.py:3, twice", "in (removed) twice"),
        ("in train.py", "in (removed)"),
        (r"in C:\me\net.py", "in (removed)"),
        ("the loss is 1.5e-3", "the loss is 1.5e-3"),
    ],
)
def test_code_and_files_are_left_out_of_a_text(text: str, left: str) -> None:
    assert scrub(text, []) == left
