"""Rules for 16-bit floats: what would be finite in float32."""

from __future__ import annotations

from stayfinite.explain.clue import Clue, diagnosis, largest, number
from stayfinite.records import Diagnosis, NaNType, TensorSummary

_DOMAIN = ("log", "div", "rsqrt", "reciprocal", "log2", "log10", "pow", "native_layer_norm")


def mask_value(clue: Clue) -> Diagnosis | None:
    """-1e9 as a mask value is -Inf in float16."""
    item = clue.first
    if (
        clue.dtype != "float16"
        or clue.output is None
        or clue.output.nan_type is not NaNType.NEG_INF
    ):
        return None
    constants = [value for value in clue.scalars.values() if isinstance(value, float)]
    by_constant = any(value < -65504 for value in constants)
    by_cast = clue.op == "to_copy" and item is not None and (item.min or 0.0) < -65504
    if not (by_constant or by_cast) or clue.is_backward:
        return None
    if by_cast and (item is None or (item.max or 0.0) > 1e4):
        return None
    return diagnosis(
        "mask_value_overflow",
        "The mask value is below -65504, the lowest float16, and became -Inf; a row that is masked "
        "everywhere then has a softmax of NaN.",
        "Mask with torch.finfo(scores.dtype).min, and leave one position open in each row.",
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
        then = "have taken the bad value for good, so evaluation is NaN from now on."
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
    if clue.op in _DOMAIN and any(item.zero_count for item in clue.origin.inputs):
        return None
    size = max((largest(item) for item in clue.origin.inputs), default=0.0)
    if clue.outlier is not None and not clue.is_backward and clue.op == "to_copy":
        path, now, usual = clue.outlier
        detail = f" ({path} reaches {number(now)}, usually {number(usual)})"
    else:
        detail = ""
    return diagnosis(
        "low_precision_overflow",
        f"`{clue.expression}` passed 65504, the largest float16, from inputs up to "
        f"{number(size)}{detail}; float32 and bfloat16 have room for it.",
        "Run it in float32, `with torch.autocast(device_type, enabled=False):` around it with "
        ".float() inputs, or use dtype=torch.bfloat16.",
    )


def underflow(clue: Clue) -> Diagnosis | None:
    """A small number that is 0 in 16 bits and then divides or is logged."""
    halves = [item for item in clue.origin.inputs if item.dtype in ("float16", "bfloat16")]
    if clue.op not in _DOMAIN or not any(item.zero_count for item in halves):
        return None
    if clue.dtype == "bfloat16":  # it has float32's range: a zero there is one, less a difference
        return _rounded_difference(clue) if _is_difference(clue, halves) else None
    return diagnosis(
        "low_precision_underflow",
        f"`{clue.expression}` met a 0 in float16, where everything below 6e-8 is 0 (an eps of 1e-8 "
        "too).",
        "Compute it in float32 (.float()), or use an eps that float16 can hold, such as 1e-4.",
    )


def _is_difference(clue: Clue, halves: list[TensorSummary]) -> bool:
    return any({"sub", "rsub"} & set(clue.made_by(item.name)) for item in halves)


def _rounded_difference(clue: Clue) -> Diagnosis:
    return diagnosis(
        "low_precision_underflow",
        f"`{clue.expression}` met a 0 that is a difference of bfloat16 numbers, which have 8 bits: "
        "what is within 0.4% of 1 is rounded to 1, and 1 - p to 0.",
        "Compute it in float32 (.float()) and bound it away from 0, or start from the logits "
        "(logsigmoid, log_softmax).",
    )


PRECISION_RULES = (mask_value, poisoned_statistics, overflow, underflow)
