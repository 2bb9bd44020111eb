"""In bfloat16 a zero is one, unless it is a difference that was rounded away."""

from __future__ import annotations

import torch

import stayfinite


def cause_of(value: torch.Tensor, *, is_difference: bool) -> str:
    with stayfinite.trace(raise_on_nan=False) as found:
        loss = torch.log(1 - value if is_difference else value).sum()
        loss.backward()
    diagnosis = found.incidents[0].diagnosis
    assert diagnosis is not None
    return diagnosis.cause


def test_one_less_almost_one_is_a_matter_of_precision() -> None:
    almost = torch.tensor([0.5, 0.9995], dtype=torch.bfloat16, requires_grad=True)
    assert cause_of(almost, is_difference=True) == "low_precision_underflow"


def test_a_zero_that_was_given_is_not() -> None:
    zero = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    assert cause_of(zero, is_difference=False) == "log_of_zero"


def test_a_difference_in_float32_is_not() -> None:
    one = torch.ones(2, requires_grad=True)
    assert cause_of(one, is_difference=True) == "log_of_zero"
