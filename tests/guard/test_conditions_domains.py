"""Operations kept inside their domains on one line, and nowhere else."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stayfinite.guard.conditions import KEPT_FOR, KeptInside

BAD = torch.tensor([0.0, 0.5])

SNIPPETS: list[tuple[str, Callable[[Tensor], Tensor], list[float]]] = [
    ("log_of_zero", lambda x: torch.log(x), [0.0, 0.5]),
    ("log_of_zero", lambda x: x.log(), [0.0, 0.5]),
    ("log_of_negative", lambda x: torch.log1p(x), [-2.0, 0.5]),
    ("sqrt_grad_at_zero", lambda x: x.sqrt(), [0.0, 0.5]),
    ("sqrt_of_negative", lambda x: torch.sqrt(x), [-1e-9, 0.5]),
    ("division_by_zero", lambda x: 1.0 / x, [0.0, 0.5]),
    ("division_by_zero", lambda x: torch.ones(2) / x, [0.0, -0.5]),
    ("division_by_zero", lambda x: torch.div(torch.ones(2), x), [0.0, 0.5]),
    ("pow_of_negative", lambda x: x**0.5, [-1.0, 0.5]),
    ("exp_overflow", lambda x: torch.exp(x), [200.0, 0.5]),
    ("acos_domain", lambda x: torch.acos(x), [1.0001, 0.5]),
    ("softmax_all_masked", lambda x: torch.softmax(x, 0), [-float("inf"), -float("inf")]),
    ("kl_of_zero", lambda x: x * torch.log(x / 2.0), [0.0, 0.5]),
]


def line_of(snippet: Callable[[Tensor], Tensor]) -> int:
    return snippet.__code__.co_firstlineno


@pytest.mark.parametrize(("cause", "snippet", "values"), SNIPPETS)
def test_value_and_gradient_are_finite(
    cause: str, snippet: Callable[[Tensor], Tensor], values: list[float]
) -> None:
    x = torch.tensor(values, requires_grad=True)
    with KeptInside(cause, file=__file__, line=line_of(snippet)) as kept:
        out = snippet(x)
    out.sum().backward()
    assert kept.applied > 0
    assert bool(out.isfinite().all())
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize(("cause", "snippet", "values"), SNIPPETS)
def test_other_lines_are_left_alone(
    cause: str, snippet: Callable[[Tensor], Tensor], values: list[float]
) -> None:
    x = torch.tensor(values)
    with KeptInside(cause, file=__file__, line=line_of(snippet) + 1000) as kept:
        out = snippet(x)
    assert kept.applied == 0
    assert torch.equal(out, snippet(x)) or not out.isfinite().all()


def test_values_inside_the_domain_stay_what_they_are() -> None:
    x = torch.tensor([0.25, 4.0])
    frame = inspect.currentframe()
    assert frame is not None
    with KeptInside("log_of_zero", file=__file__, line=frame.f_lineno + 1):
        kept = torch.log(x)
    assert torch.equal(kept, torch.log(x))


def test_a_nan_is_not_hidden() -> None:
    x = torch.tensor([float("nan")])
    for cause, rules in KEPT_FOR.items():
        for _, keep in rules.values():
            assert bool(keep(x).isnan().all()), cause
