"""torch.where hides a bad value but not its gradient: the input is made safe inside the branch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.flow import known_at, readers
from stayfinite.explain.patch.guards import rewritten
from stayfinite.explain.patch.imports import torch_name
from stayfinite.explain.patch.rewrites.divisions import divides, divisions
from stayfinite.explain.patch.rewrites.domains import powers
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.syntax import called, is_method, operand

_WHAT = "Make the input safe where torch.where takes the other branch."
_UNARY = {
    "Log": ("log",),
    "Log2": ("log2",),
    "Log10": ("log10",),
    "Log1P": ("log1p",),
    "Sqrt": ("sqrt",),
    "Rsqrt": ("rsqrt",),
    "Acos": ("acos", "arccos"),
    "Asin": ("asin", "arcsin"),
    "Exp": ("exp",),
    "Expm1": ("expm1",),
    "Reciprocal": ("reciprocal",),
}
_ZERO_IS_SAFE = ("Acos", "Asin", "Exp", "Expm1", "Log1P")


def untaken(site: Site) -> Iterator[Change]:
    """where(c, f(x), y) to where(c, f(where(c, x, 1.0)), y)."""
    if not site.is_backward:
        return
    safe = "0.0" if site.autograd in _ZERO_IS_SAFE else "1.0"
    for inner in _operands(site):
        for mask, is_taken in _choices(site, inner):
            if not known_at(site.source, mask, site.statement):
                continue
            torch, imports = torch_name(site.source)
            condition, x = site.source.of(mask), site.source.of(inner)
            pair = f"{x}, {safe}" if is_taken else f"{safe}, {x}"
            yield rewritten(site, inner, f"{torch}.where({condition}, {pair})", _WHAT, *imports)


def _operands(site: Site) -> Iterator[ast.expr]:
    if divides(site):
        yield from (below for _, _, below in divisions(site))
    if site.autograd.startswith("Pow"):
        yield from (base for _, base, _ in powers(site))
    for call in site.calls(_UNARY.get(site.autograd, ())):
        if (inner := operand(site.source, call)) is not None:
            yield inner


def _choices(site: Site, inner: ast.expr) -> Iterator[tuple[ast.expr, bool]]:
    """(condition, whether the branch is taken where it holds) of selections around the operand."""
    yield from _around(site, inner)
    statement = site.statement
    if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
        for use in readers(site.source, target.id, after=statement):
            yield from _around(site, use)


def _around(site: Site, node: ast.expr) -> Iterator[tuple[ast.expr, bool]]:
    below: ast.AST = node
    for parent in site.source.above(node):
        if isinstance(parent, ast.stmt):
            return
        if isinstance(parent, ast.Call):
            yield from _chosen(site, parent, below)
        below = parent


def _chosen(site: Site, call: ast.Call, below: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The choice that a call of where or masked_fill makes about the expression below it."""
    name = called(call)
    if name == "where" and not is_method(site.source, call) and len(call.args) == 3:
        mask, taken, other = call.args
        if below in (taken, other):
            yield mask, below is taken
    elif name == "masked_fill" and call.args and below is call.func:
        yield call.args[0], False
