"""Rules for operations outside their domain, where their inputs show enough."""

from __future__ import annotations

import ast
import math

from stayfinite.domains import ARCS, ARCS_OF_LARGE, DIVISIONS, LOGS, POWERS, ROOTS
from stayfinite.explain.clue import Clue, argument, diagnosis, number, operands, rule
from stayfinite.records import Diagnosis, NaNType, TensorSummary
from stayfinite.text import bare_name

_PRODUCTS = ("xlogy", "special_xlog1py")
_LOGS = (*LOGS, "log1p", *_PRODUCTS, "logit")
_GAMMAS = ("lgamma", "digamma", "polygamma", "mvlgamma")
_RANDOM = ("rand", "rand_like", "uniform", "uniform_", "exponential_", "random_")


def in_distribution(clue: Clue) -> Diagnosis | None:
    """Inside torch.distributions: a scale of 0, or a value on the edge of the support."""
    if "distributions/" not in clue.inside:
        return None
    divides = clue.op in ("div", "reciprocal") or clue.node in ("Div", "Reciprocal")
    if divides and clue.has_zero:
        return diagnosis(
            "zero_scale_distribution",
            f"The scale of the distribution in `{clue.expression}` is 0, and it is divided by.",
            "Bound it from below where it is made: `scale = F.softplus(raw) + 1e-4`.",
        )
    if clue.op in _LOGS and clue.has_zero and "normal" in clue.inside:
        return diagnosis(
            "zero_scale_distribution",
            f"The scale of the distribution in `{clue.expression}` is 0, and its log is -Inf.",
            "Bound it from below where it is made: `scale = F.softplus(raw) + 1e-4`.",
        )
    if clue.op in (*_LOGS, "log_sigmoid", "atanh") or clue.node.lower() in _LOGS:
        return diagnosis(
            "support_boundary",
            f"`{clue.expression}` gets a value on the edge of the distribution's support "
            "(0 or 1), where its log density is infinite.",
            "Keep samples and targets inside: `x.clamp(1e-6, 1 - 1e-6)`.",
        )
    return None


def logarithm(clue: Clue) -> Diagnosis | None:
    """log of zero or of less, and what people usually meant."""
    if clue.op not in _LOGS and not clue.is_derivative_of(_LOGS):
        return None
    is_product = clue.op in _PRODUCTS  # xlogy(x, y) is x * log(y)
    name = "other" if is_product else "self"
    inner = argument(clue.expression, clue.op, is_last=is_product) or clue.inner
    out, item, made = clue.output, clue.input(name) or clue.first, clue.made_by(name)
    if out is not None and out.nan_count and not clue.is_backward:
        return diagnosis(
            "log_of_negative",
            f"`{clue.expression}`: the argument goes down to {_lowest(item)}, and the log of a "
            "negative number is NaN.",
            f"Find why `{inner}` can be negative (a wrong scale or sign); "
            f"`torch.log({inner}.clamp_min(1e-8))` only hides it.",
        )
    if clue.is_backward and clue.node.startswith("Pow") and item and item.negative_count:
        return diagnosis(
            "pow_of_negative",
            f"The derivative of `{clue.expression}` by its exponent has the log of the base, which "
            f"goes down to {_lowest(item)} here.",
            "Keep the base above 0 before the power: `x.clamp_min(1e-6)`.",
        )
    if any(op in _RANDOM for op in made):
        return diagnosis(
            "gumbel_log_zero",
            f"`{clue.expression}` takes the log of a random number that can be exactly 0.",
            "Draw it away from 0: `torch.rand(shape).clamp_min(torch.finfo(x.dtype).tiny)`, or use "
            "-torch.empty(shape).exponential_().log().",
        )
    # Of a sigmoid it is a cross-entropy written out, in which the label is the 0.
    if _multiplied_by_zero(clue) and not any("sigmoid" in op for op in made):
        return diagnosis(
            "kl_of_zero",
            f"`{clue.expression}` is -Inf where a probability is 0, and 0 * -Inf is NaN, though "
            "p log p goes to 0.",
            "Use torch.xlogy(p, q), or clamp the probability: `q.clamp_min(1e-8)`.",
        )
    via = f" (made by {made[0].rstrip('_')})" if made and made[0] else ""
    side = "derivative of the log there is 1 / 0" if clue.is_backward else "log of 0 is -Inf"
    why = f"The argument of `{clue.expression}` is exactly 0{via}, and the {side}."
    if is_product:
        why = f"`{inner}` in `{clue.expression}` is exactly 0{via}, and the {side}."
        return diagnosis(
            "log_of_zero", why, f"Keep `{inner}` away from 0: `{inner}.clamp_min(1e-8)`."
        )
    return diagnosis("log_of_zero", why, _log_fix(made, inner))


