"""An Inf that somebody wrote is not to blame, however it was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import stayfinite
from stayfinite.records import Incident

CLOSED = torch.tensor([[True, False], [True, True]])
LOWEST = -torch.inf


def by_item(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[CLOSED] = -torch.inf
    return scores


def by_a_name(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[CLOSED] = LOWEST
    return scores


def by_slices(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[1, :] = LOWEST
    scores[0, 0] = LOWEST
    return scores


def by_where(scores: Tensor) -> Tensor:
    return torch.where(CLOSED, torch.tensor(float("-inf")), scores)


def by_filling(scores: Tensor) -> Tensor:
    return scores.masked_fill(CLOSED, LOWEST)


def found(compute: Callable[[], Tensor]) -> Incident:
    with stayfinite.trace(raise_on_nan=False) as traced:
        compute().sum().backward()
    return traced.incidents[0]


@pytest.mark.parametrize("close", [by_item, by_a_name, by_slices, by_where, by_filling])
def test_the_softmax_is_blamed_and_not_the_mask(close: Callable[[Tensor], Tensor]) -> None:
    scores = torch.zeros(2, 2, requires_grad=True)
    incident = found(lambda: torch.softmax(close(scores), -1))
    assert incident.origin is not None
    assert incident.diagnosis is not None
    assert incident.origin.op == "aten._softmax.default"
    assert incident.diagnosis.cause == "softmax_all_masked"


def test_a_number_of_the_data_is_still_data() -> None:
    weight, price = torch.ones(2, requires_grad=True), float("inf")

    def compute() -> Tensor:
        return weight * torch.tensor(price)

    incident = found(compute)
    assert incident.origin is not None
    assert incident.origin.phase == "data"


def test_a_nan_that_torch_answers_with_is_born_on_the_line_that_asked() -> None:
    matrix = torch.diag(torch.tensor([1.0, -2.0])).requires_grad_()

    def compute() -> Tensor:
        return torch.logdet(matrix)

    incident = found(compute)
    assert incident.origin is not None
    assert incident.diagnosis is not None
    assert incident.origin.code == "return torch.logdet(matrix)"
    assert incident.diagnosis.cause == "degenerate_linalg"


def test_the_same_nan_is_nobody_s_fault_where_it_is_not_chosen() -> None:
    matrix = torch.eye(2, requires_grad=True)
    with stayfinite.trace():
        torch.logdet(matrix).backward()
