"""Experiments on steps that are made up, so that the truth is known."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stayfinite.explain.experiments import (
    MOST_GUILTY,
    OUT_OF_TIME,
    CannotReplayError,
    Change,
    Finding,
    Lab,
    OutOfTimeError,
    Seen,
    compare_compiled,
    dynamics,
    experiment,
    guard_operation,
    guilty_rows,
    guilty_values,
    judge_findings,
    precise,
    repeat,
    terms,
    weights,
)
from stayfinite.records import Diagnosis, NaNType, Origin, TensorSummary

GOOD = Seen(is_finite=True)
BAD = Seen(is_finite=False, op="aten.log.default", file="train.py", line=7, kind=NaNType.NAN)
ELSEWHERE = dataclasses.replace(BAD, line=9)
ANYWHERE = Origin(phase="data", exact=True)
Answer = Callable[[Change], Seen]


class Step:
    """A step that answers as it is told, and counts how often it was asked."""

    def __init__(
        self,
        answer: Answer,
        *,
        rows: int = 0,
        values: int = 0,
        snapshots: int = 0,
        terms: tuple[str, ...] = (),
    ) -> None:
        self.rows, self.values, self.snapshots, self.terms = rows, values, snapshots, terms
        self._answer = answer
        self.asked: list[Change] = []

    def run(self, change: Change) -> Seen:
        self.asked.append(change)
        return self._answer(change)


def lab(step: Step, *, seconds: float = math.inf) -> Lab:
    return Lab(step, seconds=seconds, clock=lambda: float(len(step.asked)))


def guilty_set(rows: int, guilty: set[int]) -> Step:
    def answer(change: Change) -> Seen:
        inside = set(range(rows)) if change.rows is None else set(change.rows)
        return BAD if inside & guilty else GOOD

    return Step(answer, rows=rows)


@given(st.integers(2, 3000), st.data())
def test_one_guilty_sample_is_found_within_the_bound(rows: int, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, rows - 1))
    step = guilty_set(rows, {row})
    found = guilty_rows(lab(step))
    assert found is not None
    assert found.rows == (row,)
    assert found.is_proof
    assert len(step.asked) <= 2 * math.log2(rows) + 4


@given(st.integers(2, 300), st.data())
def test_all_of_several_guilty_samples_are_found(rows: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, rows - 1), min_size=1, max_size=4))
    step = guilty_set(rows, guilty)
    found = guilty_rows(lab(step))
    assert found is not None
    assert set(found.rows) == guilty
    assert found.is_proof == (len(guilty) < rows)
    assert len(step.asked) <= len(guilty) * (2 * math.log2(rows) + 4)


def test_when_every_sample_fails_alone_none_is_named() -> None:
    step = guilty_set(64, set(range(64)))
    found = guilty_rows(lab(step))
    assert found is not None
    assert (found.verdict, found.rows) == ("innocent", ())
    assert len(step.asked) < 20


def test_of_very_many_guilty_samples_some_are_named_and_nothing_is_proven() -> None:
    found = guilty_rows(lab(guilty_set(64, set(range(20)))))
    assert found is not None
    assert len(found.rows) == MOST_GUILTY
    assert not found.vanishes
    assert "there may be others" in found.sentence


@given(st.integers(2, 64), st.data())
def test_no_sample_is_named_that_does_not_fail_alone(rows: int, data: st.DataObject) -> None:
    """It takes any two of a set; the samples of it are harmless one by one."""
    together = data.draw(st.sets(st.integers(0, rows - 1), min_size=2, max_size=6))

    def answer(change: Change) -> Seen:
        inside = range(rows) if change.rows is None else change.rows
        return BAD if len(set(inside) & together) > 1 else GOOD

    found = guilty_rows(lab(Step(answer, rows=rows)))
    assert found is None or not found.rows


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_chance_is_taken_for_proof_less_than_once_in_a_hundred(chance: float) -> None:
    """A step that fails so often, whatever is in the batch."""
    rng, wrong = random.Random(0), 0
    diagnosis = Diagnosis(cause="bad_input_data", why="", fix="", confidence="likely")
    origin = Origin(phase="data", exact=True)
    for _ in range(2000):
        step = Step(lambda change: BAD if rng.random() < chance else GOOD, rows=16)
        findings = experiment(lab(step), diagnosis, origin)
        wrong += judge_findings(diagnosis, origin, findings).confidence == "proven"
    assert wrong < 20


def test_a_failure_elsewhere_is_not_the_failure() -> None:
    """A batch of one has no variance: that is another bug than the one that is looked for."""

    def answer(change: Change) -> Seen:
        inside = range(8) if change.rows is None else change.rows
        if len(inside) == 1:
            return ELSEWHERE
        return BAD if 5 in inside else GOOD

    found = guilty_rows(lab(Step(answer, rows=8)))
    assert found is not None
    assert found.rows == (5,)  # it was given twice


@pytest.mark.parametrize("row", range(8))
def test_a_layer_that_refuses_a_batch_of_one_is_given_two(row: int) -> None:
    def answer(change: Change) -> Seen:
        inside = range(8) if change.rows is None else change.rows
        if len(inside) == 1:
            raise ValueError("Expected more than 1 value per channel")
        return BAD if row in inside else GOOD

    found = guilty_rows(lab(Step(answer, rows=8)))
    assert found is not None
    assert (found.rows, found.is_proof) == ((row,), True)


def test_a_batch_that_cannot_be_split_has_no_guilty_sample() -> None:
    assert guilty_rows(lab(Step(lambda change: BAD, rows=0))) is None
    assert guilty_rows(lab(Step(lambda change: BAD, rows=1))) is None


def test_when_each_half_is_finite_no_single_sample_does_it() -> None:
    found = guilty_rows(lab(Step(lambda c: BAD if c.rows is None else GOOD, rows=8)))
    assert found is not None
    assert (found.verdict, found.rows) == ("innocent", ())


@given(st.integers(2, 4000), st.data())
def test_one_guilty_value_is_found(count: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, count - 1))

    def answer(change: Change) -> Seen:
        if change.replaced is None:
            return BAD
        low, high = change.replaced
        return GOOD if low <= guilty < high else BAD

    step = Step(answer, rows=4, values=count)
    found = guilty_values(lab(step), 2, 0)
    assert found is not None
    assert f"value {guilty} of row 2" in found.sentence
    assert len(step.asked) <= 2 * math.log2(count) + 4


def test_two_guilty_values_are_not_told_as_one() -> None:
    def answer(change: Change) -> Seen:
        low, high = change.replaced or (0, 0)
        return GOOD if low <= 1 and high > 6 else BAD

    assert guilty_values(lab(Step(answer, rows=4, values=8)), 2, 0) is None


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([BAD, BAD], "deterministic"),
        ([GOOD, GOOD], "transient"),
        ([BAD, GOOD], "inconclusive"),
        ([GOOD, BAD], "inconclusive"),
        ([BAD, ELSEWHERE], "inconclusive"),
    ],
)
def test_the_same_step_twice(answers: list[Seen], verdict: str) -> None:
    left = list(answers)
    assert repeat(lab(Step(lambda change: left.pop(0)))).verdict == verdict


def test_a_step_that_cannot_be_replayed_is_inconclusive() -> None:
    def answer(change: Change) -> Seen:
        raise CannotReplayError("it has a custom loop")

    found = repeat(lab(Step(answer)))
    assert found.verdict == "inconclusive"
    assert "it has a custom loop" in found.sentence


def test_precision_is_to_blame_if_more_of_it_helps() -> None:
    found = precise(lab(Step(lambda c: GOOD if c.precision else BAD)))
    assert [(each.experiment, each.is_proof) for each in found] == [
        ("float32", True),
        ("float64", True),
    ]
    assert not any(each.vanishes for each in precise(lab(Step(lambda change: BAD))))


def test_an_operation_that_is_finite_when_guarded_is_not_cleared_by_the_next_one() -> None:
    root = dataclasses.replace(BAD, node="SqrtBackward0")
    found = guard_operation(lab(Step(lambda c: root if c.is_guarded else BAD)))
    assert found is not None
    assert found.verdict == "inconclusive"
    assert "goes bad at another one, Sqrt at train.py:7 in its backward pass" in found.sentence
    same = guard_operation(lab(Step(lambda change: BAD)))
    assert same is not None
    assert same.verdict == "innocent"


def test_terms_are_tried_one_by_one() -> None:
    step = Step(lambda c: GOOD if c.term in (0, 2) else BAD, terms=("box", "dfl", "cls"))
    found = terms(lab(step))
    assert found is not None
    assert found.sentence == (
        "of the terms of the loss, dfl goes bad alone, and box and cls alone are finite"
    )
    assert terms(lab(Step(lambda change: BAD, terms=("box", "dfl")))) is None


def test_earlier_weights_tell_weights_from_data() -> None:
    better = weights(lab(Step(lambda c: GOOD if c.snapshot == 1 else BAD, snapshots=2)))
    same = weights(lab(Step(lambda change: BAD, snapshots=2)))
    assert better is not None
    assert same is not None
    assert (better.verdict, same.verdict) == ("depends", "innocent")
    assert weights(lab(Step(lambda change: BAD))) is None


def test_a_lower_rate_is_tried_only_if_the_old_one_fails_again() -> None:
    def repeats(change: Change) -> Seen:
        return GOOD if change.learning_rate < 1 else BAD

    def does_not(change: Change) -> Seen:
        return GOOD if change.steps else BAD

    slower, clipped, smaller = dynamics(lab(Step(repeats)), steps=3)
    assert slower.is_proof
    assert "a tenth of the learning rate over the last 3 steps" in slower.sentence
    assert (clipped.verdict, smaller.verdict) == ("innocent", "innocent")
    assert dynamics(lab(Step(does_not)), steps=3) == []


def test_only_the_compiled_code_may_be_bad() -> None:
    found = compare_compiled(lab(Step(lambda c: GOOD if c.is_compiled is False else BAD)))
    assert found is not None
    assert "the compiled step goes bad" in found.sentence
    assert compare_compiled(lab(Step(lambda change: BAD))) is None


def test_nothing_is_tried_on_a_step_that_does_not_come_back() -> None:
    step = Step(lambda change: GOOD, rows=8)
    findings = experiment(lab(step), Diagnosis(cause="log_of_zero", why="", fix=""), ANYWHERE)
    assert [each.verdict for each in findings] == ["transient"]
    assert len(step.asked) == 2


def test_the_budget_ends_the_experiments_and_keeps_what_was_found() -> None:
    diagnosis = Diagnosis(cause="bad_input_data", why="", fix="")
    for seconds in range(12):
        step = guilty_set(256, {77})
        findings = experiment(lab(step, seconds=seconds), diagnosis, ANYWHERE)
        assert len(step.asked) <= seconds + 1
        assert findings[-1].sentence == OUT_OF_TIME
        assert not any(each.rows for each in findings)


def test_without_any_time_nothing_is_run() -> None:
    step = guilty_set(8, {1})
    with pytest.raises(OutOfTimeError):
        Lab(step, seconds=-1.0).run(Change())
    assert not step.asked


def test_progress_is_told_before_each_replay() -> None:
    told: list[tuple[str, int]] = []
    step = guilty_set(8, {1})
    book = Lab(step, seconds=60.0, progress=lambda name, count: told.append((name, count)))
    experiment(book, Diagnosis(cause="bad_input_data", why="", fix=""), ANYWHERE)
    assert [count for _, count in told] == list(range(len(step.asked)))
    assert told[0][0] == "repeat"
    assert ("samples" in {name for name, _ in told}) is True


ZERO = TensorSummary(name="self", shape=(2,), dtype="float32", device="cpu", numel=2, zero_count=1)
HALF = TensorSummary(name="output", shape=(2,), dtype="float16", device="cpu", numel=2)
FULL = dataclasses.replace(HALF, dtype="float32")
REPEATS = Finding(experiment="repeat", verdict="deterministic", sentence="twice", reproduces=True)


def proof(experiment: str) -> Finding:
    return Finding(
        experiment=experiment, verdict="guilty", sentence="so", reproduces=True, vanishes=True
    )


@pytest.mark.parametrize(
    ("cause", "origin", "findings", "confidence"),
    [
        ("log_of_zero", Origin(phase="forward", exact=True), [proof("guarded")], "likely"),
        (
            "log_of_zero",
            Origin(phase="forward", exact=True, inputs=(ZERO,)),
            [proof("guarded")],
            "proven",
        ),
        ("unknown", Origin(phase="forward", exact=True), [proof("guarded")], "likely"),
        ("log_of_zero", Origin(phase="forward", exact=False), [proof("guarded")], "likely"),
        ("log_of_zero", Origin(phase="forward", exact=True), [proof("samples")], "likely"),
        ("bad_input_data", Origin(phase="data", exact=True), [proof("samples")], "proven"),
        ("bad_input_data", Origin(phase="forward", exact=True), [proof("samples")], "likely"),
        ("lr_too_high", Origin(phase="forward", exact=True), [proof("dynamics")], "likely"),
        (
            "low_precision_overflow",
            Origin(phase="forward", exact=True, outputs=(HALF,)),
            [proof("float32")],
            "proven",
        ),
        (
            "low_precision_overflow",
            Origin(phase="forward", exact=True, outputs=(FULL,)),
            [proof("float32")],
            "likely",
        ),
        (
            "log_of_zero",
            Origin(phase="forward", exact=True),
            [Finding(experiment="guarded", verdict="innocent", sentence="no")],
            "possible",
        ),
    ],
)
def test_only_the_right_experiment_proves(
    cause: str, origin: Origin, findings: list[Finding], confidence: str
) -> None:
    diagnosis = Diagnosis(cause=cause, why="", fix="", confidence="likely")
    found = judge_findings(diagnosis, origin, [REPEATS, *findings])
    assert found.confidence == confidence
    assert found.evidence[0] == "twice"


def test_what_does_not_repeat_is_never_proven() -> None:
    diagnosis = Diagnosis(cause="log_of_zero", why="", fix="", confidence="likely")
    findings = [dataclasses.replace(REPEATS, reproduces=False), proof("guarded")]
    assert (
        judge_findings(diagnosis, Origin(phase="forward", exact=True), findings).confidence
        == "likely"
    )


def test_a_guard_that_does_not_help_speaks_against_the_diagnosis() -> None:
    found = guard_operation(lab(Step(lambda change: BAD)))
    assert found is not None
    assert found.verdict == "innocent"
