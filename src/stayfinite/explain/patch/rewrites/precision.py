"""Sixteen bits: what overflows there is computed in float32, or in bfloat16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change, Edit
from stayfinite.explain.patch.guards import swapped
from stayfinite.explain.patch.imports import torch_name
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import called, constant, in_brackets, is_method, operand

_SIMPLE = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, ast.AnnAssign)


def is_precision(site: Site) -> bool:
    causes = ("low_precision_overflow", "low_precision_underflow", "loss_scale_collapse")
    return site.is_half and (site.cause in causes or site.op in ("mm", "bmm", "addmm"))


def float32_operands(site: Site) -> Iterator[Change]:
    """a / b to a.float() / b.float()."""
    node = site.node
    if not is_precision(site) or not isinstance(node, ast.expr):
        return
    what = "Compute it in float32."
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult):
        yield Change(site.source, what, _floats(site, [node.left, node.right]))
    elif isinstance(node, ast.Call) and not site.fact("inside"):
        inner = operand(site.source, node)
        if inner is not None:
            yield Change(site.source, what, _floats(site, [inner]))


def _floats(site: Site, nodes: list[ast.expr]) -> tuple[Edit, ...]:
    return tuple(
        swapped(site.source, node, f"{in_brackets(site.source, node)}.float()")
        for node in nodes
        if constant(node) is None and not site.source.of(node).endswith(".float()")
    )


def float32_island(site: Site) -> Iterator[Change]:
    """The statement without autocast, on float32 inputs."""
    statement = site.statement
    if not is_precision(site) or not isinstance(statement, _SIMPLE):
        return
    torch, imports = torch_name(site.source)
    device = (site.origin.inputs[0].device if site.origin.inputs else "cpu").split(":")[0]
    quote = site.source.quote
    head = f"with {torch}.autocast({quote}{device}{quote}, enabled=False):"
    edits = _indented(site.source, statement, head)
    what = "Run it in float32, outside autocast."
    yield Change(site.source, what, (*edits, *_arguments(site)), imports)


def _indented(source: Source, statement: ast.stmt, head: str) -> list[Edit]:
    """The statement one level deeper, below a new line."""
    indent = source.indent(statement)
    step = "\t" if "\t" in indent else "    "
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    at = source.offset(first, 0)
    edits = [Edit(at, at, f"{indent}{head}{source.newline}{step}")]
    for line in range(first + 1, last + 1):
        edits.append(Edit(source.offset(line, 0), source.offset(line, 0), step))
    return edits


def _arguments(site: Site) -> tuple[Edit, ...]:
    node = site.node
    if isinstance(node, ast.BinOp):
        return _floats(site, [node.left, node.right])
    if not isinstance(node, ast.Call):
        return ()
    is_layer = site.source.of(node.func).startswith("self.")
    if is_method(site.source, node) and not is_layer and isinstance(node.func, ast.Attribute):
        return _floats(site, [node.func.value, *node.args[:1]])
    return _floats(site, [arg for arg in node.args[:3] if not isinstance(arg, ast.Starred)])


def bfloat16(site: Site) -> Iterator[Change]:
    """float16 to bfloat16, which has float32's range."""
    if not is_precision(site) or site.cause == "low_precision_underflow":
        return
    for source in (site.source, *site.others):
        edits = [
            Edit(source.end(node) - len("float16"), source.end(node), "bfloat16")
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute) and node.attr == "float16"
        ]
        edits += [
            Edit(source.end(call.func) - len("half"), source.end(call.func), "bfloat16")
            for call in ast.walk(source.tree)
            if isinstance(call, ast.Call) and called(call) == "half" and not call.args
        ]
        if edits:
            yield Change(source, "Use bfloat16, which has the range of float32.", tuple(edits))


def larger_eps(site: Site) -> Iterator[Change]:
    """An eps of 1e-8 is 0 in float16."""
    if not site.is_half or site.is_backward:
        return
    edits = [
        Edit(site.source.start(node), site.source.end(node), "1e-4")
        for node in ast.walk(site.statement)
        if isinstance(node, ast.Constant) and 0 < (constant(node) or 0) < 6e-8
    ]
    if edits:
        yield Change(site.source, "Use an eps that float16 can hold.", tuple(edits))


PRECISION = (float32_operands, float32_island, bfloat16)
