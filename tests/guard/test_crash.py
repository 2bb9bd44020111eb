"""Whether an error of the script's own has a NaN behind it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, TensorDataset

from stayfinite.errors import TrainingAbortedError
from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard.discover import ProcessGuard
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


def test_error_about_a_value_that_an_infinite_one_has_made_has_that_one():
    def act():
        length = torch.zeros(2, requires_grad=True).norm()
        ratio = -1 / length
        return Normal(torch.zeros(()), ratio.exp(), validate_args=True)

    assert [name for name, _ in bad_values_of(error_of(act))] == ["ratio"]


def test_error_beside_a_mask_of_infinities_is_no_nan():
    def act():
        scores = torch.zeros(2, requires_grad=True) + torch.tensor([0.0, -torch.inf])
        shares = scores.softmax(-1)
        return Normal(shares, -shares, validate_args=True)

    assert bad_values_of(error_of(act)) == []


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


def in_shape(x):
    assert not torch.isnan(x).any()
    return x


def test_assert_without_words_that_asks_for_a_nan_has_the_tensor():
    error = error_of(lambda: in_shape(torch.full((2, 3), float("nan"))))
    assert [name for name, _ in bad_values_of(error)] == ["x"]


def test_assert_that_a_nan_fails_has_the_tensor():
    def check():
        density = torch.tensor([0.5, float("nan")])
        assert (density >= 0).all(), "a density is wrong"

    assert [name for name, _ in bad_values_of(error_of(check))] == ["density"]


def test_raise_after_a_question_about_an_infinite_value_has_it():
    def check(state):
        if not torch.isfinite(state).all():
            raise RuntimeError("stopped")

    error = error_of(lambda: check(torch.tensor([1.0, float("inf")])))
    assert [name for name, _ in bad_values_of(error)] == ["state"]


def test_exit_in_a_helper_that_asks_for_a_nan_has_the_tensor_of_its_caller():
    def leave(is_nan):
        if is_nan:
            sys.exit(2)

    def train():
        weights = torch.full((3,), float("nan"))
        leave(bool(torch.isnan(weights).any()))

    assert [name for name, _ in bad_values_of(error_of(train))] == ["weights"]


def test_solver_that_speaks_of_an_underflow_has_the_state():
    def solve(y, dt):
        assert dt > 0, f"underflow in dt {dt}"

    error = error_of(lambda: solve(torch.tensor([float("nan")]), 0.0))
    assert [name for name, _ in bad_values_of(error)] == ["y"]


def test_question_about_the_shape_of_padded_data_is_no_nan():
    def check():
        padded = torch.full((3,), float("nan"))
        if padded.shape[0] != 4 or len(padded) != 4 or padded.dim() != 2:
            raise ValueError("four rows are needed")

    assert bad_values_of(error_of(check)) == []


def test_without_a_replay_the_line_is_that_of_the_error():
    guard = Guard(GuardSettings(again="never"))
    guard.attach()
    try:
        guard.script_crashed(error_of(nan_scale))
    finally:
        guard.close()
    (incident,) = guard.incidents
    assert incident.origin.code.strip().startswith("return Normal(")
    assert not incident.origin.exact


def test_crash_in_a_framework_is_run_again_by_whoever_watches_after_it():
    """The framework's guard goes with its error, before the script is known to die of it."""
    process = ProcessGuard(Guard(GuardSettings(on_nan="stop")), lambda guard: guard.attach())
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def training_step(x):
        loss = torch.log(weight * x).sum()
        if torch.isnan(loss):
            raise RuntimeError("Loss is NaN, training stopped.")
        return loss

    def fit():
        lent = process.stand_in(Guard(process.settings))
        try:
            for x in [1.0, 1.0, 1.0, -1.0]:
                optimizer.zero_grad()
                training_step(x).backward()
                optimizer.step()
        finally:
            lent.remove()

    error = error_of(fit)
    process.guard.script_crashed(error)
    process.close()
    (incident,) = process.guard.incidents
    assert incident.origin.exact
    assert incident.origin.code.startswith("loss = torch.log(")
    assert incident.diagnosis.cause == "log_of_negative"


def test_the_batches_before_a_crash_in_a_framework_are_still_known():
    """Its guard goes with the error; whoever looks into that needs the samples of the batch."""
    process = ProcessGuard(Guard(GuardSettings(on_nan="stop")), lambda guard: guard.attach())
    x = torch.ones(8, 2)
    x[5] = float("nan")

    def fit():
        lent = process.stand_in(Guard(process.settings))
        try:
            for (batch,) in DataLoader(TensorDataset(x), batch_size=2):
                loss = torch.ones(2, requires_grad=True) @ batch.mean(0)
                if torch.isnan(loss):
                    raise RuntimeError("Loss is NaN, training stopped.")
        finally:
            lent.remove()

    process.guard.script_crashed(error_of(fit))
    process.close()
    (incident,) = process.guard.incidents
    assert any("sample 5 of the dataset" in said for said in incident.diagnosis.evidence)
