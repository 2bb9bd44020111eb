"""Decompositions of matrices that can be degenerate."""

from __future__ import annotations

from stayfinite.prevent.preflight.checks.claim import Check, Claim, number
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.use import Use

_ILL = 1e6
_NAMES = {
    "_linalg_svd": "svd",
    "_linalg_eigh": "eigh",
    "linalg_qr": "qr",
    "linalg_inv_ex": "inv",
    "linalg_cholesky_ex": "cholesky",
    "_linalg_solve_ex": "solve",
    "_linalg_slogdet": "slogdet",
}


def equal_values(use: Use) -> Claim | None:
    """svd, eigh and qr with a gradient, which divides by the gaps between singular values."""
    given = use.reach(0)
    if given is None or not use.has_gradient or not given.learned:
        return None
    name = _NAMES[use.name]
    return Claim(
        level="medium",
        cause="degenerate_linalg",
        what=f"The gradient of {name} divides by the gaps between singular values or eigenvalues; "
        "equal ones, as of a zero or symmetric matrix, give NaN.",
    )


def singular(use: Use) -> Claim | None:
    """inv, solve, cholesky and logdet of a matrix with nothing added to its diagonal."""
    given = use.reach(0)
    if given is None or not use.has_gradient or not given.varies or _has_diagonal(given):
        return None
    condition = use.facts.get("condition", 1.0)
    return Claim(
        level="medium" if condition > _ILL else "low",
        cause="degenerate_linalg",
        what=f"{_NAMES[use.name]} gets a matrix with nothing added to its diagonal; a singular one "
        f"gives Inf, NaN or an error, and its condition now is {number(condition)}.",
        fix="Add a little to the diagonal: `a + 1e-6 * torch.eye(n)`.",
        evidence={"condition": condition},
    )


def _has_diagonal(given: Reach) -> bool:
    return any(back.op in ("eye", "diag_embed", "diagonal_scatter") for back in given.ancestors(5))


CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(("_linalg_svd", "_linalg_eigh", "linalg_qr"), (equal_values,)),
    **dict.fromkeys(
        ("linalg_inv_ex", "linalg_cholesky_ex", "_linalg_solve_ex", "_linalg_slogdet"), (singular,)
    ),
}
