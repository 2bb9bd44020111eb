"""Rules for the backward pass and for 16-bit floats.

There a finite value has a derivative that is not, or would be finite in float32.
"""

from __future__ import annotations

import math

from stayfinite.domains import ARCS, ARCS_OF_LARGE, HALVES, LOGS, ROOTS
from stayfinite.explain.clue import LARGEST, Clue, diagnosis, number, rule
from stayfinite.records import Diagnosis, NaNType

_SELECTORS = ("WhereBackward", "MaskedFillBackward", "MaskedScatterBackward")
_TRAPPED = ("pow", "log", "log2", "exp", "div", "reciprocal", "acos", "asin", "atan2", *ROOTS)
_LINALG = ("Linalg", "Cholesky", "Svd", "Eigh", "Inverse", "LuSolve", "Triangular", "Det", "Qr")


def untaken_branch(clue: Clue) -> Diagnosis | None:
    """torch.where picked the other branch, and 0 times an infinite derivative is NaN."""
    is_selected = any(name.startswith(_SELECTORS) for name in clue.fact("consumers", []))
    if not clue.is_derivative_of(_TRAPPED) or not is_selected:
        return None
    turned = clue.fact("became_nan") or {}
    zeros = [bool(item.zero_count) for item in clue.origin.inputs]
    by_zero = any(item.get("zero_count", 0) for item in turned.get("inputs", []))
    if not by_zero and sum(zeros) < 2 and not any(zeros[:1]):
        return None
    inner = clue.inner
    return diagnosis(
        "where_grad_trap",
        f"torch.where does not use this value of `{clue.expression}`, but its derivative there is "
        "infinite, and 0 (the gradient of the branch not taken) times Inf is NaN.",
        f"Make the input safe before the operation: `{inner} = torch.where(mask, {inner}, 1.0)`, "
        "then torch.where(mask, ..., ...) as it is.",
    )


deviation_at_zero = rule(
    lambda clue: clue.is_derivative_of(("std", "stdmean")),
    "sqrt_grad_at_zero",
    "The standard deviation in `{clue.expression}` is 0 (all values equal, or only one), and the "
    "derivative of the root there is infinite.",
    "Use (x.var(...) + 1e-8).sqrt() instead of x.std(...).",
)

# 1 / (2 sqrt(0)), also where a gradient is differentiated once more.
root_at_zero = rule(
    lambda clue: clue.is_derivative_of(("sqrt",)) or str(clue.fact("made_in")).startswith("Sqrt"),
    "sqrt_grad_at_zero",
    "`{clue.expression}` is taken at exactly 0, where the derivative 1 / (2 sqrt(x)) is infinite.",
    "Put an eps inside the root: `torch.sqrt({clue.inner} + 1e-8)`; one added outside comes too "
    "late.",
)


def norm_at_zero(clue: Clue) -> Diagnosis | None:
    """x / |x| at the origin, in a first or second derivative."""
    names = f"{clue.node} {clue.fact('made_in') or ''}"
    if not clue.is_backward or not any(n in names for n in ("Norm", "Cdist", "Dist", "Renorm")):
        return None
    if any(f"{layer}Norm" in names for layer in ("Batch", "Layer", "Weight", "Group")):
        return None
    return diagnosis(
        "norm_grad_at_zero",
        f"The norm in `{clue.expression}` is 0, and its derivative x / |x| is 0 / 0 there.",
        "Write it with the eps under the root: `torch.sqrt((x * x).sum(dim) + 1e-12)`.",
    )


# p * 0 ** (p - 1).
power_at_zero = rule(
    lambda clue: clue.is_backward and clue.node.startswith("Pow") and clue.has_zero,
    "pow_grad_at_zero",
    "`{clue.expression}` has a base of exactly 0 and an exponent below 1: the derivative "
    "p * x ** (p - 1) is infinite there.",
    "Keep the base positive: `x.clamp_min(1e-8) ** p`.",
)

# atan2(0, 0).
angle_at_origin = rule(
    lambda clue: clue.is_derivative_of(("atan2",)),
    "atan2_grad_at_zero",
    "Both arguments of `{clue.expression}` are 0 or so small that their squares are: the "
    "derivative divides by x**2 + y**2.",
    "Move the arguments off the origin before the call: `torch.atan2(y, x + 1e-8 * (x == 0))`.",
)

# acos'(±1).
edge_of_arccosine = rule(
    lambda clue: clue.is_derivative_of((*ARCS, *ARCS_OF_LARGE)),
    "acos_domain",
    "`{clue.expression}` is taken at the edge of its domain, where its derivative is infinite.",
    "Stay inside: `{clue.inner}.clamp(-1 + 1e-6, 1 - 1e-6)`.",
)

# Repeated singular or eigen values: 1 / (a - b).
matrix_derivative = rule(
    lambda clue: clue.is_backward and clue.node.startswith(_LINALG) and "Norm" not in clue.node,
    "degenerate_linalg",
    "The derivative of `{clue.expression}` divides by differences of eigenvalues or singular "
    "values (or by a pivot), and two of them are equal (or it is 0).",
    "Add a small multiple of the identity or small noise to the matrix, or use only functions "
    "of it whose derivative is well defined (eigenvalues, not eigenvectors).",
)

# g * v / |v| with v = 0.
weight_norm = rule(
    lambda clue: any(
        "weight_norm" in name.lower() or "WeightNorm" in name
        for name in (clue.node, clue.op, clue.inside)
    ),
    "weight_norm_of_zero",
    "weight_norm divides the direction by its norm, and a row of the weight is all 0.",
    "Initialise the weight with non-zero rows before weight_norm is applied.",
)


