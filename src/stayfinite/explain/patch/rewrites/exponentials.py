"""Exponentials that overflow."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.flow import names_in, readers, value_of
from stayfinite.explain.patch.guards import followed, rewritten
from stayfinite.explain.patch.imports import torch_name
from stayfinite.explain.patch.layout import insert_before
from stayfinite.explain.patch.logspace import one_line
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.syntax import (
    called,
    calls_in,
    constant,
    in_brackets,
    keyword,
    operand,
)

_EXPS = ("exp", "exp2", "expm1", "sinh", "cosh")


def _overflows(site: Site) -> bool:
    return site.op in _EXPS or site.autograd in ("Exp", "Exp2", "Expm1", "Sinh", "Cosh")


def written_out(site: Site) -> Iterator[Change]:
    """1 / (1 + exp(-x)) and exp(x) / (1 + exp(x)) to sigmoid(x)."""
    if not _overflows(site) and site.op not in ("div", "reciprocal", "add"):
        return
    torch, imports = torch_name(site.source)
    for node in ast.walk(site.source.scope(site.node)):
        found = _sigmoid(site, node) if isinstance(node, ast.BinOp) else None
        if found is not None and isinstance(node, ast.expr) and _is_near(site, node):
            text = f"{torch}.sigmoid({found})"
            yield rewritten(site, node, text, "Use sigmoid, which does not overflow.", *imports)


def _is_near(site: Site, node: ast.expr) -> bool:
    inside = {id(each) for each in ast.walk(node)}
    inside |= {id(e) for name in names_in(node) for e in ast.walk(value_of(site.source, name))}
    return id(site.node) in inside or any(each is node for each in ast.walk(site.node))


def _sigmoid(site: Site, node: ast.BinOp) -> str | None:
    """x of a sigmoid that is written out."""
    if not isinstance(node.op, ast.Div):
        return None
    above, below = value_of(site.source, node.left), value_of(site.source, node.right)
    exponent = _one_plus_exp(site, below)
    if exponent is None:
        return None
    if constant(above) == 1:
        if isinstance(exponent, ast.UnaryOp) and isinstance(exponent.op, ast.USub):
            return one_line(site.source, exponent.operand)
        return f"-({one_line(site.source, exponent)})"
    if isinstance(above, ast.Call) and called(above) == "exp":
        inner = operand(site.source, above)
        if inner is not None and ast.dump(inner) == ast.dump(exponent):
            return one_line(site.source, inner)
    return None


def _one_plus_exp(site: Site, node: ast.expr) -> ast.expr | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return None
    for one, other in ((node.left, node.right), (node.right, node.left)):
        call = value_of(site.source, other)
        if constant(one) == 1 and isinstance(call, ast.Call) and called(call) == "exp":
            return operand(site.source, call)
    return None


def softmax_by_hand(site: Site) -> Iterator[Change]:
    """exp(x) / exp(x).sum(dim=d, keepdim=True) to softmax(x, dim=d)."""
    if not _overflows(site) and site.op not in ("div", "sum"):
        return
    torch, imports = torch_name(site.source)
    for node in ast.walk(site.source.scope(site.node)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        above, below = value_of(site.source, node.left), value_of(site.source, node.right)
        if not (isinstance(above, ast.Call) and called(above) == "exp" and _is_near(site, node)):
            continue
        if not isinstance(below, ast.Call) or called(below) != "sum":
            continue
        total = operand(site.source, below)
        inner = operand(site.source, above)
        same = total is not None and ast.dump(value_of(site.source, total)) == ast.dump(above)
        dim = _dim(site, below)
        if same and inner is not None and dim is not None:
            text = f"{torch}.softmax({one_line(site.source, inner)}, dim={dim})"
            yield rewritten(site, node, text, "Use softmax, which does not overflow.", *imports)


def shifted(site: Site) -> Iterator[Change]:
    """exp(x) that is divided by its own sum: exp(x - max), which has the same ratio."""
    statement = site.statement
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not _overflows(site) or not isinstance(target, ast.Name):
        return
    for node in ast.walk(site.source.scope(site.node)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        below = value_of(site.source, node.right)
        if not isinstance(below, ast.Call) or called(below) != "sum":
            continue
        total, dim = operand(site.source, below), _dim(site, below)
        same = isinstance(total, ast.Name) and total.id == target.id == getattr(node.left, "id", "")
        for call in site.calls(["exp"]) if same and dim is not None else ():
            if (inner := operand(site.source, call)) is not None:
                x = in_brackets(site.source, inner)
                text = f"{x} - {x}.amax(dim={dim}, keepdim=True)"
                what = "Subtract the maximum before the exponential, which leaves the ratios."
                yield rewritten(site, inner, text, what)


def _dim(site: Site, call: ast.Call) -> str | None:
    """The dim of a sum, as it is written."""
    inner = operand(site.source, call)
    rest = [arg for arg in call.args if arg is not inner]
    found = rest[0] if rest else keyword(call, "dim")
    return site.source.of(found) if found is not None else None


def shared_exponent(site: Site) -> Iterator[Change]:
    """Several exponentials of one variable: the variable is bounded before all of them."""
    if not _overflows(site):
        return
    scope = site.source.scope(site.node)
    inside = [operand(site.source, call) for call in calls_in(scope, ["exp"])]
    names = [{each.id for each in names_in(node)} for node in inside if node is not None]
    if len(names) < 3 or len(set.union(*names)) != 1:
        return
    (name,) = names[0]
    limit = 2 if site.is_half else 20
    first = min(
        (found for call in calls_in(scope, ["exp"]) if (found := site.source.statement(call))),
        key=lambda statement: statement.lineno,
    )
    what = f"Bound {name} before the exponentials, which overflow together."
    edit = insert_before(site.source, first, f"{name} = {name}.clamp(max={limit})")
    yield Change(site.source, what, (edit,))


def bounded(site: Site) -> Iterator[Change]:
    """exp(x) to exp(x.clamp(max=20))."""
    if not _overflows(site):
        return
    for call in site.calls(_EXPS):
        inner = operand(site.source, call)
        if inner is None:
            continue
        for limit in ("10", "5") if site.is_half else ("20", "8"):
            sides = f"-{limit}, {limit}" if called(call) in ("sinh", "cosh") else f"max={limit}"
            yield followed(site, inner, f".clamp({sides})", "Bound the exponent.")


def bounded_for_all(site: Site) -> Iterator[Change]:
    """Bound the variable itself, where it is used again after this exponential."""
    if not _overflows(site):
        return
    for call in site.calls(["exp"]):
        inner = operand(site.source, call)
        names = {each.id for each in names_in(inner)} if inner is not None else set()
        names -= set(site.source.imported) | {"self"}
        if len(names) != 1:
            continue
        (name,) = names
        if any(readers(site.source, name, after=site.statement)):
            limit = 10 if site.is_half else 20
            line = f"{name} = {name}.clamp(max={limit})"
            edit = insert_before(site.source, site.statement, line)
            what = f"Bound {name} before all that exponentiates it."
            yield Change(site.source, what, (edit,))


def inside_loss(site: Site) -> Iterator[Change]:
    """poisson_nll_loss(x, y), which exponentiates x."""
    if not _overflows(site) or "nn/functional.py" not in str(site.fact("inside") or ""):
        return
    if isinstance(site.node, ast.Call) and site.node.args:
        for limit in ("10", "5") if site.is_half else ("20", "8"):
            what = "Bound what the loss exponentiates."
            yield followed(site, site.node.args[0], f".clamp(max={limit})", what)


EXPONENTIALS = (
    written_out,
    softmax_by_hand,
    shifted,
    shared_exponent,
    inside_loss,
    bounded,
    bounded_for_all,
)
