"""What a detector skips, counts and remembers."""

from __future__ import annotations

import gc
import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from stayfinite import NaNDetector

NAN = torch.tensor([1.0, math.nan])
GOOD = torch.ones(2)


def model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model(torch.randn(4, 2)).sum().backward()
    return model


def test_an_interval_looks_at_the_first_call_and_every_nth_after_it() -> None:
    detector = NaNDetector(detection_interval=3)
    loss = torch.tensor(math.nan)
    assert [detector.check_loss(loss).has_nan for _ in range(7)] == [
        True, False, False, True, False, False, True,
    ]  # fmt: skip
    assert [bool(detector.check_batch([NAN])) for _ in range(4)] == [True, False, False, True]
    assert all(detector.check_tensor(NAN, "x").has_nan for _ in range(4))
    assert detector.get_statistics()["skipped"] == 6


def test_an_interval_is_counted_for_each_model() -> None:
    detector = NaNDetector(detection_interval=2)
    models = [model_with_gradients() for _ in range(2)]
    for model in models:
        model[0].weight.grad.fill_(math.nan)
    looked = [[bool(detector.check_model(model)) for model in models] for _ in range(3)]
    assert looked == [[True, True], [False, False], [True, True]]


def test_a_detector_keeps_no_model_alive() -> None:
    detector = NaNDetector()
    model = model_with_gradients()
    detector.check_model(model)
    del model
    gc.collect()
    assert len(detector._objects) == 0


def test_statistics_count_checks_hits_steps_and_streaks() -> None:
    detector = NaNDetector()
    good, bad = torch.tensor(1.0), torch.tensor(-math.inf)
    for loss in (good, bad, bad, good, bad):
        detector.check_loss(loss)
    assert detector.get_statistics() == {
        "checks": 5,
        "skipped": 0,
        "hits": 3,
        "hit_rate": 0.6,
        "hits_by_type": {"neg_inf": 3},
        "hits_by_location": {"loss": 3},
        "first_bad_step": 1,
        "last_bad_step": 4,
        "current_streak": 1,
        "longest_streak": 2,
    }
    detector.check_loss(good)
    assert detector.get_statistics()["current_streak"] == 0
    detector.reset_statistics()
    assert detector.get_statistics()["checks"] == 0
    assert detector.get_statistics()["first_bad_step"] is None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20))
def test_two_checks_of_one_step_are_one_step_in_the_streak(steps: list[tuple[bool, bool]]) -> None:
    detector = NaNDetector()
    for bad_loss, bad_batch in steps:
        detector.check_loss(NAN if bad_loss else GOOD)
        detector.check_batch([NAN if bad_batch else GOOD])
    marks = "".join("x" if any(step) else " " for step in steps)
    streaks = [len(run) for run in marks.split(" ")]
    statistics = detector.get_statistics()
    assert statistics["current_streak"] == streaks[-1]
    assert statistics["longest_streak"] == max(streaks)
    assert statistics["first_bad_step"] == (marks.index("x") if "x" in marks else None)
