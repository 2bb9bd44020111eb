"""First weights: what check_init finds, as risks, each kind of problem once."""

from __future__ import annotations

from torch import nn

from stayfinite.prevent.init import InitProblem, check_init
from stayfinite.prevent.risks import Level, Risk

_LEVELS: dict[str, tuple[Level, str]] = {
    "non_finite": ("high", "bad_init"),
    "uninitialised": ("high", "uninitialized_memory"),
    "too_large": ("medium", "bad_init"),
    "near_zero": ("low", "bad_init"),
    "zero": ("low", "bad_init"),
    "constant": ("low", "bad_init"),
    "dead_units": ("low", "bad_init"),
}
_NAMED = 3


def weight_risks(model: nn.Module) -> list[Risk]:
    """Every kind of problem with the weights of the model, and which of them have it."""
    by_kind: dict[str, list[InitProblem]] = {}
    for problem in check_init(model):
        by_kind.setdefault(problem.kind, []).append(problem)
    return [_risk(kind, problems) for kind, problems in by_kind.items()]


def _risk(kind: str, problems: list[InitProblem]) -> Risk:
    level, cause = _LEVELS[kind]
    first, *others = problems
    what = f"{first.detail[0].upper()}{first.detail[1:]}"
    if others:
        names = ", ".join(problem.name for problem in others[:_NAMED])
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        what += f"; the same of {names}{more}"
    return Risk(
        level=level,
        cause=cause,
        what=f"{what}.",
        where=first.name,
        fix=first.fix,
        evidence={"tensors": len(problems)},
    )
