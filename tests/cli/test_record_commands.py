"""list, show and compare: what they print of recorded runs, and how fast."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from recorded_runs import record

from stayfinite.cli import main
from stayfinite.records import Diagnosis, Forecast, Incident, NaNReport, NaNType, Origin, Outcome

GOLDEN = Path(__file__).parents[1] / "report" / "golden"
SOURCE = Path(__file__).parents[2] / "src"
INCIDENT = Incident(
    step=20,
    reports=(NaNReport(has_nan=True, nan_type=NaNType.NAN, location="loss", tensor_shape=()),),
    origin=Origin(phase="forward", op="aten.log.default", file="train.py", line=7, exact=True),
    diagnosis=Diagnosis(cause="log_of_negative", why="w", fix="f"),
    outcome=Outcome(strategy="skip", detail="the step was skipped"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where there are two runs, and the clock of one place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    runs = tmp_path / "stayfinite-runs"
    record(runs / "20231114-221320-train", incidents=[INCIDENT], terms=["box", "dfl"])
    fixed: dict[str, Any] = {"config": {"on_nan": "stop"}, "sources": {"train.py": "abc"}}
    record(runs / "20231114-231320-train", terms=["box", "dfl"], **fixed)
    yield tmp_path
    monkeypatch.undo()
    time.tzset()


def said(*words: str) -> Result:
    done = CliRunner().invoke(main, list(words), env={"COLUMNS": "100"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


BEFORE, AFTER = "20231114-221320-train", "20231114-231320-train"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("show", ["show", BEFORE]),
        ("list", ["list"]),
        ("compare", ["compare", BEFORE, AFTER]),
    ],
)
def test_output_is_the_golden_text(folder: Path, name: str, words: list[str]) -> None:
    lines = [line.rstrip() for line in said(*words).output.splitlines()]
    text = "\n".join(lines) + "\n"
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_without_a_name_the_newest_is_shown(folder: Path) -> None:
    assert AFTER in said("show").output


@pytest.mark.parametrize(
    ("strategies", "ended"),
    [(["skip", "rewind"], "recovered"), (["skip", "abort"], "incident"), (["warn"], "incident")],
)
def test_only_a_run_that_recovered_is_said_to_have(
    tmp_path: Path, strategies: list[str], ended: str
) -> None:
    outcomes = [Outcome(strategy=each, detail="") for each in strategies]
    incidents = [replace(INCIDENT, step=at, outcome=each) for at, each in enumerate(outcomes)]
    record(tmp_path / "a", incidents=incidents)
    assert said("list", str(tmp_path)).output.split()[-1] == ended
    assert (
        "by itself, recovered from 2 incidents" in said("show", str(tmp_path / "a")).output
    ) is (ended == "recovered")


@pytest.mark.parametrize(("steps", "word"), [(20, ""), (200, "worse")])
def test_pace_of_few_steps_is_not_judged(tmp_path: Path, steps: int, word: str) -> None:
    for name, seconds in (("a", 0.1), ("b", 0.3)):
        record(tmp_path / name, steps=steps, seconds=seconds)
    lines = said("compare", str(tmp_path / "a"), str(tmp_path / "b")).output.splitlines()
    (pace,) = [line for line in lines if line.startswith("seconds per step")]
    assert pace.split() == ["seconds", "per", "step", "0.1", "0.3", *([word] if word else [])]


def test_list_as_json(folder: Path) -> None:
    newest, oldest = json.loads(said("list", "--json").output)
    assert set(newest) == {"path", "started", "script", "steps", "incidents", "exit"}
    assert [newest["incidents"], oldest["incidents"]] == [0, 1]
    assert (oldest["steps"], oldest["exit"]) == (60, "incident")
    assert Path(oldest["path"]).name == BEFORE


def test_show_as_json(folder: Path) -> None:
    shown = json.loads(said("show", "--json", BEFORE).output)
    assert shown["bad_steps"] == shown["skipped_steps"] == 1
    assert shown["causes"] == {"log_of_negative": 1}
    assert shown["incidents"][0]["place"] == "train.py:7"
    assert shown["worst_layers"][0]["norm"] > 0
    assert set(shown["terms"]) == {"box", "dfl"}


def test_compare_as_json(folder: Path) -> None:
    compared = json.loads(said("compare", "--json", BEFORE, AFTER).output)
    lines = {line["name"]: (line["before"], line["after"]) for line in compared["lines"]}
    assert lines["bad steps"] == (1, 0)
    changes = {(change["kind"], change["name"]) for change in compared["changes"]}
    assert {("option", "on_nan"), ("file", "train.py")} <= changes


def test_nothing_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no recorded run" in said("list").output
    assert json.loads(said("list", "--json").output) == []
    none = said("show")
    assert (none.exit_code, "there is no run" in none.output) == (2, True)
    other = said("show", "nowhere")
    assert (other.exit_code, "not a run directory" in other.output) == (2, True)


def test_names_cannot_command_the_terminal(tmp_path: Path) -> None:
    record(tmp_path / "a", script="/x/\x1b[31mred.py", layers=["\x1b]0;title\x07", "b", "c"])
    assert "\x1b" not in said("show", str(tmp_path / "a")).output


def test_forecasts_are_told_before_the_incident_that_came_next(tmp_path: Path) -> None:
    done = Outcome(strategy="clip", detail="gradients are clipped to a norm of 1")
    told = [
        Forecast(step=19, signal="divergence", message="soon\x1b[2J", evidence=("a\x1b[31m",)),
        Forecast(step=21, signal="divergence", message="again", outcome=done),
        Forecast(step=50, signal="divergence", steps_left=84, steps_low=3, steps_high=277),
    ]
    incidents = [INCIDENT, replace(INCIDENT, step=40)]
    run = record(tmp_path / "run", incidents=incidents, forecasts=told)
    assert said("forecast", str(run)).stdout.splitlines() == [
        "step 19, 1 step before the incident at step 20: soon\\x1b[2J",
        "  a\\x1b[31m",
        "step 21, 19 steps before the incident at step 40: again; "
        "clip: gradients are clipped to a norm of 1",
        "step 50: training will probably diverge in about 84 steps (3-277)",
    ]
    quiet = said("forecast", str(record(tmp_path / "quiet")))
    assert quiet.stdout == "no overflow or divergence was seen coming in 60 steps.\n"


def test_long_runs_are_answered_fast_and_without_torch(tmp_path: Path) -> None:
    path = record(tmp_path / "runs" / "a", steps=10_000)
    for words in (["show", str(path)], ["list", str(path.parent)], ["compare", *[str(path)] * 2]):
        without_torch = "import sys; sys.modules['torch'] = None"
        code = f"{without_torch}; from stayfinite.cli import main; main({words})"
        before = _time_of_children()
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert _time_of_children() - before < 5


def _time_of_children() -> float:
    """Of the processor, in seconds: on a busy machine nothing else can be relied on."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
