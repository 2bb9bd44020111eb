"""An Inf that somebody wrote on purpose is blameless; what it does to others is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scenes import gradient, guilty, kinds, origin
from torch import Tensor, nn
from torch.nn import functional

INF = math.inf
MASK = torch.tensor([[False, True, True], [False, False, True]])
ALL = torch.tensor([[True, True, True], [False, False, True]])
SCORES = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])


def softmax_of_masked(mask: Tensor) -> list[Tensor]:
    scores = SCORES.clone().requires_grad_()
    masked = scores.masked_fill(mask, -INF)
    attention = torch.softmax(masked, -1)
    loss = (attention * SCORES).sum()
    loss.backward()
    return [loss, scores.grad]


def test_masked_fill_before_a_softmax_is_not_blamed() -> None:
    assert origin(lambda: softmax_of_masked(MASK)) is None


def test_softmax_of_a_row_that_is_masked_everywhere_is_the_conversion() -> None:
    found = origin(lambda: softmax_of_masked(ALL))
    assert found.op == "aten._softmax.default"
    assert found.facts["expression"] == "torch.softmax(masked, -1)"
    assert found.lineage[0].kind == "conversion"


def test_mask_stays_out_of_the_blame_for_another_nan() -> None:
    def step() -> Tensor:
        scores = SCORES.masked_fill(MASK, -INF)
        attention = torch.softmax(scores, -1)
        return attention.sum() + torch.log(torch.tensor(-1.0))

    assert guilty(step) == "torch.log(torch.tensor(-1.0))"


WRITTEN = {
    "full": lambda: torch.full((2, 3), -INF),
    "full_like": lambda: torch.full_like(SCORES, -INF),
    "new_full": lambda: SCORES.new_full((2,), -INF),
    "fill_": lambda: torch.zeros(2).fill_(-INF),
    "masked_fill": lambda: SCORES.masked_fill(MASK, -INF),
    "masked_fill_": lambda: SCORES.clone().masked_fill_(MASK, -INF),
    "where scalar": lambda: torch.where(MASK, -INF, SCORES),
    "added": lambda: SCORES + -INF,
    "pad": lambda: functional.pad(SCORES, (0, 1), value=-INF),
    "nan": lambda: torch.full((2,), math.nan),
}


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_constant_is_meant(write: object) -> None:
    first, *others = kinds(write)
    assert first == "constant"
    assert set(others) <= {"spread"}


def test_item_assignment_of_a_constant_is_no_birth() -> None:
    def step() -> Tensor:
        scores = SCORES.clone()
        scores[0, 1] = -INF
        scores[MASK] = -INF
        return scores

    assert "birth" not in kinds(step)
    assert "conversion" not in kinds(step)


def test_additive_mask_is_not_blamed_but_what_makes_it_nan_is() -> None:
    def step() -> Tensor:
        mask = torch.triu(torch.full((3, 3), -INF), 1)
        scores = torch.zeros(3, 3) + mask
        weights = torch.softmax(scores, -1)
        return weights.sum() + (scores - scores).sum()

    assert guilty(step) == "scores - scores"


def test_mask_times_minus_inf_is_blamed_where_it_multiplies() -> None:
    def step() -> Tensor:
        mask = MASK.float()
        return torch.softmax(SCORES + mask * -INF, -1)

    found = origin(step)
    assert found.facts["expression"] == "mask * -INF"
    assert found.op == "aten.mul.Tensor"


def test_causal_mask_in_attention_is_not_blamed() -> None:
    query = torch.randn(1, 1, 4, 8, requires_grad=True)

    def step() -> Tensor:
        functional.scaled_dot_product_attention(
            query, query, query, is_causal=True
        ).sum().backward()
        return query.grad

    assert origin(step) is None


def test_running_maximum_that_starts_at_minus_inf_is_not_blamed() -> None:
    def step() -> Tensor:
        best = torch.tensor(-INF)
        for value in SCORES.flatten():
            best = torch.maximum(best, value)
        return best

    assert origin(step) is None


# Hidden in the forward pass, poison in the backward pass.
HIDDEN = {
    "where": lambda x: torch.where(x > 0, torch.log(x), 0.0),
    "atan": lambda x: torch.atan(1 / torch.sqrt(x)),
    "nan_to_num": lambda x: torch.nan_to_num(torch.sqrt(x), 0.0),
}
INNER = {"where": "torch.log(x)", "atan": "1 / torch.sqrt(x)", "nan_to_num": "torch.sqrt(x)"}


@pytest.mark.parametrize("how", HIDDEN)
def test_value_hidden_in_the_forward_is_found_by_its_gradient(how: str) -> None:
    values = [-1.0, 1.0] if how == "nan_to_num" else [0.0, 1.0]
    expression = guilty(lambda: gradient(HIDDEN[how], *values))
    assert expression in (INNER[how], "torch.sqrt(x)")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.array([1.0, np.nan], dtype=np.float32)),
        lambda: torch.tensor([1.0, math.nan]),
        lambda: torch.as_tensor([INF, 1.0]),
    ],
    ids=["numpy", "list", "as_tensor"],
)
def test_value_from_outside_is_foreign(make: object) -> None:
    found = origin(lambda: make() * 2.0)
    assert found.lineage[0].kind == "foreign"
    assert found.phase == "data"
    assert found.outputs[0].bad_count == 1


class Causal(nn.Module):
    """Attention whose mask was made long before the tracing begins."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))

    def forward(self, scores: Tensor, padding: Tensor) -> Tensor:
        return torch.softmax(scores + self.mask + padding, -1)


@pytest.mark.parametrize("all_masked", [True, False])
def test_mask_from_before_is_as_blameless_as_a_new_one(all_masked: bool) -> None:
    net = Causal()
    padding = torch.tensor([-INF if all_masked else 0.0, 0.0, 0.0])
    found = origin(lambda: net(torch.zeros(3, 3), padding))
    if all_masked:
        assert found.lineage[0].kind == "conversion"
        assert found.facts["expression"] == "torch.softmax(scores + self.mask + padding, -1)"
    else:
        assert found is None


def test_infinite_feature_is_still_bad_data() -> None:
    features = torch.tensor([[0.3, -INF, 0.1]])
    found = origin(lambda: nn.Linear(3, 1)(features - features.mean()))
    assert (found.phase, found.lineage[0].kind) == ("data", "foreign")
