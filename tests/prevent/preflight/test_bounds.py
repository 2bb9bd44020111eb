"""Bounds are true: whatever the inputs within theirs, no output lies outside."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from stayfinite.prevent.preflight import bounds as b
from stayfinite.prevent.preflight.bounds import INF, Bounds
from stayfinite.prevent.preflight.range_tracer import RangeTracer

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "relu": torch.relu,
    "leaky": lambda x: functional.leaky_relu(x, 0.2),
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "square": torch.square,
    "cube": lambda x: x**3,
    "root": lambda x: x.abs().sqrt(),
    "log": lambda x: torch.log(x.abs() + 1e-3),
    "log1p": lambda x: torch.log1p(x.abs()),
    "power": lambda x: x.abs() ** 0.3,
    "inverse": lambda x: 1 / (x * x + 0.5),
    "inverse root": lambda x: torch.rsqrt(x.abs() + 0.1),
    "shift": lambda x: 1 - x,
    "scale": lambda x: -2.5 * x,
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp low": lambda x: x.clamp_min(0.5),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "max": lambda x: x.amax(-1, keepdim=True),
    "min": lambda x: x.amin(0, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "std": lambda x: x.std(-1, keepdim=True),
    "var": lambda x: x.var(0, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "from max": lambda x: x - x.amax(-1, keepdim=True),
    "shifted exp": lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True),
    "spread": lambda x: x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True),
    "sin": torch.sin,
    "atan": torch.atan,
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.5),
    "half": lambda x: x.half().float(),
    "index": lambda x: x[torch.tensor([0, 2, 1])],
    "in place": lambda x: x.clone().mul_(3).add_(1),
    "part in place": lambda x: _with_first_row(x, 7.0),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 0.25),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "matmul": lambda x, y: x.abs() @ y.abs().t(),
    "cat": lambda x, y: torch.cat([x, y]),
    "mse": lambda x, y: functional.mse_loss(x, y).reshape(1, 1),
    "scatter": lambda x, y: torch.zeros(3, 4).index_add(0, torch.tensor([0, 0, 2]), x.abs()) + y,
}


def _with_first_row(x: Tensor, value: float) -> Tensor:
    changed = x.clone()
    changed[0] = value
    return changed


FEW = settings(max_examples=settings().max_examples // 10)  # there are many operations

numbers = st.floats(-60, 60, width=32) | st.sampled_from([0.0, 1.0, -1.0, 1e-6])
tables = st.lists(numbers, min_size=12, max_size=12).map(
    lambda values: torch.tensor(values).reshape(3, 4)
)


def assert_within(out: Tensor, known: Bounds, name: str) -> None:
    values = out[out.isfinite()].double()
    slack = 1e-4 * max(1.0, float(values.abs().max()) if values.numel() else 1.0)
    assert not values.numel() or float(values.min()) >= known.low - slack, (name, known)
    assert not values.numel() or float(values.max()) <= known.high + slack, (name, known)


@pytest.mark.parametrize("name", UNARY)
@FEW
@given(x=tables)
def test_one_operation_stays_within_its_bounds(name: str, x: Tensor) -> None:
    recorder = RangeTracer()
    with recorder:
        recorder.begin()
        out = UNARY[name](x)
    assert_within(out, recorder.reach(out).bounds, name)


@pytest.mark.parametrize("name", BINARY)
@FEW
@given(x=tables, y=tables)
def test_two_inputs_stay_within_their_bounds(name: str, x: Tensor, y: Tensor) -> None:
    recorder = RangeTracer()
    with recorder:
        recorder.begin()
        out = BINARY[name](x, y)
    assert_within(out, recorder.reach(out).bounds, name)


@given(x=tables, names=st.lists(st.sampled_from(sorted(UNARY)), min_size=2, max_size=6))
def test_chains_of_operations_stay_within_their_bounds(x: Tensor, names: list[str]) -> None:
    recorder = RangeTracer()
    steps: list[tuple[str, Tensor, Bounds]] = []
    with recorder:
        recorder.begin()
        for name in names:
            x = UNARY[name](x.expand(3, 4) if x.shape != (3, 4) else x)
            steps.append((name, x, recorder.reach(x).bounds))
    for name, out, known in steps:
        assert_within(out, known, " ".join([*names, "at", name]))


ends = st.floats(-1e6, 1e6) | st.just(-INF) | st.just(INF)
intervals = st.tuples(ends, ends).map(lambda pair: Bounds(min(pair), max(pair)))


def _inside(interval: Bounds, part: float) -> float:
    low, high = max(interval.low, -1e7), min(interval.high, 1e7)
    return low + part * (high - low) if low <= high else interval.low


@given(a=intervals, b_=intervals, s=st.floats(0, 1), t=st.floats(0, 1))
def test_arithmetic_of_intervals_holds_every_result(
    a: Bounds, b_: Bounds, s: float, t: float
) -> None:
    x, y = _inside(a, s), _inside(b_, t)
    if not (math.isfinite(x) and math.isfinite(y)):
        return
    slack = 1e-6 * max(1.0, abs(x), abs(y), abs(x * y))
    results = {
        "sum": (b.sum_of(a, b_), x + y),
        "difference": (b.difference_of(a, b_), x - y),
        "product": (b.product_of(a, b_), x * y),
        "square": (b.even(a, lambda number: number * number), x * x),
        "magnitude": (b.even(a, abs), abs(x)),
        "larger": (b.larger(a, b_), max(x, y)),
        "smaller": (b.smaller(a, b_), min(x, y)),
        "hull": (b.hull(a, b_), x),
    }
    for name, (interval, value) in results.items():
        assert interval.low - slack <= value <= interval.high + slack, (name, interval, value)


def test_an_epsilon_that_the_type_cannot_hold_is_no_bound() -> None:
    assert b.round_to(Bounds(1e-8, 1.0), torch.float16).low == 0
    assert b.round_to(Bounds(1e-8, 1.0), torch.float32).low > 0


def test_a_bound_knows_how_far_rounding_is_from_it() -> None:
    recorder = RangeTracer()
    weight = torch.randn(4, 4, requires_grad=True)
    with recorder:
        recorder.begin()
        near = 1 - torch.sigmoid(weight)
        far = torch.sigmoid(weight)
        never = torch.sigmoid(weight).sum() + torch.sigmoid(weight.expand(64, 4, 4)).sum()
    assert recorder.reach(near).bounds[::2] == (0.0, pytest.approx(16.6))
    assert recorder.reach(far).bounds[::2] == (0.0, pytest.approx(103.9))
    assert recorder.reach(never).bounds.low_at == INF
