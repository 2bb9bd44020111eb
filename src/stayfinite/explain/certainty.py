"""Which causes an experiment can prove."""

from __future__ import annotations

from stayfinite.records import Origin

# What the values at one operation alone decide. Where the history of training decides (a rate, raw
# inputs), many a change stops the divergence, so that one holds proves nothing; and where several
# operations play together (0 * log 0, a norm under a where) it has several true names.
_SEEN_IN_VALUES = frozenset(
    {
        "acos_domain",
        "atan2_grad_at_zero",
        "ctc_infeasible",
        "division_by_zero",
        "empty_reduction",
        "log_of_negative",
        "log_of_zero",
        "low_precision_overflow",
        "mask_value_overflow",
        "norm_grad_at_zero",
        "optimizer_eps",
        "pow_grad_at_zero",
        "pow_of_negative",
        "softmax_all_masked",
        "sqrt_grad_at_zero",
        "sqrt_of_negative",
        "uninitialized_memory",
        "var_of_single",
        "weight_norm_of_zero",
        "zero_scale_distribution",
    }
)

# Names that say what the operation was given: it must have been given that.
_AT_ZERO = ("log_of_zero", "division_by_zero", "sqrt_grad_at_zero", "norm_grad_at_zero")
_BELOW_ZERO = ("log_of_negative", "sqrt_of_negative", "pow_of_negative")
_HALVES = ("float16", "bfloat16")
_OF_HALVES = ("low_precision_overflow", "mask_value_overflow", "optimizer_eps")


def is_seen_in_values(cause: str, origin: Origin) -> bool:
    """Whether the values at the operation decide the cause, so that taking them away proves it."""
    if any(each.dtype in _HALVES for each in origin.inputs) and cause not in _OF_HALVES:
        return False  # it may be the precision
    if cause in _AT_ZERO and not any(each.zero_count for each in origin.inputs):
        return False
    if cause in _BELOW_ZERO and not any(each.negative_count for each in origin.inputs):
        return False
    return cause in _SEEN_IN_VALUES
