"""stayfinite.trace() around any block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from as_before import attached
from as_before import torch_as_before as torch_as_before
from scenes import Net
from torch import Tensor

import stayfinite
from stayfinite.errors import NonFiniteError, TrainingAbortedError

ZERO = torch.zeros(2)


def root_loss(weight: Tensor) -> None:
    with stayfinite.trace():
        torch.log(weight * 0.0).sum().backward()


def test_bad_root_raises_the_whole_report() -> None:
    with pytest.raises(NonFiniteError) as error:
        root_loss(torch.ones(2, requires_grad=True))
    text = str(error.value)
    assert "torch.log(weight * 0.0).sum().backward()" in text
    assert "log_of_zero" in text
    assert "\x1b" not in text
    assert error.value.incident.diagnosis.cause == "log_of_zero"
    assert error.value.report.location == "loss"
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


def test_it_is_an_arithmetic_error_like_any_other() -> None:
    with pytest.raises(ArithmeticError):
        root_loss(torch.ones(2, requires_grad=True))


def test_bad_gradient_raises_after_the_backward_pass() -> None:
    weight = torch.zeros(2, requires_grad=True)
    with pytest.raises(NonFiniteError) as error, stayfinite.trace():
        torch.sqrt(weight).sum().backward()
    assert error.value.report.location == "gradients.0"
    assert error.value.incident.origin.node == "SqrtBackward0"


def test_bad_gradient_of_a_module_goes_by_its_name() -> None:
    net = Net()
    with pytest.raises(NonFiniteError) as error, stayfinite.trace():
        torch.sqrt(net(torch.ones(1, 3)) * 0.0).sum().backward()
    assert error.value.report.location.startswith("gradients.")
    assert "weight" in error.value.report.location or "bias" in error.value.report.location


def forward_only() -> None:
    with stayfinite.trace():
        scores = torch.log(ZERO)  # noqa: F841


def test_variable_at_the_end_of_the_block_is_looked_at() -> None:
    with pytest.raises(NonFiniteError) as error:
        forward_only()
    assert error.value.report.location == "scores"
    assert error.value.incident.outcome.detail == "nothing was changed"


def test_variable_inside_a_container_goes_by_its_path() -> None:
    with stayfinite.trace(raise_on_nan=False) as block:
        outputs = {"loss": [torch.ones(1), torch.log(ZERO)]}
    assert block.incidents[0].reports[0].location == "outputs.loss.1"
    del outputs


def masked_variable() -> tuple[Tensor, ...]:
    with stayfinite.trace():
        mask = torch.triu(torch.full((3, 3), -math.inf), 1)
        scores = torch.zeros(3, 3) + mask
        padded = torch.tensor([1.0, math.nan])
        best = torch.tensor(-math.inf)
    return scores, padded, best


def test_mask_and_sentinel_variables_are_not_reported() -> None:
    masked_variable()


def test_variable_that_was_bad_before_the_block_is_not_reported() -> None:
    before = torch.log(ZERO)
    with stayfinite.trace():
        doubled = torch.ones(2) * 2
    assert not torch.isfinite(before).any()
    del doubled


def test_private_and_integer_variables_are_passed_over() -> None:
    with stayfinite.trace():
        _hidden = torch.log(ZERO)
        count = torch.arange(3)
        text = "nan"
    assert (count.numel(), text) == (3, "nan")


def test_healthy_block_collects_nothing() -> None:
    net = Net()
    with stayfinite.trace() as block:
        for _ in range(3):
            net(torch.ones(2, 3)).mean().backward()
    assert block.incidents == []


def test_collecting_goes_on_to_the_end_of_the_block() -> None:
    weight = torch.zeros(2, requires_grad=True)
    reached = False
    with stayfinite.trace(raise_on_nan=False) as block:
        torch.sqrt(weight).sum().backward()
        reached = True
    assert reached
    assert block.incidents[0].diagnosis.cause == "sqrt_grad_at_zero"
    assert block.incidents[0].outcome.strategy == "warn"


def test_exception_of_the_user_passes_through() -> None:
    before = attached()
    error = KeyError("theirs")
    with pytest.raises(KeyError) as raised, stayfinite.trace():
        raise error
    assert raised.value is error
    assert attached() == before


def raising_beside_a_bad_variable() -> None:
    with stayfinite.trace():
        bad = torch.log(ZERO)
        raise ValueError(f"theirs {bad.shape}")


def test_exception_of_the_user_wins_over_a_bad_variable() -> None:
    with pytest.raises(ValueError, match="theirs"):
        raising_beside_a_bad_variable()


def stop_asked_by_somebody_else() -> None:
    with stayfinite.trace():
        raise TrainingAbortedError("of another guard")


def test_stop_of_another_guard_passes_through() -> None:
    with pytest.raises(TrainingAbortedError, match="of another guard"):
        stop_asked_by_somebody_else()


def swallowing(weight: Tensor) -> None:
    with stayfinite.trace(), contextlib.suppress(RuntimeError):
        torch.log(weight * 0.0).sum().backward()


def test_stop_that_the_block_swallowed_is_raised_at_its_end() -> None:
    with pytest.raises(NonFiniteError):
        swallowing(torch.ones(2, requires_grad=True))


def test_inner_block_raises_and_the_outer_passes_it_on() -> None:
    before = attached()
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(NonFiniteError), stayfinite.trace() as outer, stayfinite.trace() as inner:
        torch.log(weight * 0.0).sum().backward()
    assert len(inner.incidents) == 1
    assert outer.incidents == []
    assert attached() == before


def test_outer_block_raises_when_the_inner_one_collects() -> None:
    weight = torch.ones(2, requires_grad=True)
    collecting = stayfinite.trace(raise_on_nan=False)
    with pytest.raises(NonFiniteError), stayfinite.trace() as outer, collecting as inner:
        torch.log(weight * 0.0).sum().backward()
    assert inner.incidents[0].diagnosis.cause == "log_of_zero"
    assert outer.incidents[0].diagnosis.cause == "log_of_zero"


def test_outer_block_still_traces_after_the_inner_one() -> None:
    with stayfinite.trace(raise_on_nan=False) as outer:
        with stayfinite.trace():
            fine = torch.ones(2) * 2
        bad = torch.log(ZERO)
    assert outer.incidents[0].origin.facts["expression"] == "torch.log(ZERO)"
    del fine, bad


def test_grad_without_backward_is_looked_at_too() -> None:
    x = torch.zeros(2, requires_grad=True)
    with stayfinite.trace(raise_on_nan=False) as block:
        (slope,) = torch.autograd.grad(torch.sqrt(x).sum(), x)
    assert block.incidents[0].reports[0].location == "slope"
    assert block.incidents[0].origin.facts["expression"] == "torch.sqrt(x)"
    del slope


def test_block_in_a_generator_can_be_left_early() -> None:
    def batches() -> Iterator[int]:
        with stayfinite.trace():
            yield 1
            yield 2

    before = attached()
    running: Any = batches()
    assert next(running) == 1
    running.close()
    assert attached() == before


@pytest.mark.parametrize("grad", [True, False])
def test_block_without_gradients_is_traced_as_well(grad: bool) -> None:
    with torch.set_grad_enabled(grad), stayfinite.trace(raise_on_nan=False) as block:
        result = Net()(torch.full((1, 3), 1e30)) / 0.0
    assert block.incidents[0].diagnosis.cause == "division_by_zero"
    del result
