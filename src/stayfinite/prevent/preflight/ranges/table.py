"""Which formula holds for which operator of torch."""

from __future__ import annotations

import math

from stayfinite.prevent.preflight.ranges import bounds as b
from stayfinite.prevent.preflight.ranges import joining, pointwise
from stayfinite.prevent.preflight.ranges.bounds import ANY, INF, POSITIVE, UNIT, Bounds
from stayfinite.prevent.preflight.ranges.operation import Formula, Operation

_TABLE: dict[Formula, str] = {
    pointwise.same: """clone _to_copy alias detach amax amin max min mean flip roll repeat gather
        index index_select sort topk masked_select take constant_pad_nd reflection_pad1d
        reflection_pad2d replication_pad1d replication_pad2d replication_pad3d avg_pool2d
        max_pool2d_with_indices _adaptive_avg_pool2d upsample_bilinear2d upsample_nearest2d
        upsample_linear1d upsample_nearest1d upsample_bicubic2d median nanmedian cummax cummin tril
        triu diag_embed embedding nan_to_num lift_fresh_copy _unsafe_view floor ceil round trunc
        _embedding_bag nanmean lift_fresh _foreach_copy""",
    joining.any_of: "cat stack scatter scatter_reduce index_put index_copy masked_scatter lerp",
    joining.scattered_total: "scatter_add index_add index_reduce",
    joining.total: "sum nansum",
    joining.running_total: "cumsum",
    joining.product: "prod cumprod",
    joining.sum_of_products: """mm bmm mv dot addmm baddbmm addbmm addmv linear convolution
        mkldnn_convolution""",
    joining.softmax: "_softmax softmax _safe_softmax",
    joining.log_softmax: "_log_softmax",
    pointwise.add: "add",
    pointwise.sub: "sub",
    pointwise.rsub: "rsub",
    pointwise.mul: "mul",
    pointwise.div: "div",
    pointwise.reciprocal: "reciprocal",
    pointwise.negative: "neg",
    pointwise.magnitude: "abs",
    pointwise.power: "pow",
    pointwise.root: "sqrt",
    pointwise.inverse_root: "rsqrt",
    pointwise.exp: "exp",
    pointwise.expm1: "expm1",
    pointwise.log: "log",
    pointwise.log1p: "log1p",
    pointwise.sigmoid: "sigmoid hardsigmoid",
    pointwise.tanh: "tanh erf",
    pointwise.softplus: "softplus",
    pointwise.atan: "atan",
    pointwise.relu: "relu threshold",
    pointwise.elu: "elu",
    pointwise.leaky_relu: "leaky_relu",
    pointwise.smooth_relu: "gelu silu mish hardswish",
    pointwise.clamp: "clamp hardtanh",
    pointwise.larger: "maximum fmax clamp_min",
    pointwise.smaller: "minimum fmin clamp_max",
    pointwise.where: "where",
    pointwise.masked_fill: "masked_fill",
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
