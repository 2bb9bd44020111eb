"""When a change is called a fix, and a bad step is taken to be like another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stayfinite.explain.experiments import Trial, alike, evidence_of, is_proven
from stayfinite.records import Diagnosis, Incident, NaNReport, NaNType, Origin, TensorSummary

FALLING = tuple(2.0 - 0.02 * step for step in range(60))
GOOD = Trial(bad_step=30, further=20, steps=60, losses=FALLING, exit_code=0)


def test_a_run_to_its_end_that_learns_holds() -> None:
    assert GOOD.holds
    assert evidence_of(GOOD, "Clamp it.") == (
        "With this change: finite for all its 60 steps, loss 0.82. Clamp it."
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"went_bad": True},
        {"exit_code": 1},
        {"steps": 30},
        {"exit_code": None, "steps": 50},
        {"losses": (*FALLING[:31], *[float("nan")] * 29)},
        {"losses": (*FALLING[:31], *[100.0] * 29)},
    ],
    ids=str,
)
def test_anything_less_does_not_hold(changes: dict[str, object]) -> None:
    assert not replace(GOOD, **changes).holds  # type: ignore[arg-type]


def test_a_run_that_was_ended_holds_when_it_was_far_enough() -> None:
    trial = replace(GOOD, exit_code=None, steps=51)
    assert trial.holds
    assert "finite for 51 steps so far" in evidence_of(trial, "")


def test_a_bad_first_step_leaves_nothing_to_compare_with_but_the_first_loss() -> None:
    assert replace(GOOD, bad_step=0).holds
    rising = tuple(0.8 + 0.01 * step for step in range(60))
    assert replace(GOOD, bad_step=0, losses=rising).holds
    far = tuple(0.8 * 1.1**step for step in range(60))
    assert not replace(GOOD, bad_step=0, losses=far).holds


def test_a_loss_may_fall_from_a_new_level_but_not_shoot_up() -> None:
    higher = tuple(3.0 - 0.05 * step for step in range(29))
    assert replace(GOOD, losses=(*FALLING[:31], *higher)).holds
    assert not replace(GOOD, losses=(*FALLING[:31], *reversed(higher))).holds
    assert not replace(GOOD, losses=(*FALLING[:31], 8e5, *FALLING[32:])).holds


def test_a_loss_that_had_run_away_is_no_measure() -> None:
    away = [1.1 * 100.0**step for step in range(31)]
    assert not replace(GOOD, losses=(*away, *[700.0] * 29)).holds
    assert replace(GOOD, losses=(*away[:30], *[1.0] * 30)).holds


def _incident(
    cause: str, *, exact: bool = True, dtype: str = "float32", zeros: int = 1
) -> Incident:
    given = TensorSummary(
        name="self", shape=(2,), dtype=dtype, device="cpu", numel=2, zero_count=zeros
    )
    origin = Origin(phase="forward", file="train.py", line=3, exact=exact, inputs=(given,))
    return Incident(step=3, origin=origin, diagnosis=Diagnosis(cause=cause, why=".", fix="."))


def test_only_what_was_seen_in_values_is_proven_by_taking_it_away() -> None:
    assert is_proven(_incident("log_of_zero"), changed_file="/x/train.py")
    assert not is_proven(_incident("log_of_zero", zeros=0), changed_file="/x/train.py")
    assert not is_proven(_incident("lr_too_high"), changed_file="/x/train.py")
    assert not is_proven(_incident("log_of_zero"), changed_file="/x/other.py")
    assert not is_proven(_incident("log_of_zero", exact=False), changed_file="/x/train.py")
    assert not is_proven(_incident("log_of_zero", dtype="bfloat16"), changed_file="/x/train.py")
    overflow = _incident("low_precision_overflow", dtype="float16")
    assert is_proven(overflow, changed_file="/x/train.py")


def report(location: str, kind: NaNType = NaNType.NAN) -> NaNReport:
    return NaNReport(has_nan=True, nan_type=kind, location=location, tensor_shape=())


INPUT = TensorSummary(name="x", shape=(2,), dtype="float32", device="cpu", numel=2)
NOTICED = Incident(step=25, reports=(report("loss"), report("gradients.weight")))
KNOWN = replace(
    NOTICED,
    reports=NOTICED.reports[:1],  # a second run may stop at the loss
    origin=Origin(phase="forward", file="train.py", line=17, inputs=(INPUT,), exact=True),
    diagnosis=Diagnosis(cause="log_of_zero", why="it is 0", fix="clamp it", confidence="proven"),
)
LATER = replace(NOTICED, step=40)


def test_the_same_values_are_taken_to_have_the_same_cause() -> None:
    told = alike(LATER, NOTICED, KNOWN)
    assert (told.step, told.reports) == (40, LATER.reports)
    assert told.origin is not None
    assert told.diagnosis is not None
    assert (told.origin.file, told.origin.line, told.origin.exact) == ("train.py", 17, False)
    assert told.origin.inputs == ()  # those were of another step
    assert (told.diagnosis.cause, told.diagnosis.confidence) == ("log_of_zero", "possible")
    assert "at step 25" in told.diagnosis.why


@pytest.mark.parametrize(
    ("later", "known"),
    [
        (replace(LATER, reports=(report("loss"),)), KNOWN),
        (replace(LATER, reports=(report("loss", NaNType.POS_INF), LATER.reports[1])), KNOWN),
        (replace(LATER, reports=()), KNOWN),
        (replace(LATER, rank=1), KNOWN),
        (replace(LATER, origin=Origin(phase="backward")), KNOWN),
        (LATER, NOTICED),
        (LATER, replace(KNOWN, origin=Origin(phase="forward", exact=False))),
    ],
)
def test_anything_else_stays_unknown(later: Incident, known: Incident) -> None:
    assert alike(later, NOTICED, known) == later