def _lowest(item: TensorSummary | None) -> str:
    return number(item.min if item else None)


def _log_fix(made_by: list[str], inner: str) -> str:
    made = " ".join(made_by)
    if "softmax" in made:
        return "Use log_softmax on the logits instead of log(softmax(...))."
    if "sigmoid" in made:
        return "Use F.logsigmoid on the logits (or binary_cross_entropy_with_logits)."
    if "exp" in made or "sum" in made:
        return (
            "Stay in log space: torch.logsumexp over the log terms instead of the log of a sum of "
            f"exps; at least `torch.log({inner}.clamp_min(1e-30))`."
        )
    return f"Keep it away from 0: `torch.log({inner}.clamp_min(1e-8))`."


def _multiplied_by_zero(clue: Clue) -> bool:
    if any("kl_div" in place or "distributions/kl" in place for place in clue.fact("through", [])):
        return True
    turned = clue.fact("became_nan") or {}
    if not str(turned.get("op", "")).startswith("aten.mul"):
        return False
    return any(item.get("zero_count", 0) for item in turned.get("inputs", []))


LOG_RULES = (in_distribution, logarithm)

# Gamma, Beta, Dirichlet and negative binomial densities, by torch or written out.
gamma_at_pole = rule(
    lambda clue: (
        clue.op in _GAMMAS and (clue.has_zero or bool(clue.first and clue.first.negative_count))
    ),
    "support_boundary",
    "`{clue.expression}`: {clue.op} is infinite at 0 and at negative whole numbers, and its "
    "argument goes down to {clue.first.min}.",
    "Keep it above 0 where it is made, `F.softplus(raw) + 1e-6`, or clamp it: "
    "`{clue.inner}.clamp_min(1e-6)`.",
)


_NORMS = ("linalg_vector_norm", "norm", "linalg_norm")
_DIVIDING = ("div", "div_", "divide", "divide_", "true_divide", "true_divide_", "remainder", "fmod")
_LINALG = ("linalg_", "cholesky", "svd", "inverse", "lu_", "triangular", "logdet", "ormqr", "eig")


# The mean of no elements.
nothing_left = rule(
    lambda clue: bool(clue.fact("empty")) and clue.op not in ("cat", "stack"),
    "empty_reduction",
    "`{clue.expression}` reduces a tensor without elements: the mean of nothing is 0 / 0.",
    "Return 0 (or skip the term) when the selection is empty: "
    "`{clue.inner}.sum() / max(1, count)`.",
)


def _has_masked_row(clue: Clue) -> bool:
    """A softmax over nothing but -Inf, also one in two operations, as Categorical takes it."""
    total = clue.input("other")
    is_normalised = clue.op == "sub" and "logsumexp" in clue.made_by("other")[:1]
    if is_normalised:
        return total is not None and total.neg_inf_count > 0
    is_softmax = any(name in clue.op for name in ("softmax", "attention", "logsumexp"))
    return is_softmax and any(item.neg_inf_count for item in clue.origin.inputs)


masked_row = rule(
    lambda clue: not clue.is_backward and _has_masked_row(clue),
    "softmax_all_masked",
    "A whole row of the scores is -Inf in `{clue.expression}`, and the softmax of such a row "
    "is 0 / 0.",
    "Keep at least one position unmasked in every row, or zero those rows: "
    "scores.masked_fill(mask, torch.finfo(scores.dtype).min), and attn.masked_fill(mask, 0.0) "
    "after the softmax.",
)

# CTC with more labels than frames.
infeasible_alignment = rule(
    lambda clue: "ctc_loss" in clue.op,
    "ctc_infeasible",
    "A target of the batch (with one blank between equal labels) is longer than its input, so "
    "no alignment exists and its loss is Inf.",
    "Pass zero_infinity=True to CTCLoss, or drop samples whose target length plus repeats "
    "exceeds the number of frames.",
)


