"""How operations on single elements change bounds."""

from __future__ import annotations

import math

from stayfinite.prevent.preflight.ranges import bounds as b
from stayfinite.prevent.preflight.ranges.bounds import ANY, INF, POSITIVE, Bounds
from stayfinite.prevent.preflight.ranges.operation import Operation

_DIP = -0.38  # gelu, silu, mish and hardswish never fall below


def same(op: Operation) -> Bounds:
    return op.bounds(0)


def add(op: Operation) -> Bounds:
    return b.added(op.bounds(0), _second(op))


def sub(op: Operation) -> Bounds:
    return b.subtracted(op.bounds(0), _second(op))


def rsub(op: Operation) -> Bounds:
    return b.subtracted(op.bounds(1), op.bounds(0))


def _second(op: Operation) -> Bounds:
    alpha = float(op.kwargs.get("alpha", 1))
    return op.bounds(1) if alpha == 1 else b.multiplied(op.bounds(1), b.exactly(alpha))


def mul(op: Operation) -> Bounds:
    if op.args[0] is op.args[1]:
        return b.squared(op.bounds(0))
    return b.multiplied(op.bounds(0), op.bounds(1))


def div(op: Operation) -> Bounds:
    if op.kwargs.get("rounding_mode"):
        return ANY
    return b.divided(op.bounds(0), op.bounds(1))


def reciprocal(op: Operation) -> Bounds:
    return b.divided(b.exactly(1.0), op.bounds(0))


def negative(op: Operation) -> Bounds:
    return b.negative(op.bounds(0))


def magnitude(op: Operation) -> Bounds:
    return b.magnitude(op.bounds(0))


def power(op: Operation) -> Bounds:
    base, exponent = op.bounds(0), op.number(1, "exponent")
    if exponent is None:
        return POSITIVE if base.low >= 0 else ANY
    if exponent == 0:
        return b.exactly(1.0)
    if exponent < 0:
        return b.divided(b.exactly(1.0), _raised(base, -exponent))
    return _raised(base, exponent)


def _raised(base: Bounds, exponent: float) -> Bounds:
    if exponent % 2 == 0:
        return b.even(base, lambda x: abs(x) ** exponent)
    if exponent % 2 == 1:
        return b.rising(base, lambda x: x**exponent)
    return b.rising(b.clamped(base, 0.0, None), lambda x: x**exponent)


def root(op: Operation) -> Bounds:
    return b.rising(b.clamped(op.bounds(0), 0.0, None), math.sqrt)


def inverse_root(op: Operation) -> Bounds:
    return b.divided(b.exactly(1.0), root(op))


def exp(op: Operation) -> Bounds:
    given = op.bounds(0)
    is_open = given.low < -op.limits.vanish
    low = (0.0, op.limits.vanish) if is_open else (b.mapped(math.exp, given.low), given.low_at)
    return Bounds(low[0], b.mapped(math.exp, given.high), low[1], given.high_at)


def expm1(op: Operation) -> Bounds:
    return b.rising(op.bounds(0), math.expm1)


def log(op: Operation) -> Bounds:
    return b.rising(b.clamped(op.bounds(0), 0.0, None), lambda x: math.log(x) if x else -INF)


def log1p(op: Operation) -> Bounds:
    given = b.clamped(op.bounds(0), -1.0, None)
    return b.rising(given, lambda x: math.log1p(x) if x > -1 else -INF)


def sigmoid(op: Operation) -> Bounds:
    given, limits = op.bounds(0), op.limits
    falls, rises = given.low < -limits.vanish, given.high > limits.saturate
    low = (0.0, limits.vanish) if falls else (_logistic(given.low), given.low_at)
    high = (1.0, limits.saturate) if rises else (_logistic(given.high), given.high_at)
    return Bounds(low[0], high[0], low[1], high[1])


def _logistic(x: float) -> float:
    return 1 / (1 + b.mapped(math.exp, -x))


def tanh(op: Operation) -> Bounds:
    given, turn = op.bounds(0), op.limits.turn
    low = (-1.0, turn) if given.low < -turn else (math.tanh(given.low), given.low_at)
    high = (1.0, turn) if given.high > turn else (math.tanh(given.high), given.high_at)
    return Bounds(low[0], high[0], low[1], high[1])


def softplus(op: Operation) -> Bounds:
    given, vanish = op.bounds(0), op.limits.vanish
    low = (0.0, vanish) if given.low < -vanish else (_log1p_exp(given.low), given.low_at)
    return Bounds(low[0], _log1p_exp(given.high), low[1], given.high_at)


def _log1p_exp(x: float) -> float:
    return x if x > 700 else math.log1p(math.exp(x))


def atan(op: Operation) -> Bounds:
    return b.rising(op.bounds(0), math.atan)


def relu(op: Operation) -> Bounds:
    return b.clamped(op.bounds(0), 0.0, None)


def elu(op: Operation) -> Bounds:
    alpha = op.number(1, "alpha")
    depth = 1.0 if alpha is None else alpha
    return b.rising(op.bounds(0), lambda x: x if x >= 0 else depth * math.expm1(x))


def leaky_relu(op: Operation) -> Bounds:
    slope = op.number(1, "negative_slope")
    factor = 0.01 if slope is None else slope
    return b.rising(op.bounds(0), lambda x: x if x >= 0 else factor * x)


def smooth_relu(op: Operation) -> Bounds:
    """At least half of a positive argument, and never more than it."""
    given = op.bounds(0)
    low = given.low / 2 if given.low >= 0 else _DIP
    return Bounds(low, max(given.high, 0.0), given.low_at, given.high_at)


def clamp(op: Operation) -> Bounds:
    given = op.bounds(0)
    if op.value(1, "min") is not None:
        given = b.larger(given, op.bounds(1, "min"))
    if op.value(2, "max") is not None:
        given = b.smaller(given, op.bounds(2, "max"))
    return given


def larger(op: Operation) -> Bounds:
    return b.larger(op.bounds(0), op.bounds(1))


def smaller(op: Operation) -> Bounds:
    return b.smaller(op.bounds(0), op.bounds(1))


def where(op: Operation) -> Bounds:
    return b.hull(op.bounds(1), op.bounds(2)) if len(op.args) > 2 else ANY


def masked_fill(op: Operation) -> Bounds:
    return b.hull(op.bounds(0), op.bounds(2))
