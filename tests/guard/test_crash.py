"""Whether an error of the script's own has a NaN behind it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.distributions import Categorical, Normal

from stayfinite.errors import TrainingAbortedError
from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard.guard import bad_values_of


def error_of(act):
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        act()
    return caught.value


def nan_scale():
    scale = torch.log(torch.tensor([-1.0]))
    return Normal(torch.zeros(1), scale, validate_args=True)


def nan_logits():
    return Categorical(logits=torch.full((2, 3), float("nan")), validate_args=True)


def nan_probabilities():
    weights = torch.tensor([float("nan"), 1.0])
    return torch.multinomial(weights, 1)


@pytest.mark.parametrize("act", [nan_scale, nan_logits, nan_probabilities])
def test_error_that_speaks_of_a_nan_has_its_tensor(act):
    assert bad_values_of(error_of(act))


def test_exit_beside_a_nan_loss_has_the_loss():
    def leave():
        loss = torch.tensor(float("nan"))
        if torch.isnan(loss):
            sys.exit(1)

    assert [name for name, _ in bad_values_of(error_of(leave))] == ["loss"]


def test_ordinary_bug_beside_padded_data_is_no_nan():
    def slip():
        padded = torch.full((3,), float("nan"))
        return {"a": padded}["b"]

    assert bad_values_of(error_of(slip)) == []


def test_exit_beside_padded_data_is_no_nan():
    def leave():
        padded = torch.full((3,), float("nan"))
        sys.exit(str(padded.shape) and 0)

    assert bad_values_of(error_of(leave)) == []


def test_complaint_about_finite_values_is_no_nan():
    assert (
        bad_values_of(error_of(lambda: Normal(torch.zeros(1), -torch.ones(1), validate_args=True)))
        == []
    )


def test_crash_is_an_incident_that_stops_nothing_more():
    guard = Guard(GuardSettings(trace="start"))
    guard.attach()
    try:
        guard.script_crashed(error_of(nan_scale))
    except TrainingAbortedError:
        pytest.fail("the script is over already; there is nothing to stop")
    finally:
        guard.close()
    (incident,) = guard.incidents
    assert incident.diagnosis.cause == "log_of_negative"
    assert incident.outcome.strategy == "none"
    assert not guard.stopped