GRADIENT_RULES = (
    weight_norm,
    norm_at_zero,  # its own second derivative is full of masks
    untaken_branch,
    deviation_at_zero,
    root_at_zero,
    power_at_zero,
    angle_at_origin,
    edge_of_arccosine,
    matrix_derivative,
)


_DOMAIN = (*LOGS, "div", "rsqrt", "reciprocal", "pow", "native_layer_norm")


def mask_value(clue: Clue) -> Diagnosis | None:
    """-1e9 as a mask value is -Inf in float16."""
    item, out = clue.first, clue.output
    if clue.is_backward or clue.dtype != "float16":
        return None
    if out is None or out.nan_type is not NaNType.NEG_INF:
        return None
    constants = [value for value in clue.scalars.values() if isinstance(value, float)]
    is_cast = clue.op == "to_copy" and item is not None and (item.min or 0.0) < -65504
    if is_cast and item is not None and (item.max or 0.0) > 1e4:
        return None
    if not is_cast and not any(value < -65504 for value in constants):
        return None
    return diagnosis(
        "mask_value_overflow",
        "The mask value is below -65504, the lowest float16, and became -Inf; a row that is masked "
        "everywhere then has a softmax of NaN.",
        "Mask with torch.finfo(scores.dtype).min, and leave one position open in each row.",
    )


def two_masks(clue: Clue) -> Diagnosis | None:
    """Two masks of the lowest number there is, or one of them plus a score, are -Inf together."""
    out, numbers = clue.output, [item for item in clue.origin.inputs if item.min is not None]
    if clue.is_backward or clue.op not in ("add", "sub") or out is None:
        return None
    lowest = [item for item in numbers if item.min == -LARGEST.get(item.dtype, math.inf)]
    if out.nan_type is not NaNType.NEG_INF or not lowest:
        return None
    return diagnosis(
        "mask_value_overflow",
        f"A mask has the lowest number that {lowest[0].dtype} can hold ({number(lowest[0].min)}), "
        f"and `{clue.expression}` adds another negative number to it: the sum is -Inf. A row that "
        "is masked everywhere then has a softmax of NaN.",
        "Combine masks as booleans, `scores.masked_fill(padded | stale, torch.finfo(dtype).min)`, "
        "or take half of it, torch.finfo(dtype).min / 2.",
    )


def poisoned_statistics(clue: Clue) -> Diagnosis | None:
    """The scaler protects the weights, nothing protects BatchNorm's running statistics."""
    if not clue.context.poisoned_buffers or not clue.context.uses_scaler:
        return None
    names = ", ".join(clue.context.poisoned_buffers[:2])
    bound = "Bound the input before it is cast (x.clamp(-1e4, 1e4))"
    if clue.context.is_undone:
        then, fix = "had taken the bad value; they were put back with the step.", f"{bound}."
    else:
        then = "keep the bad value, so evaluation is NaN from now on."
        fix = f"{bound} and reset the running statistics."
    return diagnosis(
        "bn_stats_poisoned",
        f"`{clue.expression}` overflowed {clue.dtype}; the scaler skips the update, but the "
        f"running statistics ({names}) {then}",
        fix,
    )


def overflow(clue: Clue) -> Diagnosis | None:
    """Above 65504 in float16, where float32 has room."""
    if clue.dtype != "float16" or clue.output is None or clue.output.nan_count:
        return None
    if clue.op in _DOMAIN and clue.has_zero:
        return None
    detail = ""
    if clue.outlier is not None and not clue.is_backward and clue.op == "to_copy":
        path, now, usual = clue.outlier
        detail = f" ({path} reaches {number(now)}, usually {number(usual)})"
    return diagnosis(
        "low_precision_overflow",
        f"`{clue.expression}` passed 65504, the largest float16, from inputs up to "
        f"{number(clue.size)}{detail}; float32 and bfloat16 have room for it.",
        "Run it in float32, `with torch.autocast(device_type, enabled=False):` around it with "
        ".float() inputs, or use dtype=torch.bfloat16.",
    )


def underflow(clue: Clue) -> Diagnosis | None:
    """A small number that is 0 in 16 bits and then divides or is logged."""
    halves = [item for item in clue.origin.inputs if item.dtype in HALVES]
    if clue.op not in _DOMAIN or not any(item.zero_count for item in halves):
        return None
    if clue.dtype == "bfloat16":  # it has float32's range: a zero there is one, less a difference
        if not any({"sub", "rsub"} & set(clue.made_by(item.name)) for item in halves):
            return None
        return diagnosis(
            "low_precision_underflow",
            f"`{clue.expression}` got a 0 that is a difference of bfloat16 numbers, which have 8 "
            "bits: what is within 0.4% of 1 is rounded to 1, and 1 - p to 0.",
            "Compute it in float32 (.float()) and bound it away from 0, or start from the logits "
            "(logsigmoid, log_softmax).",
        )
    return diagnosis(
        "low_precision_underflow",
        f"`{clue.expression}` got a 0 in float16, where everything below 6e-8 is 0 (an eps of 1e-8 "
        "too).",
        "Compute it in float32 (.float()), or use an eps that float16 can hold, such as 1e-4.",
    )


PRECISION_RULES = (mask_value, two_masks, poisoned_statistics, overflow, underflow)
