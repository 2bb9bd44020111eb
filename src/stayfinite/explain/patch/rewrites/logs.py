"""Logarithms of exponentials, softmaxes and sigmoids, rewritten in log space."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.edits import Edit
from stayfinite.explain.patch.flow import names_in, value_of
from stayfinite.explain.patch.guards import rewritten
from stayfinite.explain.patch.imports import functional
from stayfinite.explain.patch.layout import placed
from stayfinite.explain.patch.logspace import LogText, one_line
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import called, calls_in, keyword, operand

_OPS = ("log", "exp", "div", "softmax", "sigmoid", "sum", "mul", "add", "log1p")
_NODES = ("Log", "Exp", "Div", "Softmax", "Sigmoid", "Sum", "Mul", "Log1P", "Pow")


def log_space(site: Site) -> Iterator[Change]:
    """log(sum(exp(x))) to logsumexp(x), log(softmax(x)) to log_softmax(x), and their kin."""
    if site.op not in _OPS and site.autograd not in _NODES:
        return
    scope = site.source.scope(site.node)
    for call in calls_in(scope, ("log", "log1p")):
        written = _written(site.source, call)
        if written is None or not _is_about(site, call, written[0]):
            continue
        yield _change(site, call)


def _written(source: Source, call: ast.Call) -> tuple[LogText, str] | None:
    inner = operand(source, call)
    if inner is None:
        return None
    writer = LogText(source)
    if called(call) == "log1p":
        return _softplus(source, writer, inner)
    text, _ = writer.of(inner)
    if "math.log(" in text and source.imported.get("math") != "math":
        writer.imports.add("import math")
    return (writer, text) if writer.gains else None


def _softplus(source: Source, writer: LogText, inner: ast.expr) -> tuple[LogText, str] | None:
    """log1p(exp(x)) is softplus(x)."""
    if not isinstance(inner, ast.Call) or called(inner) != "exp":
        return None
    exponent = operand(source, inner)
    if exponent is None:
        return None
    name, imports = functional(source)
    writer.imports.update(imports)
    writer.seen.append(inner)
    return writer, f"{name}.softplus({one_line(source, exponent)})"


def _is_about(site: Site, call: ast.Call, writer: LogText) -> bool:
    """Whether the operation that went wrong is part of this logarithm."""
    here = {id(each) for root in (call, *writer.seen) for each in ast.walk(root)}
    return id(site.node) in here or any(each is call for each in ast.walk(site.node))


def _change(site: Site, first: ast.Call) -> Change:
    """The same for all logarithms of the statement, as they will fail in the same way."""
    source = site.source
    statement = source.statement(first) or site.statement
    edits: list[Edit] = []
    inlined: list[ast.Assign] = []
    imports: set[str] = set()
    for call in calls_in(statement, ("log", "log1p")):
        written = _written(source, call)
        if written is None:
            continue
        writer, text = written
        edits += _placed(source, call, text)
        inlined += writer.inlined
        imports |= writer.imports
    edits += _removed(source, inlined, edits)
    what = "Stay in log space instead of taking the logarithm of an exponential."
    return Change(source, what, tuple(edits), tuple(sorted(imports)))


def _placed(source: Source, call: ast.Call, text: str) -> list[Edit]:
    inner = operand(source, call)
    names = [each.id for each in names_in(inner)] if inner is not None else []
    return placed(source, call, text, name=f"log_{names[0]}" if names else "log_value")


def _removed(source: Source, inlined: list[ast.Assign], edits: list[Edit]) -> list[Edit]:
    """Lines of names that nobody reads any more."""
    gone: list[Edit] = []
    for each in sorted(set(inlined), key=lambda each: -each.lineno):
        (target,) = each.targets
        if not isinstance(target, ast.Name):
            continue
        spans = [*edits, *gone]
        reads = [
            name
            for name in names_in(source.scope(each))
            if name.id == target.id and isinstance(name.ctx, ast.Load)
        ]
        still = [
            name for name in reads if not any(e.start <= source.start(name) < e.end for e in spans)
        ]
        if not still:
            end = (each.end_lineno or each.lineno) + 1
            gone.append(Edit(source.offset(each.lineno, 0), source.offset(end, 0), ""))
    return gone


def squashed(site: Site) -> Iterator[Change]:
    """log(1 - a ** 2) with a = tanh(u) * scale: the correction is that of tanh(u)."""
    if site.op != "log" and site.autograd != "Log":
        return
    for call in site.calls(["log"]):
        for power in ast.walk(call):
            base = _squared(site.source, power)
            tanh = _tanh_in(site.source, base) if base is not None else None
            if base is not None and tanh is not None:
                what = "Use the output of tanh itself, which is between -1 and 1, in 1 - x ** 2."
                yield rewritten(site, base, site.source.of(tanh), what)


def _squared(source: Source, node: ast.AST) -> ast.expr | None:
    parent = source.parents.get(node)
    if not isinstance(parent, ast.BinOp) or not isinstance(parent.op, ast.Sub):
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return node.left
    return operand(source, node) if isinstance(node, ast.Call) and called(node) == "pow" else None


def _tanh_in(source: Source, node: ast.expr) -> ast.Call | None:
    """tanh(u) where the name stands for a multiple of it."""
    value = value_of(source, node)
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mult):
        return None
    for side in (value.left, value.right):
        behind = value_of(source, side)
        if isinstance(behind, ast.Call) and called(behind) == "tanh":
            return behind
    return None


def probabilities(site: Site) -> Iterator[Change]:
    """binary_cross_entropy(sigmoid(x), y) to the loss on logits."""
    if not site.op.startswith("binary_cross_entropy"):
        return
    for call in site.calls(["binary_cross_entropy"]):
        first = call.args[0] if call.args else keyword(call, "input")
        if not isinstance(first, ast.Call) or called(first) != "sigmoid":
            continue
        logits = operand(site.source, first)
        if logits is None:
            continue
        name, end = site.source.of(call.func), site.source.end(call.func)
        edits = (
            Edit(end - len("binary_cross_entropy"), end, "binary_cross_entropy_with_logits"),
            Edit(site.source.start(first), site.source.end(first), site.source.of(logits)),
        )
        if name.endswith("binary_cross_entropy"):
            yield Change(site.source, "Use the loss that works on logits.", edits)


LOGS = (log_space, squashed, probabilities)
