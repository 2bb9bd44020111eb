"""Where the true value and slope exist and the dtype can hold them, they are what is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import pytest
import torch
from edges import DTYPES, gradients, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.ops import (
    EPS,
    eps_of,
    log1mexp,
    safe_acos,
    safe_atan2,
    safe_div,
    safe_log,
    safe_pow,
    safe_sqrt,
    steepest,
)

Number = Any  # an mpmath number


@dataclass(frozen=True, kw_only=True)
class Truth:
    """An operation, what it should be, and where that exists (`near` is eps)."""

    call: Callable[..., Tensor]
    inputs: int = 1
    value: Callable[..., Number]
    exists: Callable[..., bool]
    slopes: tuple[Callable[..., Number], ...]
    is_steep: Callable[..., bool]  # there the slope is 0 by design
    rounds_exponent: bool = False  # of a slope, as torch does


def of_power(p: float) -> Truth:
    return Truth(
        call=lambda x: safe_pow(x, p),
        value=lambda x: mpmath.power(x, p),
        exists=lambda x, near: x >= 0 and (p >= 0 or x >= near),
        slopes=(lambda x: p * mpmath.power(x, p - 1),),
        is_steep=lambda x, near: x < 0 or (p < 1 and x < near),
    )


TRUTHS = {
    "safe_log": Truth(
        call=safe_log,
        value=mpmath.log,
        exists=lambda x, near: x >= near,
        slopes=(lambda x: 1 / x,),
        is_steep=lambda x, near: x < near,
    ),
    "safe_sqrt": Truth(
        call=safe_sqrt,
        value=mpmath.sqrt,
        exists=lambda x, near: x >= 0,
        slopes=(lambda x: 1 / (2 * mpmath.sqrt(x)),),
        is_steep=lambda x, near: x < near,
    ),
    "safe_div": Truth(
        call=safe_div,
        inputs=2,
        value=lambda a, b: a / b,
        exists=lambda a, b, near: abs(b) >= near,
        slopes=(lambda a, b: 1 / b, lambda a, b: -a / b**2),
        is_steep=lambda a, b, near: abs(b) < near,
    ),
    "safe_pow 0.5": of_power(0.5),
    "safe_pow 1.5": of_power(1.5),
    "safe_pow -0.7": of_power(-0.7),
    "safe_pow": Truth(
        call=safe_pow,
        inputs=2,
        value=mpmath.power,
        exists=lambda x, p, near: x > 0 and (p >= 0 or x >= near),
        slopes=(
            lambda x, p: p * mpmath.power(x, p - 1),
            lambda x, p: mpmath.power(x, p) * mpmath.log(x),
        ),
        is_steep=lambda x, p, near: x < near and p < 1,
        rounds_exponent=True,
    ),
    "safe_acos": Truth(
        call=safe_acos,
        value=mpmath.acos,
        exists=lambda x, near: abs(x) <= 1,
        slopes=(lambda x: -1 / mpmath.sqrt((1 - x) * (1 + x)),),
        is_steep=lambda x, near: abs(x) >= 1,
    ),
    "safe_atan2": Truth(
        call=safe_atan2,
        inputs=2,
        value=mpmath.atan2,
        exists=lambda y, x, near: y != 0 or x > 0,  # mpmath has no -0
        slopes=(lambda y, x: x / (x**2 + y**2), lambda y, x: -y / (x**2 + y**2)),
        is_steep=lambda y, x, near: mpmath.hypot(y, x) < near,
    ),
    "log1mexp": Truth(
        call=log1mexp,
        value=lambda x: mpmath.log1p(-mpmath.exp(-abs(x))),
        exists=lambda x, near: abs(x) >= near,
        slopes=(lambda x: mpmath.sign(x) / mpmath.expm1(abs(x)),),
        is_steep=lambda x, near: abs(x) < near,
    ),
}


def check(got: float, true: Number, about: torch.finfo, room: float, ulps: float = 8) -> None:
    # Slopes are products, in which one factor may be subnormal.
    allowed = ulps * about.eps * abs(true) + room * about.tiny
    assert abs(got - true) <= allowed, f"{got} should be {mpmath.nstr(true, 10)}"


@pytest.mark.parametrize("name", TRUTHS)
@settings(deadline=None)
@given(dtype=st.sampled_from(DTYPES), data=st.data())
def test_true_value_and_slope(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    truth, about = TRUTHS[name], torch.finfo(dtype)
    inputs = [data.draw(tensors(dtype, 4)) for _ in range(truth.inputs)]
    value, slopes = gradients(truth.call, *inputs)
    near = eps_of(dtype)
    with mpmath.workdps(360):
        for column in range(4):
            point = [mpmath.mpf(each[column].item()) for each in inputs]
            room = max(1.0, *(abs(float(each)) for each in point[1:])) if point[1:] else 1.0
            if not truth.exists(*point, near):
                continue
            true = truth.value(*point)
            if abs(true) > about.max:
                continue
            check(value[column].item(), true, about, room)
            if truth.is_steep(*point, near * 1.01):
                continue
            for slope, found in zip(truth.slopes, slopes, strict=True):
                true = slope(*point)
                ulps = 8 + math.log(about.max) * truth.rounds_exponent
                if abs(true) <= steepest(dtype):
                    check(found[column].item(), true, about, room, ulps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_slope_nearer_than_eps(dtype: torch.dtype) -> None:
    inside = torch.tensor([eps_of(dtype) / 2, 0.0, -1.0], dtype=dtype)
    for call in (safe_log, safe_sqrt, lambda x: safe_pow(x, 0.5)):
        _, (slope,) = gradients(call, inside)
        assert slope.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("call", "inputs", "expected"),
    [
        (safe_log, [-1.0], math.log(EPS)),
        (safe_sqrt, [-1.0], 0.0),
        (safe_div, [0.0, 0.0], 0.0),
        (safe_div, [2.0, 0.0], 2.0 / EPS),
        (safe_div, [2.0, -EPS / 2], -2.0 / EPS),
        (safe_pow, [-3.0, 0.5], 0.0),
        (safe_pow, [-3.0, 3.0], -27.0),
        (safe_pow, [-3.0, 2.0], 9.0),
        (safe_pow, [0.0, 0.0], 1.0),
        (safe_pow, [0.0, -1.0], 1 / EPS),
        (safe_acos, [1.5], 0.0),
        (safe_acos, [-7.0], math.pi),
        (safe_atan2, [0.0, 0.0], 0.0),
        (log1mexp, [0.0], math.log(EPS)),
    ],
)
def test_outside_of_the_domain(
    call: Callable[..., Tensor], inputs: list[float], expected: float
) -> None:
    value = call(*(torch.tensor(each, dtype=torch.float64) for each in inputs))
    assert value.item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overflow_gives_the_largest_number(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    large = torch.tensor([limit, -limit], dtype=dtype)
    assert safe_div(large, torch.full_like(large, 0.5)).tolist() == [limit, -limit]
    assert safe_pow(large, 3).tolist() == [limit, -limit]


def test_eps_can_be_chosen() -> None:
    x = torch.tensor([0.0, 0.05, 0.2], requires_grad=True)
    safe_log(x, 0.1).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0.0, 0.0, 5.0])
    assert safe_log(x, 0.1)[0].item() == pytest.approx(math.log(0.1))


def test_eps_is_never_lost_in_half_precision() -> None:
    assert safe_log(torch.zeros(1, dtype=torch.float16), 1e-20).isfinite().all()


@pytest.mark.parametrize("eps", [0.0, -1e-8, math.nan])
def test_bad_eps_is_refused(eps: float) -> None:
    with pytest.raises(ConfigError, match="it must be greater than 0"):
        safe_sqrt(torch.ones(1), eps)


def test_numbers_alone_are_refused() -> None:
    with pytest.raises(InputError, match="at least one must be a tensor"):
        safe_div(1.0, 2.0)


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(InputError, match=r"a tensor of torch\.complex64; only real numbers"):
        safe_sqrt(torch.tensor([1j]))


def test_operands_are_combined_as_torch_does() -> None:
    half, single = torch.ones(2, 1, dtype=torch.float16), torch.ones(3)
    assert safe_div(half, single).dtype == torch.float32
    assert safe_div(half, single).shape == (2, 3)
    assert safe_div(half, torch.tensor(2.0)).dtype == torch.float16
    assert safe_div(1, half).dtype == torch.float16
    assert safe_div(torch.tensor([1, 2]), torch.tensor([2, 0])).dtype == torch.float32
    assert safe_sqrt(torch.tensor([4, 9])).tolist() == [2.0, 3.0]


def test_broadcast_operands_get_gradients_of_their_own_shape() -> None:
    a, b = torch.ones(2, 1, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    safe_div(a, b).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.tolist() == [[1.5], [1.5]]
    assert b.grad.tolist() == [-0.5, -0.5, -0.5]
