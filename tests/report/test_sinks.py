"""The terminal is quiet: the same incident again is counted, not told again."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools

import pytest
import torch
from torch import nn

import stayfinite
from stayfinite.records import Diagnosis, Incident, Origin, Outcome
from stayfinite.report.sinks import Repeats, TerminalSink, is_told


def bad(step: int, *, line: int | None = 3, strategy: str = "skip") -> Incident:
    return Incident(
        step=step,
        origin=None if line is None else Origin(phase="forward", file="train.py", line=line),
        diagnosis=None if line is None else Diagnosis(cause="log_of_zero", why="why", fix="fix"),
        outcome=Outcome(strategy=strategy, detail="the step was skipped"),
    )


def test_first_tenth_and_hundredth_are_told() -> None:
    assert [times for times in range(2000) if is_told(times)] == [1, 10, 100, 1000]


def test_same_incident_is_told_in_full_once_then_at_ten(capsys: pytest.CaptureFixture[str]) -> None:
    sink = TerminalSink()
    for step in range(0, 50, 2):
        sink(bad(step))
    sink(bad(51, line=9))
    err = capsys.readouterr().err
    assert err.count("error[log_of_zero]") == 2
    again = "stayfinite: step 18: log_of_zero at train.py:3 again, 10 times so far"
    assert [line for line in err.splitlines() if "so far" in line] == [
        f"{again}; skip: the step was skipped"
    ]
    sink.end()
    sink.end()
    said = "stayfinite: 26 bad steps: log_of_zero at train.py:3 25 times\n"
    assert capsys.readouterr().err == said


def test_of_many_ranks_the_one_where_it_began_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = {}
    for here, began in itertools.product(range(3), (-1, 0, 2)):
        monkeypatch.setenv("RANK", str(here))
        sink = TerminalSink()
        sink(dataclasses.replace(bad(3), rank=began, world=3))
        sink.end()
        printed[began, here] = capsys.readouterr().err.count("error[log_of_zero]")
    assert [pair for pair, times in printed.items() if times] == [(-1, 0), (0, 0), (2, 2)]


def test_what_follows_a_bad_step_that_nobody_undid_is_no_new_incident() -> None:
    repeats = Repeats()
    lines = [3, 7, None, 8]
    told = [repeats.note(bad(n, line=line, strategy="warn")) for n, line in enumerate(lines)]
    assert told == [1, 0, 0, 0]
    assert repeats.note(bad(9, line=7, strategy="warn")) == 1


def test_nothing_is_added_up_where_nothing_came_twice(capsys: pytest.CaptureFixture[str]) -> None:
    sink = TerminalSink()
    sink(bad(3))
    capsys.readouterr()
    sink.end()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("on_nan", ["warn", "recover"])
def test_many_bad_steps_have_one_report_and_one_line(on_nan: str) -> None:
    # No capsys: a replay keeps what is in the variables here, and that would be all of pytest.
    printed = io.StringIO()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = stayfinite.RecoveryConfig(max_consecutive_nans=1000) if on_nan == "recover" else None
    with (
        contextlib.redirect_stderr(printed),
        stayfinite.watch(model, optimizer, on_nan=on_nan, config=config),  # type: ignore[arg-type]
    ):
        for step in range(17):
            x = torch.rand(4, 3) * (step < 5)
            optimizer.zero_grad()
            model(x / x.norm()).square().mean().backward()
            optimizer.step()
    lines = printed.getvalue().splitlines()
    assert sum(line.startswith("error[") for line in lines) == 1
    ours = [line for line in lines if line.startswith("stayfinite: ")]
    assert len([line for line in ours if "12 bad steps" in line]) == 1
    assert len(ours) == (1 if on_nan == "warn" else 2)  # with the tenth of those that were skipped
