"""An incident in one line, and a forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stayfinite.records import (
    Forecast,
    Hop,
    Incident,
    NaNReport,
    NaNType,
    Origin,
    Outcome,
    Phase,
    Signal,
)
from stayfinite.report.sinks import print_forecast
from stayfinite.text import forecast_words, one_line, way


def bad(location: str) -> NaNReport:
    return NaNReport(has_nan=True, nan_type=NaNType.POS_INF, location=location, tensor_shape=())


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (0, "step 9: loss is Inf, at train.py:15"),
        (1, "step 9: loss is Inf and 1 more tensor is not finite, at train.py:15"),
        (4, "step 9: loss is Inf and 4 more tensors are not finite, at train.py:15"),
    ],
)
def test_what_there_is_more_of_is_said(others: int, said: str) -> None:
    origin = Origin(phase="forward", file="train.py", line=15, exact=True)
    reports = (bad("loss"), *(bad(f"gradients.{number}") for number in range(others)))
    assert one_line(Incident(step=9, reports=reports, origin=origin)) == said


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ("data", "NaN came in at train.py:9 (data)"),
        ("init", "NaN was there before this step and was read at train.py:9"),
    ],
)
def test_a_value_that_was_there_before_is_not_called_data(phase: Phase, said: str) -> None:
    hop = Hop(kind="foreign", op="", phase=phase, file="train.py", line=9)
    origin = Origin(phase=phase, lineage=(hop,))
    assert way(Incident(step=1, reports=(bad("loss"),), origin=origin)).startswith(said)


def test_terminal_says_of_a_forecast_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    soon = Forecast(step=9, signal="loss", steps_left=1, rank=2, outcome=Outcome(strategy="clip"))
    print_forecast(soon)
    said = "stayfinite: step 9, rank 2: the loss overflows in about 1 step; clip\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("signal", "soon", "over"),
    [
        ("loss", "the loss overflows in about 9 steps", "the loss has stopped growing"),
        (
            "loss_scale",
            "the loss scale falls to 1, where no scaler helps, in about 9 steps",
            "the loss scale has stopped falling",
        ),
        (
            "divergence",
            "training will probably diverge in about 9 steps",
            "training is no longer expected to diverge",
        ),
        ("loss_spike", "the loss jumped to 7", "the loss is as usual again"),
    ],
)
def test_a_forecast_without_a_message_is_told_in_true_words(
    signal: Signal, soon: str, over: str
) -> None:
    told = Forecast(step=1, signal=signal, value=7.0, steps_left=9)
    assert forecast_words(told) == soon
    assert forecast_words(replace(told, outcome=Outcome(strategy="undo"))) == over