def no_labels(clue: Clue) -> Diagnosis | None:
    """Every label is ignore_index."""
    if not clue.op.startswith(("nll_loss", "cross_entropy")) or clue.is_backward:
        return None
    if any(item.bad_count for item in clue.origin.inputs):
        return None
    ignored = clue.scalars.get("ignore_index", -100)
    target = clue.input("target")
    labels = f"Every label of this batch is ignore_index ({ignored}) or has weight 0"
    if target is not None and target.min == target.max == ignored:
        labels = f"All labels of this batch are {ignored} (ignore_index)"
    return diagnosis(
        "bad_label",
        f"{labels}, so the mean in `{clue.expression}` is 0 / 0.",
        "Sum the loss and divide by max(1, (labels != ignore_index).sum()), or drop such batches.",
    )


def single_value(clue: Clue) -> Diagnosis | None:
    """The unbiased variance of one value."""
    if not clue.op.startswith(("var", "std")) and clue.node not in ("Var", "Std", "VarMean"):
        return None
    item, out = clue.first, clue.output
    correction = clue.scalars.get("correction", 1)
    correction = correction if isinstance(correction, (int, float)) else 1
    if item is None or out is None or out.numel == 0 or item.numel // out.numel > correction:
        return None
    return diagnosis(
        "var_of_single",
        f"`{clue.expression}` is the unbiased variance of a single value: 0 / (1 - 1).",
        "Pass correction=0, or skip groups of one.",
    )


negative_determinant = rule(
    lambda clue: clue.op == "scalar_tensor" and "logdet" in clue.expression,
    "degenerate_linalg",
    "The determinant in `{clue.expression}` is negative, and its logarithm is NaN.",
    "Build the matrix so that it is positive definite: from a Cholesky factor, or with a "
    "correlation of tanh(x), and add a small multiple of the identity.",
)

# A matrix that cannot be decomposed or inverted.
degenerate_matrix = rule(
    lambda clue: clue.op.startswith(_LINALG) and clue.op not in _NORMS,
    "degenerate_linalg",
    "The matrix in `{clue.expression}` is singular or not positive definite to working precision.",
    "Add a small multiple of the identity, `a + 1e-6 * torch.eye(n)`, and compute in float64.",
)


def division(clue: Clue) -> Diagnosis | None:
    """x / 0."""
    by_node = clue.is_derivative_of(("div", "reciprocal", "rsqrt"))
    if clue.op not in DIVISIONS and not by_node:
        return None
    below = clue.input("other") or (clue.first if clue.op in ("reciprocal", "rsqrt") else None)
    if not (below and below.zero_count) and not by_node and clue.scalars.get("other", 1) != 0:
        return None
    made_by = clue.made_by(below.name if below else "other")
    by_norm = bool({*made_by} & {*_NORMS})
    pair = operands(clue.expression, ast.Div)
    called = (argument(clue.expression, name, is_last=True) for name in _DIVIDING)
    called_with = next(filter(None, called), None) or argument(clue.expression)
    text = pair[1] if pair is not None else called_with or "the denominator"
    if by_norm and clue.origin.module is not None and not clue.fact("from_batch"):
        return diagnosis(
            "weight_norm_of_zero",
            f"`{clue.expression}` divides a weight by its norm, and a row of it is all 0.",
            f"Keep the norm away from 0 (`{text}.clamp_min(1e-8)`), and start with non-zero rows.",
        )
    if by_norm:
        return diagnosis(
            "cosine_zero_vector",
            f"`{clue.expression}` divides by the norm of a vector that is all 0.",
            "Use F.normalize(x, dim=-1) or F.cosine_similarity(a, b), which have an eps, or "
            "`x / x.norm(dim=-1, keepdim=True).clamp_min(1e-8)`.",
        )
    if [bare_name(op) for op in clue.fact("reached", [])[:2]] == ["log", "mul"]:
        return diagnosis(
            "kl_of_zero",
            f"`{clue.expression}` is p / q with q = 0, inside p * log(p / q): one distribution "
            "is 0 where the other is not.",
            "Clamp it, `q.clamp_min(1e-8)`, or use F.kl_div on log-probabilities from log_softmax.",
        )
    if below is not None and below.numel == 1 and "sum" in " ".join(made_by):
        guard = f"`{text}.clamp_min(1)` if it counts, else `{text} + 1e-8`"
    else:
        guard = f"`{text}.clamp_min(1e-8)` if it cannot be negative, else `{text} + 1e-8`"
    return diagnosis(
        "division_by_zero",
        f"`{text}` in `{clue.expression}` is 0: "
        + ("x / 0 is Inf, 0 / 0 is NaN" if not clue.is_backward else "the derivative divides by it")
        + ".",
        f"Keep the denominator away from 0: {guard}.",
    )


