"""The ring of the last steps, and what is read off it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stayfinite.explain.clue import (
    Clue,
    Context,
    History,
    StepFacts,
    finite,
    growth,
    largest,
    number,
)
from stayfinite.records import Origin, TensorSummary


def test_first_and_last_steps_are_kept() -> None:
    history = History()
    for step in range(1000):
        history.add(step=step, loss=float(step))
    steps = [facts.step for facts in history.steps()]
    assert steps[:8] == list(range(8))
    assert steps[-128:] == list(range(872, 1000))
    assert len(steps) == 136


def test_short_history_is_told_once() -> None:
    history = History()
    for step in range(5):
        history.add(step=step, loss=1.0, skipped=step == 2)
    assert [facts.step for facts in history.steps()] == [0, 1, 2, 3, 4]
    assert [facts.skipped for facts in history.steps()] == [False, False, True, False, False]


def test_empty_history_has_no_steps() -> None:
    assert History().steps() == ()


def test_tensors_are_read_when_asked_for() -> None:
    history = History()
    history.add(step=0, loss=torch.tensor(2.0), grad_norm=None, learning_rate=torch.tensor(0.5))
    assert history.steps() == (StepFacts(step=0, loss=2.0, learning_rate=0.5),)


def test_only_known_and_finite_values_count() -> None:
    assert finite([1.0, None, math.nan, math.inf, 2.0]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "times"),
    [
        ([], 1.0),
        ([5.0], 1.0),
        ([1.0, 10.0], 10.0),
        ([0.0, 10.0], 1.0),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 1.0),
        ([1.0] * 20 + [100.0], 100.0),
        ([-1.0] * 20 + [-300.0], 300.0),
        ([1.0] * 20 + [100.0, 1.0], 100.0),
        ([100.0] * 20 + [1.0] * 5, 0.01),
    ],
)
def test_growth_compares_the_last_with_the_typical_early_one(
    values: list[float], times: float
) -> None:
    assert growth(values) == pytest.approx(times)


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=40))
def test_growth_is_never_negative_and_never_raises(values: list[float]) -> None:
    assert growth(values) >= 0


def clue(**context: object) -> Clue:
    return Clue(Origin(phase="forward", op="aten.log_.default"), Context(**context))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten.log.default", "log"),
        ("aten.add_.Tensor", "add"),
        ("aten._softmax.default", "softmax"),
        ("aten._foreach_addcdiv_.ScalarList", "addcdiv"),
        ("aten._to_copy.default", "to_copy"),
        ("custom", "custom"),
        ("", ""),
        (None, ""),
    ],
)
def test_bare_name_of_an_operation(op: str | None, name: str) -> None:
    assert Clue(Origin(phase="forward", op=op), Context()).op == name


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("SqrtBackward0", "Sqrt"),
        ("ReciprocalBackward", "Reciprocal"),
        ("Log1PBackward0", "Log1P"),
        ("torch::autograd::AccumulateGrad", "torch::autograd::AccumulateGrad"),
        (None, ""),
    ],
)
def test_bare_name_of_a_node(node: str | None, name: str) -> None:
    assert Clue(Origin(phase="backward", node=node), Context()).node == name


@pytest.mark.parametrize(
    ("ranges", "path"),
    [
        ((1.0, 1.0, 1.0, 200.0), "x"),
        ((1.0, 1.0, 1.0, 90.0), None),  # not above 100
        ((50.0, 50.0, 50.0, 200.0), None),  # usual for it
        ((1.0, 200.0), None),  # one batch is no habit
        ((0.0, 0.0, 0.0, 200.0), None),
        ((), None),
        ((math.nan, 1.0, 1.0, math.inf), "x"),
        ((1.0, 1.0, 1.0, math.nan), None),
    ],
)
def test_batch_that_stands_out(ranges: tuple[float, ...], path: str | None) -> None:
    found = clue(input_ranges={"x": ranges}).outlier
    assert (found[0] if found else None) == path


@pytest.mark.parametrize(
    ("losses", "norms", "diverging"),
    [
        ([1.0] * 10, [1.0] * 10, False),
        ([1.0] * 9 + [30.0], [1.0] * 10, True),
        ([1.0] * 10, [1.0] * 9 + [200.0], True),
        ([1.0] * 10, [1.0] * 9 + [50.0], False),
        ([], [], False),
    ],
)
def test_training_that_runs_away(losses: list[float], norms: list[float], diverging: bool) -> None:
    history = tuple(
        StepFacts(step=step, loss=loss, grad_norm=norm)
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    )
    assert clue(history=history).is_diverging is diverging


STEADY = [(1.0, 0.1)] * 30


@pytest.mark.parametrize(
    ("steps", "jump"),
    [
        ([*STEADY, (1.0, 1.0), (9.0, 1.0), (900.0, 1.0)], (0.1, 1.0)),  # (loss, rate)
        ([*STEADY, (1.0, 1.0), (1.1, 1.0), (0.9, 1.0)], None),  # it did no harm
        ([*STEADY, (1.0, 0.01), (900.0, 0.01)], None),
        ([(1.0, 0.01), (1.0, 0.1), *[(10.0 + k, 0.1) for k in range(20)]], None),  # warm-up
        ([(1.0 + k, 0.1 * (1 + k / 30)) for k in range(90)], None),
        ([*STEADY, *[(1.0, 0.01)] * 9, (1.0, 0.1), (900.0, 0.1)], None),  # back to where it was
    ],
)
def test_rate_that_was_raised_and_did_harm(
    steps: list[tuple[float, float]], jump: tuple[float, float] | None
) -> None:
    history = tuple(
        StepFacts(step=step, loss=loss, learning_rate=rate)
        for step, (loss, rate) in enumerate(steps)
    )
    found = clue(history=history).raised_rate
    assert (found and tuple(step.learning_rate for step in found)) == jump


def test_divergence_that_only_a_weight_shows_is_told_by_the_weight() -> None:
    history = tuple(StepFacts(step=step, loss=2.0 - step / 10) for step in range(6))
    told = clue(history=history, weight_growth=4000.0)
    assert told.is_diverging
    assert told.trend == "a weight grew 4000 times as large, loss from 2 to 1.5"


def test_numbers_are_written_as_people_write_them() -> None:
    assert [number(value) for value in (None, 0.1, 123456.0, 3.4e38, math.nan)] == [
        "none",
        "0.1",
        "1.235e+05",
        "3.4e+38",
        "nan",
    ]


def test_largest_magnitude_of_a_summary() -> None:
    summary = TensorSummary(
        name="x", shape=(2,), dtype="float32", device="cpu", numel=2, min=-5.0, max=3.0
    )
    assert largest(summary) == 5.0
    assert largest(TensorSummary(name="x", shape=(), dtype="", device="", numel=0)) == 0.0
