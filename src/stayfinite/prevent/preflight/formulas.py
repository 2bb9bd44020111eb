"""What the result of an operation can be, from what its inputs can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stayfinite.prevent.preflight import bounds as b
from stayfinite.prevent.preflight.bounds import (
    ANY,
    INF,
    POSITIVE,
    UNIT,
    Bounds,
    Open,
    Reach,
    bounds_now,
    exactly,
    hull,
    why_open,
    words,
)

_LAYERS = words(
    """mm bmm mv dot addmm baddbmm addmv linear convolution mkldnn_convolution native_layer_norm
    native_batch_norm native_group_norm cudnn_batch_norm mkldnn_rnn_layer embedding _embedding_bag
    _scaled_dot_product_flash_attention_for_cpu _fused_rms_norm"""
)
_DRAWN = words(
    """randn randn_like normal uniform rand rand_like bernoulli randint randint_like randperm
    multinomial exponential poisson random native_dropout cauchy geometric log_normal"""
)
# No formula knows more of them than that they are what they are.
_TAKEN_AS_SEEN = words("randn randn_like normal exponential poisson log_normal cauchy")
_COUNTS = words("sum bincount")
_PEAKS = words("amax max scatter_reduce cummax topk")
_LOGS = words("_log_softmax log_sigmoid_forward log logsumexp")


def derived(op: Operation, parents: tuple[Reach, ...], out: Tensor) -> Reach:
    """The reach of one output."""
    reach = Reach(
        learned=any(parent.learned for parent in parents),
        fed=op.base in _DRAWN or any(parent.fed for parent in parents),
        frozen=any(parent.frozen for parent in parents),
        op=op.base,
        made_from=parents,
        is_index=not (out.is_floating_point() or out.is_complex()) and out.dtype is not torch.bool,
    )
    reach.bounds = _bounds(op, parents, out)
    _relate(op, reach)
    if reach.is_open:
        reach.open = _reason(op, reach)
    _guard(op, reach)
    if op.per_output <= 1:
        reach.chance = max((p.chance for p in parents if p.chance is not None), default=None)
    return reach


def joined(old: Reach, new: Reach) -> Reach:
    """Memory of which a part was written anew."""
    return Reach(
        bounds=hull(old.bounds, new.bounds),
        learned=old.learned or new.learned,
        fed=old.fed or new.fed,
        frozen=old.frozen or new.frozen,
        op=new.op,
        made_from=(*new.made_from, old),
        open=new.open or old.open,
        is_index=new.is_index,
    )


def leaf(tensor: Tensor, *, fed: bool) -> Reach:
    """A tensor that no operation made here: data, or a constant."""
    is_index = not (tensor.is_floating_point() or tensor.is_complex())
    return Reach(
        bounds=bounds_now(tensor),
        fed=fed,
        op="data" if fed else "constant",
        is_index=is_index and tensor.dtype is not torch.bool,
    )


def parameter(tensor: Tensor) -> Reach:
    if tensor.requires_grad:
        return Reach(learned=True, op="parameter", open="parameter")
    return Reach(bounds=bounds_now(tensor), frozen=True, op="parameter")


def _bounds(op: Operation, parents: tuple[Reach, ...], out: Tensor) -> Bounds:
    is_number = out.is_floating_point() or out.is_complex()
    if out.is_complex():
        return ANY
    is_taken = op.base in _TAKEN_AS_SEEN or (not parents and op.base != "rand")
    if is_taken or not (is_number or op.base in _COUNTS):
        return bounds_now(out)
    if op.base == "uniform":
        return Bounds(op.number(1, "from") or 0.0, op.number(2, "to") or 1.0)
    return bounds_of(op)


def _relate(op: Operation, reach: Reach) -> None:
    """What holds because two inputs belong together: x - max(x), max(x) - min(x)."""
    first = op.args[0] if op.args else None
    second = op.args[1] if len(op.args) > 1 else None
    if op.base == "sub" and isinstance(first, Reach) and isinstance(second, Reach):
        _relate_difference(first, second, reach)
    elif isinstance(first, Reach) and first.peaks and op.base in ("exp", "index", "gather"):
        reach.peaks = True
    elif op.base in ("index_add", "scatter_add"):
        reach.peaks = any(parent.peaks for parent in reach.made_from)


def _relate_difference(first: Reach, second: Reach, reach: Reach) -> None:
    for back in second.ancestors(4):
        if back.op in _PEAKS and back.comes_from(first, within=3):
            reach.bounds, reach.peaks = Bounds(-INF, 0.0), True
        elif back.op == "logsumexp" and back.comes_from(first, within=1):
            reach.bounds, reach.open = Bounds(-INF, 0.0), "log"
    if _is_extreme(first, "amax", "max") and _is_extreme(second, "amin", "min"):
        source = first.made_from[0]
        if second.made_from[0] is source:
            reach.bounds = Bounds(0.0, reach.bounds.high)


def _is_extreme(reach: Reach, *names: str) -> bool:
    return reach.op in names and len(reach.made_from) == 1


def _reason(op: Operation, reach: Reach) -> Open:
    if reach.open is not None:
        return reach.open
    if op.base in _LAYERS and reach.learned:
        return "layer"
    if op.base in _LOGS and reach.bounds.high < INF:
        return "log"
    inherited = why_open(reach.made_from)
    if inherited is not None:
        return inherited
    if op.base in ("div", "reciprocal"):
        return "ratio"
    return "other" if reach.learned else "data"


def _guard(op: Operation, reach: Reach) -> None:
    """torch.where(x > 0, x, 1): somebody chose the values of x by a look at x."""
    if op.base in ("where", "masked_fill") and len(op.args) > 1:
        condition = op.args[0] if op.base == "where" else op.args[1]
        values = [v for v in op.args if isinstance(v, Reach) and v is not condition]
        reach.guarded = isinstance(condition, Reach) and any(
            condition.comes_from(value, within=6) for value in values
        )
    elif len(reach.made_from) == 1:
        parent = reach.made_from[0]
        reach.guarded = parent.guarded and parent.bounds == reach.bounds


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


def any_of(op: Operation) -> Bounds:
    """Elements that come from any of the tensors."""
    parts = [reach.bounds for reach in op.reaches() if not reach.is_index]
    return b.hull(*parts) if parts else ANY


def total(op: Operation) -> Bounds:
    given, source = op.bounds(0), op.args[0]
    found = b.totalled(given, op.per_output)
    if isinstance(source, Reach) and source.peaks and given.low >= 0:
        return found._replace(low=max(found.low, given.high), low_at=0.0)
    return found


def running_total(op: Operation) -> Bounds:
    return b.hull(op.bounds(0), b.totalled(op.bounds(0), b.MANY))


def scattered_total(op: Operation) -> Bounds:
    """What was there, with sums of any of the new elements on top."""
    given = [reach.bounds for reach in op.reaches() if not reach.is_index]
    low = min(0.0, min(part.low for part in given[1:])) if given[1:] else 0.0
    high = max(0.0, max(part.high for part in given[1:])) if given[1:] else 0.0
    more = Bounds(-INF if low < 0 else 0.0, INF if high > 0 else 0.0)
    return b.added(given[0], more) if given else ANY


def product(op: Operation) -> Bounds:
    given = op.bounds(0)
    if given.low < 0:
        return ANY
    high = INF if given.high > 1 else given.high
    return Bounds(0.0 if given.low < 1 else given.low, high, given.low_at, given.high_at)


def sum_of_products(op: Operation) -> Bounds:
    """As of matrices: 0 or more where all sides are, and 0 where one of them vanishes."""
    parts = [reach.bounds for reach in op.reaches()]
    if len(parts) < 2 or any(part.low < 0 for part in parts):
        return ANY
    return Bounds(0.0, INF, min(part.low_at if part.low == 0 else INF for part in parts))


def softmax(op: Operation) -> Bounds:
    return Bounds(0.0, 1.0, op.limits.vanish, op.limits.saturate)


def log_softmax(op: Operation) -> Bounds:
    return Bounds(-INF, 0.0, 0.0, op.limits.saturate)


_TABLE: dict[Formula, str] = {
    same: """clone _to_copy alias detach amax amin max min mean flip roll repeat gather
        index index_select sort topk masked_select take constant_pad_nd reflection_pad1d
        reflection_pad2d replication_pad1d replication_pad2d replication_pad3d avg_pool2d
        max_pool2d_with_indices _adaptive_avg_pool2d upsample_bilinear2d upsample_nearest2d
        upsample_linear1d upsample_nearest1d upsample_bicubic2d median nanmedian cummax cummin tril
        triu diag_embed embedding nan_to_num lift_fresh_copy _unsafe_view floor ceil round trunc
        _embedding_bag nanmean lift_fresh _foreach_copy""",
    any_of: "cat stack scatter scatter_reduce index_put index_copy masked_scatter lerp",
    scattered_total: "scatter_add index_add index_reduce",
    total: "sum nansum",
    running_total: "cumsum",
    product: "prod cumprod",
    sum_of_products: """mm bmm mv dot addmm baddbmm addbmm addmv linear convolution
        mkldnn_convolution""",
    softmax: "_softmax softmax _safe_softmax",
    log_softmax: "_log_softmax",
    add: "add",
    sub: "sub",
    rsub: "rsub",
    mul: "mul",
    div: "div",
    reciprocal: "reciprocal",
    negative: "neg",
    magnitude: "abs",
    power: "pow",
    root: "sqrt",
    inverse_root: "rsqrt",
    exp: "exp",
    expm1: "expm1",
    log: "log",
    log1p: "log1p",
    sigmoid: "sigmoid hardsigmoid",
    tanh: "tanh erf",
    softplus: "softplus",
    atan: "atan",
    relu: "relu threshold",
    elu: "elu",
    leaky_relu: "leaky_relu",
    smooth_relu: "gelu silu mish hardswish",
    clamp: "clamp hardtanh",
    larger: "maximum fmax clamp_min",
    smaller: "minimum fmin clamp_max",
    where: "where",
    masked_fill: "masked_fill",
}

_FIXED: dict[Bounds, str] = {
    POSITIVE: """var std linalg_vector_norm norm mse_loss smooth_l1_loss huber_loss hypot
        _cdist_forward _euclidean_dist binary_cross_entropy binary_cross_entropy_with_logits
        bincount histc""",
    UNIT: "rand rand_like bernoulli",
    Bounds(-1.0, 1.0): "sin cos sign sgn",
    Bounds(-math.pi, math.pi): "atan2 angle",
    Bounds(0.0, math.pi): "acos",
    Bounds(-math.pi / 2, math.pi / 2): "asin",
    Bounds(-INF, 0.0): "log_sigmoid_forward",
}

FORMULAS = {name: formula for formula, names in _TABLE.items() for name in names.split()}
FIXED = {name: fixed for fixed, names in _FIXED.items() for name in names.split()}


def bounds_of(op: Operation) -> Bounds:
    """What the result can be, as its dtype holds it; anything for an operator not known here."""
    formula = FORMULAS.get(op.base)
    found = FIXED.get(op.base, ANY) if formula is None else formula(op)
    return b.rounded(found, op.dtype)


class Limits(NamedTuple):
    """Arguments from which on rounding decides: exp is 0, exp is Inf, a sigmoid is 1, tanh is 1."""

    vanish: float
    overflow: float
    saturate: float
    turn: float


_LIMITS = {
    torch.float16: Limits(17.3, 11.09, 7.6, 4.2),
    torch.bfloat16: Limits(92.2, 88.7, 5.5, 3.1),
    torch.float64: Limits(745.1, 709.8, 36.7, 19.1),
}
_SINGLE = Limits(103.9, 88.7, 16.6, 9.0)


def limits_of(dtype: torch.dtype) -> Limits:
    return _LIMITS.get(dtype, _SINGLE)


class Operation(NamedTuple):
    """Tensors are given as Reach, all else as it was passed.

    `dtype` is that of the result, and `per_output` how many elements went into one of it.
    """

    base: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    per_output: int = 1

    @property
    def limits(self) -> Limits:
        return limits_of(self.dtype)

    def value(self, index: int, name: str = "") -> Any:
        return self.args[index] if index < len(self.args) else self.kwargs.get(name)

    def bounds(self, index: int, name: str = "") -> Bounds:
        """Of a tensor, or of a number in its place; anything if there is neither."""
        found = bounds_of_value(self.value(index, name))
        return ANY if found is None else found

    def number(self, index: int, name: str) -> float | None:
        value = self.value(index, name)
        return float(value) if isinstance(value, (bool, int, float)) else None

    def reaches(self) -> list[Reach]:
        """Those of all tensors, of lists too."""
        given = [*self.args, *self.kwargs.values()]
        items = [i for v in given for i in (v if isinstance(v, (list, tuple)) else (v,))]
        return [item for item in items if isinstance(item, Reach)]


def bounds_of_value(value: Any) -> Bounds | None:
    if isinstance(value, Reach):
        return value.bounds
    return exactly(float(value)) if isinstance(value, (bool, int, float)) else None


Formula = Callable[[Operation], Bounds]
