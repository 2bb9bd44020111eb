"""What looks like a cause and is none: nothing is reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scenes import found, gradient
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

INF = math.inf
ZERO, ONE = torch.zeros(3), torch.ones(3)


def attention() -> Tensor:
    scores = torch.randn(2, 4, requires_grad=True)
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]).bool()
    torch.softmax(scores.masked_fill(mask, -INF), -1).square().sum().backward()
    return scores.grad


def nan_padded_targets() -> Tensor:
    weight = torch.ones(4, requires_grad=True)
    target = torch.tensor([1.0, math.nan, 2.0, math.nan])
    is_known = ~target.isnan()
    (weight[is_known] - target[is_known]).square().mean().backward()
    return weight.grad


def safe_where() -> Tensor:
    def function(x: Tensor) -> Tensor:
        safe = torch.where(x > 0, x, 1.0)
        return torch.where(x > 0, safe.log(), 0.0)

    return gradient(function, 0.0, 1.0)


def hidden_infinity() -> Tensor:
    return torch.where(ONE > 0, ONE, ONE / ZERO)


def clamped() -> Tensor:
    return gradient(lambda x: torch.log(x.clamp_min(1e-8)), 0.0, 1.0)


def norm_at_zero() -> Tensor:
    return gradient(lambda x: x.norm(), 0.0, 0.0)


def ignored_labels() -> Tensor:
    scores = torch.randn(3, 4, requires_grad=True)
    functional.cross_entropy(scores, torch.tensor([1, -100, 2])).backward()
    return scores.grad


def ctc_with_zero_infinity() -> Tensor:
    scores = torch.randn(2, 1, 4, requires_grad=True)
    lengths = torch.tensor([2]), torch.tensor([3])
    loss = functional.ctc_loss(
        scores.log_softmax(-1), torch.tensor([[1, 1, 2]]), *lengths, zero_infinity=True
    )
    loss.backward()
    return scores.grad


def constant_channel_with_eps() -> Tensor:
    norm = nn.BatchNorm1d(2)
    inputs = torch.ones(4, 2, requires_grad=True)
    norm(inputs).sum().backward()
    return inputs.grad


def adam_on_a_zero_gradient() -> Tensor:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    (weight * 0.0).sum().backward()
    optimizer.step()
    return weight


def narrow_normal() -> Tensor:
    return Normal(ZERO, ONE * 1e-3).log_prob(ZERO)


def half_below_its_limit() -> Tensor:
    return torch.full((2,), 60000.0).half() + 1


def xlogy_of_zero() -> Tensor:
    return torch.xlogy(ZERO, ZERO).sum()


def best_so_far() -> float:
    best = math.inf
    for value in (3.0, 2.0, 4.0):
        best = min(best, value)
    return best


def sentinel_that_stays() -> list[Tensor]:
    return [torch.full((2,), INF), torch.tensor(-INF), ZERO + -INF]


def empty_selection_summed() -> Tensor:
    chosen = ONE[ONE < 0]
    return chosen.sum() / max(1, chosen.numel())


def logsumexp_with_masked_terms() -> Tensor:
    scores = torch.randn(4, requires_grad=True)
    torch.logsumexp(scores + torch.tensor([0.0, -INF, 0.0, -INF]), -1).backward()
    return scores.grad


def max_pool_with_padding() -> Tensor:
    image = torch.randn(1, 1, 4, 4, requires_grad=True)
    functional.max_pool2d(image, 3, padding=1).sum().backward()
    return image.grad


def cosine_with_eps() -> Tensor:
    return functional.cosine_similarity(torch.zeros(2, 3), torch.ones(2, 3))


HEALTHY = [
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__module__", "") == __name__
]


@pytest.mark.parametrize("snippet", HEALTHY, ids=lambda snippet: snippet.__name__)
def test_look_alike_is_not_reported(snippet: Any) -> None:
    assert [incident.diagnosis.cause for incident in found(snippet)] == []
