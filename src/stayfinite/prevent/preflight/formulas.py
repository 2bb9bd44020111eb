"""What the result of an operation can be, from what its inputs can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stayfinite.prevent.preflight import bounds as b
from stayfinite.prevent.preflight.bounds import ANY, INF, Bounds, Open, Reach, between, words


class RoundingLimits(NamedTuple):
    """Arguments from which on rounding decides: exp is 0, exp is Inf, a sigmoid is 1, tanh is 1."""

    vanish: float
    overflow: float
    saturate: float
    turn: float


_LIMITS = {
    torch.float16: RoundingLimits(17.3, 11.09, 7.6, 4.2),
    torch.bfloat16: RoundingLimits(92.2, 88.7, 5.5, 3.1),
    torch.float64: RoundingLimits(745.1, 709.8, 36.7, 19.1),
}
_SINGLE = RoundingLimits(103.9, 88.7, 16.6, 9.0)


def limits_of(dtype: torch.dtype) -> RoundingLimits:
    return _LIMITS.get(dtype, _SINGLE)


class Computation(NamedTuple):
    """Tensors are given as Reach, all else as it was passed.

    `dtype` is that of the result, and `per_output` how many elements went into one of it.
    """

    base: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    per_output: int = 1

    @property
    def limits(self) -> RoundingLimits:
        return limits_of(self.dtype)

    def value(self, index: int, name: str = "") -> Any:
        return self.args[index] if index < len(self.args) else self.kwargs.get(name)

    def bounds(self, index: int, name: str = "") -> Bounds:
        """Of a tensor, or of a number in its place; anything if there is neither."""
        value = self.value(index, name)
        if isinstance(value, Reach):
            return value.bounds
        return b.exactly(float(value)) if isinstance(value, (bool, int, float)) else ANY

    def number(self, index: int, name: str, default: float) -> float:
        value = self.value(index, name)
        return float(value) if isinstance(value, (bool, int, float)) else default

    def reaches(self) -> list[Reach]:
        """Those of all tensors, of lists too."""
        return [item for item in tree_leaves((self.args, self.kwargs)) if isinstance(item, Reach)]

    def parts(self) -> list[Bounds]:
        """The bounds of all tensors that hold values, and not places."""
        return [reach.bounds for reach in self.reaches() if not reach.is_index]


Formula = Callable[[Computation], Bounds]


def _second_term(op: Computation) -> Bounds:
    """The second of `add` and `sub`, which may have a factor."""
    alpha = float(op.kwargs.get("alpha", 1))
    return op.bounds(1) if alpha == 1 else b.product_of(op.bounds(1), b.exactly(alpha))


def _mul(op: Computation) -> Bounds:
    if op.args[0] is op.args[1]:
        return b.even(op.bounds(0), lambda x: x * x)
    return b.product_of(op.bounds(0), op.bounds(1))


def _pow(op: Computation) -> Bounds:
    base, exponent = op.bounds(0), op.value(1, "exponent")
    if not isinstance(exponent, (int, float)):
        return b.POSITIVE if base.low >= 0 else ANY
    if exponent == 0:
        return b.exactly(1.0)
    size = abs(exponent)
    if size % 2 == 0:
        raised = b.even(base, lambda x: abs(x) ** size)
    else:
        raised = b.image_of(base if size % 2 == 1 else b.at_least(base, 0.0), lambda x: x**size)
    return b.quotient_of(b.exactly(1.0), raised) if exponent < 0 else raised


def _sqrt(op: Computation) -> Bounds:
    return b.image_of(b.at_least(op.bounds(0), 0.0), math.sqrt)


def _log(op: Computation) -> Bounds:
    return b.image_of(b.at_least(op.bounds(0), 0.0), lambda x: math.log(x) if x else -INF)


def _log1p(op: Computation) -> Bounds:
    given = b.at_least(op.bounds(0), -1.0)
    return b.image_of(given, lambda x: math.log1p(x) if x > -1 else -INF)


def _curve_with_ends(
    op: Computation, function: Callable[[float], float], bottom: b.End, top: b.End | None = None
) -> Bounds:
    """A function that never falls, and by rounding is at its bottom or top from a size on."""
    (low, low_at), (high, high_at) = op.bounds(0).ends
    return between(
        bottom if low < -bottom[1] else (b.value_at(function, low), low_at),
        top if top and high > top[1] else (b.value_at(function, high), high_at),
    )


def _logistic(x: float) -> float:
    return 1 / (1 + b.value_at(math.exp, -x))


def _piecewise(op: Computation, factor: float, below: Callable[[float], float]) -> Bounds:
    """The identity, and below 0 a factor times another function."""
    return b.image_of(op.bounds(0), lambda x: x if x >= 0 else factor * below(x))


def _smooth_relu(op: Computation) -> Bounds:
    """At least half of a positive argument, and never more than it; -0.38 is below every dip."""
    given = op.bounds(0)
    low = given.low / 2 if given.low >= 0 else -0.38
    return Bounds(low, max(given.high, 0.0), given.low_at, given.high_at)


def _clamp(op: Computation) -> Bounds:
    given = op.bounds(0)
    if op.value(1, "min") is not None:
        given = b.larger(given, op.bounds(1, "min"))
    if op.value(2, "max") is not None:
        given = b.smaller(given, op.bounds(2, "max"))
    return given


def _sum(op: Computation) -> Bounds:
    given, source = op.bounds(0), op.args[0]
    found = b.total_of(given, op.per_output)
    if isinstance(source, Reach) and source.peaks and given.low >= 0:
        return found._replace(low=max(found.low, given.high), low_at=0.0)
    return found


def _scattered_sum(op: Computation) -> Bounds:
    """What was there, with sums of any of the new elements on top."""
    given = op.parts()
    if not given:
        return ANY
    falls, rises = any(new.low < 0 for new in given[1:]), any(new.high > 0 for new in given[1:])
    return b.sum_of(given[0], Bounds(-INF if falls else 0.0, INF if rises else 0.0))


def _prod(op: Computation) -> Bounds:
    given = op.bounds(0)
    if given.low < 0:
        return ANY
    high = INF if given.high > 1 else given.high
    return Bounds(0.0 if given.low < 1 else given.low, high, given.low_at, given.high_at)


def _sum_of_products(op: Computation) -> Bounds:
    """As of matrices: 0 or more where all sides are, and 0 where one of them vanishes."""
    parts = [reach.bounds for reach in op.reaches()]
    if len(parts) < 2 or any(part.low < 0 for part in parts):
        return ANY
    return Bounds(0.0, INF, min(part.low_at if part.low == 0 else INF for part in parts))


# Formulas by the operators that they are for. What is not here can be anything.
_TABLE: dict[str, Formula | Bounds] = {
    """clone _to_copy alias detach amax amin max min mean flip roll repeat gather index index_select
    sort topk masked_select take constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d replication_pad3d avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d
    upsample_bilinear2d upsample_nearest2d upsample_linear1d upsample_nearest1d upsample_bicubic2d
    median nanmedian cummax cummin tril triu diag_embed embedding nan_to_num lift_fresh_copy
    _unsafe_view floor ceil round trunc _embedding_bag nanmean lift_fresh
    _foreach_copy""": lambda op: op.bounds(0),
    "cat stack scatter scatter_reduce index_put index_copy masked_scatter lerp": lambda op: (
        b.hull(*parts) if (parts := op.parts()) else ANY
    ),
    "scatter_add index_add index_reduce": _scattered_sum,
    "sum nansum": _sum,
    "cumsum": lambda op: b.hull(op.bounds(0), b.total_of(op.bounds(0), b.MANY)),
    "prod cumprod": _prod,
    """mm bmm mv dot addmm baddbmm addbmm addmv linear convolution
    mkldnn_convolution""": _sum_of_products,
    "_softmax softmax _safe_softmax": lambda op: Bounds(
        0.0, 1.0, op.limits.vanish, op.limits.saturate
    ),
    "_log_softmax": lambda op: Bounds(-INF, 0.0, 0.0, op.limits.saturate),
    "add": lambda op: b.sum_of(op.bounds(0), _second_term(op)),
    "sub": lambda op: b.difference_of(op.bounds(0), _second_term(op)),
    "rsub": lambda op: b.difference_of(op.bounds(1), op.bounds(0)),
    "mul": _mul,
    "div": lambda op: (
        ANY if op.kwargs.get("rounding_mode") else b.quotient_of(op.bounds(0), op.bounds(1))
    ),
    "reciprocal": lambda op: b.quotient_of(b.exactly(1.0), op.bounds(0)),
    "neg": lambda op: b.negative(op.bounds(0)),
    "abs": lambda op: b.even(op.bounds(0), abs),
    "pow": _pow,
    "sqrt": _sqrt,
    "rsqrt": lambda op: b.quotient_of(b.exactly(1.0), _sqrt(op)),
    "exp": lambda op: _curve_with_ends(op, math.exp, (0.0, op.limits.vanish)),
    "expm1": lambda op: b.image_of(op.bounds(0), math.expm1),
    "log": _log,
    "log1p": _log1p,
    "sigmoid hardsigmoid": lambda op: _curve_with_ends(
        op, _logistic, (0.0, op.limits.vanish), (1.0, op.limits.saturate)
    ),
    "tanh erf": lambda op: _curve_with_ends(
        op, math.tanh, (-1.0, op.limits.turn), (1.0, op.limits.turn)
    ),
    "softplus": lambda op: _curve_with_ends(
        op, lambda x: x if x > 700 else math.log1p(math.exp(x)), (0.0, op.limits.vanish)
    ),
    "atan": lambda op: b.image_of(op.bounds(0), math.atan),
    "relu threshold": lambda op: b.at_least(op.bounds(0), 0.0),
    "elu": lambda op: _piecewise(op, op.number(1, "alpha", 1.0), math.expm1),
    "leaky_relu": lambda op: _piecewise(op, op.number(1, "negative_slope", 0.01), float),
    "gelu silu mish hardswish": _smooth_relu,
    "clamp hardtanh": _clamp,
    "maximum fmax clamp_min": lambda op: b.larger(op.bounds(0), op.bounds(1)),
    "minimum fmin clamp_max": lambda op: b.smaller(op.bounds(0), op.bounds(1)),
    "where": lambda op: b.hull(op.bounds(1), op.bounds(2)) if len(op.args) > 2 else ANY,
    "masked_fill": lambda op: b.hull(op.bounds(0), op.bounds(2)),
    """var std linalg_vector_norm norm mse_loss smooth_l1_loss huber_loss hypot _cdist_forward
    _euclidean_dist binary_cross_entropy binary_cross_entropy_with_logits bincount
    histc""": b.POSITIVE,
    "rand rand_like bernoulli": b.UNIT,
    "sin cos sign sgn": Bounds(-1.0, 1.0),
    "atan2 angle": Bounds(-math.pi, math.pi),
    "acos": Bounds(0.0, math.pi),
    "asin": Bounds(-math.pi / 2, math.pi / 2),
    "log_sigmoid_forward": Bounds(-INF, 0.0),
}
_FORMULAS = {name: formula for names, formula in _TABLE.items() for name in names.split()}

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


def reach_of_output(op: Computation, parents: tuple[Reach, ...], out: Tensor) -> Reach:
    reach = Reach(
        learned=any(parent.learned for parent in parents),
        fed=op.base in _DRAWN or any(parent.fed for parent in parents),
        frozen=any(parent.frozen for parent in parents),
        op=op.base,
        made_from=parents,
        is_index=_is_index(out),
        bounds=_bounds(op, parents, out),
    )
    _relate(op, reach)
    if reach.is_open:
        reach.open = _reason(op, reach)
    reach.guarded = _is_guarded(op, reach)
    if op.per_output <= 1:
        reach.chance = max((p.chance for p in parents if p.chance is not None), default=None)
    return reach


def reach_of_rest(old: Reach, new: Reach) -> Reach:
    """Of memory of which a part was written anew."""
    return Reach(
        bounds=b.hull(old.bounds, new.bounds),
        learned=old.learned or new.learned,
        fed=old.fed or new.fed,
        frozen=old.frozen or new.frozen,
        op=new.op,
        made_from=(*new.made_from, old),
        open=new.open or old.open,
        is_index=new.is_index,
    )


def reach_of_leaf(tensor: Tensor, *, fed: bool) -> Reach:
    """Of a tensor that no operation made here: data, or a constant."""
    op = "data" if fed else "constant"
    return Reach(bounds=b.bounds_now(tensor), fed=fed, op=op, is_index=_is_index(tensor))


def reach_of_parameter(tensor: Tensor) -> Reach:
    if tensor.requires_grad:
        return Reach(learned=True, op="parameter", open="parameter")
    return Reach(bounds=b.bounds_now(tensor), frozen=True, op="parameter")


def _is_index(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number and tensor.dtype is not torch.bool


def _bounds(op: Computation, parents: tuple[Reach, ...], out: Tensor) -> Bounds:
    """What the result can be, as its dtype holds it; anything for an operator not known here."""
    if out.is_complex():
        return ANY
    is_taken = op.base in _TAKEN_AS_SEEN or (not parents and op.base != "rand")
    if is_taken or not (out.is_floating_point() or op.base in _COUNTS):
        return b.bounds_now(out)
    if op.base == "uniform":
        return Bounds(op.number(1, "from", 0.0), op.number(2, "to", 0.0) or 1.0)
    formula = _FORMULAS.get(op.base, ANY)
    return b.round_to(formula if isinstance(formula, Bounds) else formula(op), op.dtype)


def _relate(op: Computation, reach: Reach) -> None:
    """What holds because two inputs belong together: x - max(x), max(x) - min(x)."""
    first, second = op.value(0), op.value(1)
    if op.base == "sub" and isinstance(first, Reach) and isinstance(second, Reach):
        for back in second.ancestors(4):
            if back.op in _PEAKS and back.comes_from(first, within=3):
                reach.bounds, reach.peaks = Bounds(-INF, 0.0), True
            elif back.op == "logsumexp" and back.comes_from(first, within=1):
                reach.bounds, reach.open = Bounds(-INF, 0.0), "log"
        is_spread = first.op in ("amax", "max") and second.op in ("amin", "min")
        if is_spread and len(first.made_from) == 1 and first.made_from == second.made_from:
            reach.bounds = Bounds(0.0, reach.bounds.high)
    elif isinstance(first, Reach) and first.peaks and op.base in ("exp", "index", "gather"):
        reach.peaks = True
    elif op.base in ("index_add", "scatter_add"):
        reach.peaks = any(parent.peaks for parent in reach.made_from)


def _reason(op: Computation, reach: Reach) -> Open:
    if reach.open is not None:
        return reach.open
    if op.base in _LAYERS and reach.learned:
        return "layer"
    if op.base in _LOGS and reach.bounds.high < INF:
        return "log"
    inherited = {parent.open for parent in reach.made_from if parent.is_open}
    reason: Open
    for reason in get_args(Open):
        if reason in inherited:
            return reason
    if op.base in ("div", "reciprocal"):
        return "ratio"
    return "other" if reach.learned else "data"


def _is_guarded(op: Computation, reach: Reach) -> bool:
    """torch.where(x > 0, x, 1): somebody chose the values of x by a look at x."""
    if op.base in ("where", "masked_fill") and len(op.args) > 1:
        condition = op.args[0] if op.base == "where" else op.args[1]
        values = [v for v in op.args if isinstance(v, Reach) and v is not condition]
        return isinstance(condition, Reach) and any(
            condition.comes_from(value, within=6) for value in values
        )
    if len(reach.made_from) != 1:
        return False
    parent = reach.made_from[0]
    return parent.guarded and parent.bounds == reach.bounds