# sqrt(-tiny).
root_of_negative = rule(
    lambda clue: clue.op in ROOTS and clue.first is not None and bool(clue.first.negative_count),
    "sqrt_of_negative",
    "`{clue.expression}`: the argument goes down to {clue.first.min}; a value that should "
    "be 0 is negative because of rounding, or it has the wrong sign.",
    "Clamp before the root: `torch.sqrt({clue.inner}.clamp_min(1e-12))`.",
)


def power_of_negative(clue: Clue) -> Diagnosis | None:
    """(-x) ** 0.5, and 0 ** -1."""
    base = clue.first
    if clue.op not in POWERS or base is None or clue.output is None:
        return None
    if clue.output.nan_count and base.negative_count:
        return diagnosis(
            "pow_of_negative",
            f"`{clue.expression}`: a negative base (down to {number(base.min)}) to a fractional "
            "power is NaN.",
            "Use x.abs() ** p * x.sign(), or clamp the base to be positive first.",
        )
    exponent = clue.scalars.get("exponent", 1)
    if base.zero_count and isinstance(exponent, (int, float)) and exponent < 0:
        return diagnosis(
            "division_by_zero",
            f"`{clue.expression}`: 0 to a negative power is a division by zero.",
            "Keep the base away from 0: `x.clamp_min(1e-8)`.",
        )
    return None


# acos(1.0000001).
outside_arccosine = rule(
    lambda clue: clue.op in (*ARCS, *ARCS_OF_LARGE) and clue.first is not None,
    "acos_domain",
    "`{clue.expression}`: the argument reaches from {clue.first.min} to {clue.first.max}, "
    "and {clue.op} is not defined (or infinite) at and beyond 1.",
    "Clamp it inside: `{clue.inner}.clamp(-1 + 1e-6, 1 - 1e-6)`.",
)


_NORM_LAYERS = ("native_group_norm", "native_layer_norm", "native_batch_norm", "batch_norm")
_NO_EPS = 1e-20

# (x - mean) / sqrt(0 + 0).
equal_values = rule(
    lambda clue: clue.op in _NORM_LAYERS and float(clue.scalars.get("eps", 1.0)) < _NO_EPS,
    "batchnorm_degenerate",
    "`{clue.expression}` divides by the standard deviation of its values, which is 0 where they "
    "are all equal, and its eps is {clue.origin.facts[scalars][eps]}.",
    "Keep an eps in the layer, 1e-5 as by default, and look for inputs that are constant (a dead "
    "sensor, padding, an empty sample).",
)


def infinite_arithmetic(clue: Clue) -> Diagnosis | None:
    """Inf - Inf and 0 * Inf, where the Inf itself was meant."""
    out = clue.output
    if out is None or out.nan_type is not NaNType.NAN:
        return None
    given = any(item.pos_inf_count or item.neg_inf_count for item in clue.origin.inputs)
    constant = any(isinstance(v, float) and math.isinf(v) for v in clue.scalars.values())
    if clue.op in ("sub", "add", "rsub", "sum", "mean", "cumsum", "logaddexp") and given:
        return diagnosis(
            "inf_minus_inf",
            f"`{clue.expression}` subtracts one Inf from another; each alone gives no NaN.",
            "Remove those entries before the subtraction (select the columns, or clamp to a "
            "finite minimum such as torch.finfo(x.dtype).min).",
        )
    if clue.op in ("mul", "mm", "bmm", "addmm", "dot", "matmul", "baddbmm") and (given or constant):
        return diagnosis(
            "zero_times_inf",
            f"`{clue.expression}` multiplies 0 by Inf.",
            "Choose instead of multiplying: `x.masked_fill(mask, float('-inf'))` or "
            "torch.where(mask, a, b).",
        )
    return None


DOMAIN_RULES = (
    nothing_left,
    masked_row,
    infeasible_alignment,
    no_labels,
    single_value,
    negative_determinant,
    degenerate_matrix,
    *LOG_RULES,
    gamma_at_pole,
    root_of_negative,
    power_of_negative,
    division,
    outside_arccosine,
    equal_values,
    infinite_arithmetic,
)
