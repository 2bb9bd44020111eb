"""Each cause that one operation shows, from the smallest real snippet that has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scenes import cause, gradient
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Normal
from torch.nn import functional

from stayfinite.causes import CAUSES

INF = math.inf
ZERO, ONE = torch.zeros(3), torch.ones(3)
Snippet = Callable[[], Any]
SNIPPETS: list[tuple[str, Snippet]] = []


def shows(slug: str) -> Callable[[Snippet], Snippet]:
    def keep(snippet: Snippet) -> Snippet:
        SNIPPETS.append((slug, snippet))
        return snippet

    return keep


def of_gradient(slug: str, function: Callable[[Tensor], Tensor], *values: float) -> None:
    SNIPPETS.append((slug, lambda: gradient(function, *values)))


def second_gradient(function: Callable[[Tensor], Tensor]) -> Any:
    x = torch.zeros(3, requires_grad=True)
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(first.nan_to_num().sum(), x)


@shows("bad_lr_schedule")
def _update_by_hand() -> Any:
    base_lr = math.nan
    return ONE - base_lr * ONE


@shows("unknown")
def _number_that_is_none() -> Any:
    weight = math.nan
    return weight * ONE


shows("division_by_zero")(lambda: ONE / ZERO)
shows("division_by_zero")(lambda: ZERO.reciprocal())
shows("division_by_zero")(lambda: ZERO**-1)
shows("division_by_zero")(lambda: torch.rsqrt(ZERO))
shows("log_of_zero")(lambda: torch.log(ZERO))
shows("log_of_zero")(lambda: torch.xlogy(torch.rand(3), ZERO))  # what is random is the factor
shows("log_of_zero")(lambda: (ZERO * (1 - torch.sigmoid(ONE * 200)).log()).sum())
shows("support_boundary")(lambda: torch.lgamma(ZERO))
shows("support_boundary")(lambda: torch.digamma(-ONE + 1))
shows("log_of_zero")(lambda: torch.softmax(torch.tensor([0.0, 200.0]), -1).log())
shows("log_of_zero")(lambda: torch.log2(torch.sigmoid(ONE * -200)))
shows("log_of_zero")(lambda: torch.log(1 - ONE))
# In bfloat16 a zero is one, unless it is a difference that was rounded away.
shows("log_of_zero")(lambda: torch.log(ZERO.bfloat16()))
shows("low_precision_underflow")(lambda: torch.log(1 - (ONE * 0.9995).bfloat16()))
shows("log_of_negative")(lambda: torch.log(ZERO - 1))
shows("log_of_negative")(lambda: torch.log1p(ZERO - 2))
shows("exp_overflow")(lambda: torch.exp(ONE * 100))
shows("exp_overflow")(lambda: torch.sinh(ONE * 200))
shows("sqrt_of_negative")(lambda: torch.sqrt(ZERO - 1e-8))
shows("pow_of_negative")(lambda: torch.pow(ZERO - 2, 1.5))
shows("acos_domain")(lambda: torch.acos(ONE * 1.0001))
shows("acos_domain")(lambda: torch.atanh(ONE))
shows("inf_minus_inf")(lambda: torch.full((2,), INF) - torch.full((2,), INF))
shows("zero_times_inf")(lambda: torch.tensor([0.0, 1.0]) * -INF)
shows("zero_times_inf")(lambda: torch.full((2,), -INF) * torch.zeros(2))
shows("batchnorm_degenerate")(lambda: nn.GroupNorm(2, 2, eps=0.0)(torch.ones(1, 2, 8)))
shows("empty_reduction")(lambda: torch.ones(0).mean())
shows("empty_reduction")(lambda: torch.ones(4)[torch.zeros(4, dtype=torch.bool)].mean())
shows("var_of_single")(lambda: torch.ones(1).std())
shows("var_of_single")(lambda: torch.ones(1, 4).var(0))
shows("softmax_all_masked")(lambda: torch.softmax(torch.full((2, 3), -INF), -1))
shows("softmax_all_masked")(lambda: functional.log_softmax(torch.full((2, 3), -INF), -1))
shows("softmax_all_masked")(
    lambda: Categorical(logits=torch.full((2, 3), -INF), validate_args=False).logits
)
shows("cosine_zero_vector")(lambda: normalised(torch.zeros(2, 3)))
shows("kl_of_zero")(lambda: entropy(torch.tensor([0.0, 1.0])))
shows("gumbel_log_zero")(lambda: -torch.log(torch.rand(1000).mul(0.0)))
shows("bad_label")(lambda: functional.cross_entropy(torch.randn(2, 3), torch.full((2,), -100)))
shows("ctc_infeasible")(lambda: ctc())
shows("zero_scale_distribution")(lambda: Normal(ZERO, ZERO, validate_args=False).log_prob(ZERO))
shows("support_boundary")(lambda: Beta(ONE * 2, ONE * 2, validate_args=False).log_prob(ZERO))
shows("degenerate_linalg")(lambda: torch.linalg.inv_ex(torch.zeros(2, 2))[0])
shows("low_precision_overflow")(lambda: torch.full((2,), 300.0).half() * 300)
shows("low_precision_overflow")(lambda: torch.full((2,), 1e5).half())
shows("low_precision_underflow")(lambda: ONE.half() / (ONE * 1e-9).half())
shows("mask_value_overflow")(lambda: torch.tensor([1.0, 0.0]).half() * -1e9)
shows("mask_value_overflow")(lambda: torch.tensor([-1e9, 0.0]).half())
LOWEST = torch.finfo(torch.float32).min
shows("mask_value_overflow")(lambda: ONE * LOWEST + ONE * LOWEST)
shows("bad_input_data")(lambda: fed(torch.tensor([[1.0, math.nan, 0.0]])))
shows("bad_input_data")(lambda: fed(torch.tensor([[1.0, 1e30, 0.0]]).square()))
shows("weight_norm_of_zero")(lambda: zero_weight_norm())
shows("sqrt_grad_at_zero")(lambda: second_gradient(lambda x: (x * x).sum().sqrt()))
of_gradient("sqrt_grad_at_zero", torch.sqrt, 0.0)
of_gradient("pow_grad_at_zero", lambda x: x**0.3, 0.0)
of_gradient("where_grad_trap", lambda x: torch.where(x > 0, torch.sqrt(x), 0.0), 0.0, 1.0)
of_gradient("where_grad_trap", lambda x: torch.where(x > 0, torch.log(x), 0.0), 0.0, 1.0)
of_gradient("atan2_grad_at_zero", lambda x: torch.atan2(x[0], x[1]), 1e-20, 1e-20)
of_gradient("acos_domain", torch.acos, 1.0)
of_gradient("log_of_zero", lambda x: torch.log(x).clamp_min(-100), 0.0)
of_gradient("division_by_zero", lambda x: torch.atan(1 / x), 0.0)


def normalised(x: Tensor) -> Tensor:
    return nn.Identity()(x) / x.norm(dim=-1, keepdim=True)


def fed(x: Tensor) -> None:
    nn.Linear(3, 1)(x).sum().backward()


def entropy(p: Tensor) -> Tensor:
    return -(p * torch.log(p)).sum()


def ctc() -> Tensor:
    scores = torch.randn(2, 1, 4).log_softmax(-1)
    lengths = torch.tensor([2]), torch.tensor([3])
    return functional.ctc_loss(scores, torch.tensor([[1, 1, 2]]), *lengths)


def zero_weight_norm() -> Tensor:
    layer = nn.Linear(3, 2)
    nn.init.zeros_(layer.weight)
    return nn.utils.parametrizations.weight_norm(layer)(torch.ones(1, 3))


@shows("degenerate_linalg")
def singular_values() -> Tensor:
    matrix = torch.eye(3, requires_grad=True)
    left, _, right = torch.linalg.svd(matrix)
    (left[0, 1] + right[0, 1]).backward()
    return matrix.grad


@shows("norm_grad_at_zero")
def second_derivative_of_a_norm() -> Tensor:
    x = torch.zeros(3, requires_grad=True)
    energy = x.norm()
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    slope.sum().backward()
    return x.grad


@shows("grad_accumulation_overflow")
def accumulated() -> Tensor:
    weight = torch.ones(1, dtype=torch.float16, requires_grad=True)
    for _ in range(2):
        (weight * 40000.0).sum().backward()
    return weight.grad


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize(
    ("slug", "snippet"), SNIPPETS, ids=[f"{slug}-{n}" for n, (slug, _) in enumerate(SNIPPETS)]
)
def test_cause_is_named(slug: str, snippet: Snippet) -> None:
    assert cause(snippet) == slug


def test_table_has_no_cause_that_the_catalogue_lacks() -> None:
    assert {slug for slug, _ in SNIPPETS} <= set(CAUSES)
