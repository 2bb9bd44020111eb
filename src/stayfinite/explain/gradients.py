"""Rules for the backward pass: a finite value whose derivative is not."""

from __future__ import annotations

from stayfinite.explain.clue import Clue, diagnosis
from stayfinite.explain.expression import argument
from stayfinite.records import Diagnosis

_SELECTORS = ("WhereBackward", "MaskedFillBackward", "MaskedScatterBackward")
_TRAPPED = (
    "Pow",
    "Log",
    "Sqrt",
    "Div",
    "Rsqrt",
    "Reciprocal",
    "Acos",
    "Asin",
    "Log2",
    "Atan2",
    "Exp",
)
_LINALG = ("Linalg", "Cholesky", "Svd", "Eigh", "Inverse", "LuSolve", "Triangular", "Det", "Qr")


def untaken_branch(clue: Clue) -> Diagnosis | None:
    """torch.where picked the other branch, and 0 times an infinite derivative is NaN."""
    if not clue.is_backward or clue.node not in _TRAPPED:
        return None
    consumers = clue.fact("consumers", [])
    if not any(name.startswith(_SELECTORS) for name in consumers) or not _by_zero_gradient(clue):
        return None
    inner = argument(clue.expression) or "x"
    return diagnosis(
        "where_grad_trap",
        f"torch.where does not use this value of `{clue.expression}`, but its derivative there is "
        "infinite, and 0 (the gradient of the branch not taken) times Inf is NaN.",
        f"Make the input safe before the operation: `{inner} = torch.where(mask, {inner}, 1.0)`, "
        "then torch.where(mask, ..., ...) as it is.",
    )


def _by_zero_gradient(clue: Clue) -> bool:
    turned = clue.fact("became_nan") or {}
    given = [item.get("zero_count", 0) for item in turned.get("inputs", [])]
    zeros = [item.zero_count for item in clue.origin.inputs]
    return any(given) or sum(bool(count) for count in zeros) > 1 or (bool(zeros) and zeros[0] > 0)


def root_at_zero(clue: Clue) -> Diagnosis | None:
    """1 / (2 sqrt(0)), also inside std()."""
    if not clue.is_backward or clue.node not in ("Sqrt", "Std", "StdMean"):
        return None
    inner = argument(clue.expression) or "x"
    if clue.node != "Sqrt":
        return diagnosis(
            "sqrt_grad_at_zero",
            f"The standard deviation in `{clue.expression}` is 0 (all values equal, or only one), "
            "and the derivative of the root there is infinite.",
            "Use (x.var(...) + 1e-8).sqrt() instead of x.std(...).",
        )
    return diagnosis(
        "sqrt_grad_at_zero",
        f"`{clue.expression}` is taken at exactly 0, where the derivative 1 / (2 sqrt(x)) is "
        "infinite.",
        f"Put an eps inside the root: `torch.sqrt({inner} + 1e-8)`; one added outside comes too "
        "late.",
    )


def norm_at_zero(clue: Clue) -> Diagnosis | None:
    """x / |x| at the origin, in a first or second derivative."""
    names = f"{clue.node} {clue.fact('made_in') or ''}"
    if not clue.is_backward or not any(n in names for n in ("Norm", "Cdist", "Dist", "Renorm")):
        return None
    if (
        "BatchNorm" in names
        or "LayerNorm" in names
        or "WeightNorm" in names
        or "GroupNorm" in names
    ):
        return None
    return diagnosis(
        "norm_grad_at_zero",
        f"The norm in `{clue.expression}` is 0, and its derivative x / |x| is 0 / 0 there.",
        "Write it with the eps under the root: `torch.sqrt((x * x).sum(dim) + 1e-12)`.",
    )


def power_at_zero(clue: Clue) -> Diagnosis | None:
    """p * 0 ** (p - 1)."""
    if not clue.is_backward or not clue.node.startswith("Pow"):
        return None
    base = clue.first
    if base is None or not any(item.zero_count for item in clue.origin.inputs):
        return None
    return diagnosis(
        "pow_grad_at_zero",
        f"`{clue.expression}` has a base of exactly 0 and an exponent below 1: the derivative "
        "p * x ** (p - 1) is infinite there.",
        "Keep the base positive: `x.clamp_min(1e-8) ** p`.",
    )


def angle_at_origin(clue: Clue) -> Diagnosis | None:
    """atan2(0, 0)."""
    if not clue.is_backward or clue.node != "Atan2":
        return None
    return diagnosis(
        "atan2_grad_at_zero",
        f"Both arguments of `{clue.expression}` are 0 or so small that their squares are: the "
        "derivative divides by x**2 + y**2.",
        "Move the arguments off the origin before the call: `torch.atan2(y, x + 1e-8 * (x == 0))`.",
    )


def edge_of_arccosine(clue: Clue) -> Diagnosis | None:
    """acos'(±1)."""
    if not clue.is_backward or clue.node not in ("Acos", "Asin", "Atanh", "Acosh", "Erfinv"):
        return None
    inner = argument(clue.expression) or "x"
    return diagnosis(
        "acos_domain",
        f"`{clue.expression}` is taken at the edge of its domain, where its derivative is "
        "infinite.",
        f"Stay inside: `{inner}.clamp(-1 + 1e-6, 1 - 1e-6)`.",
    )


def matrix_derivative(clue: Clue) -> Diagnosis | None:
    """Repeated singular or eigen values: 1 / (a - b)."""
    if not clue.is_backward or not clue.node.startswith(_LINALG) or "Norm" in clue.node:
        return None
    return diagnosis(
        "degenerate_linalg",
        f"The derivative of `{clue.expression}` divides by differences of eigenvalues or singular "
        "values (or by a pivot), and two of them are equal (or it is 0).",
        "Add a small multiple of the identity or small noise to the matrix, or use only functions "
        "of it whose derivative is well defined (eigenvalues, not eigenvectors).",
    )


def weight_norm(clue: Clue) -> Diagnosis | None:
    """g * v / |v| with v = 0."""
    names = f"{clue.node} {clue.op} {clue.inside}"
    if "weight_norm" not in names.lower() and "WeightNorm" not in names:
        return None
    return diagnosis(
        "weight_norm_of_zero",
        "weight_norm divides the direction by its norm, and a row of the weight is all 0.",
        "Initialise the weight with non-zero rows before weight_norm is applied.",
    )


GRADIENT_RULES = (
    weight_norm,
    norm_at_zero,  # its own second derivative is full of masks
    untaken_branch,
    root_at_zero,
    power_at_zero,
    angle_at_origin,
    edge_of_arccosine,
    matrix_derivative,
)
