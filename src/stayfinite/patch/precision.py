"""Sixteen bits: what overflows there is computed in float32, or in bfloat16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.patch.code import (
    Site,
    Source,
    called,
    constant,
    in_brackets,
    is_method,
    names_in,
    operand,
    torch_name,
    value_of,
)
from stayfinite.patch.edit import Change, Edit, swapped

_TENSOR_METHODS = ("matmul", "mm", "bmm", "mul", "pow", "square", "sum", "mean", "prod", "norm")
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
        given = [node.left, node.right]
    elif isinstance(node, ast.Call) and not site.fact("inside"):
        given = [inner] if (inner := operand(site.source, node)) is not None else []
    else:
        given = []
    edits = _floats(site, given)
    if edits:
        yield Change(site.source, what, edits)
        yield from _cast_back(site, given, edits)


def _cast_back(site: Site, given: list[ast.expr], edits: tuple[Edit, ...]) -> Iterator[Change]:
    """The same, with the result in the type that it had."""
    value = getattr(site.statement, "value", None)
    known = site.source.imported
    names = [each.id for node in given for each in names_in(node) if each.id not in known]
    if isinstance(value, ast.expr) and names:
        tight = isinstance(value, (ast.Call, ast.Name, ast.Subscript, ast.Attribute))
        start, end = site.source.start(value), site.source.end(value)
        around = (
            Edit(start, start, "" if tight else "("),
            Edit(end, end, f"{'' if tight else ')'}.to({names[0]}.dtype)"),
        )
        what = "Compute it in float32, and give the result its type back."
        yield Change(site.source, what, (*around, *edits))


def scaled_first(site: Site) -> Iterator[Change]:
    """(q @ k) / s to (q / s) @ k, which is smaller on the way."""
    node, parent = site.node, site.source.parents.get(site.node)
    if not is_precision(site) or not isinstance(parent, ast.BinOp) or parent.left is not node:
        return
    pair = _factors(site, node)
    if pair is None or not isinstance(parent.op, (ast.Div, ast.Mult)):
        return
    left, right = (in_brackets(site.source, each) for each in pair)
    sign = "/" if isinstance(parent.op, ast.Div) else "*"
    scaled = f"{left} {sign} {in_brackets(site.source, parent.right)}"
    text = f"({scaled}) @ {right}"
    if isinstance(node, ast.Call):
        text = f"{torch_name(site.source)[0]}.matmul({scaled}, {right})"
    what = "Scale before the product, not after it."
    yield Change(site.source, what, (swapped(site.source, parent, text),))


def _factors(site: Site, node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right
    if isinstance(node, ast.Call) and called(node) in ("matmul", "bmm", "mm"):
        first = operand(site.source, node)
        rest = [arg for arg in node.args if arg is not first]
        return (first, rest[0]) if first is not None and rest else None
    return None


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
    source = site.source
    torch, imports = torch_name(source)
    device = (site.origin.inputs[0].device if site.origin.inputs else "cpu").split(":")[0]
    head = f"with {torch}.autocast({source.quote}{device}{source.quote}, enabled=False):"
    before: list[str] = []
    edits: list[Edit] = []
    for at, node in enumerate(_arguments(site)):
        text = f"{in_brackets(source, node)}.float()"
        if any(isinstance(each, ast.Call) for each in ast.walk(node)):
            # It is computed before, as part of it may need autocast.
            name = _free_name(source, at)
            before.append(f"{name} = {text}")
            text = name
        edits.append(swapped(source, node, text))
    edits += _indented(source, statement, [*before, head])
    yield Change(source, "Run it in float32, outside autocast.", tuple(edits), imports)


def _free_name(source: Source, at: int) -> str:
    names = [f"wide{at or ''}", f"wide_input{at or ''}"]
    return next((name for name in names if name not in source.text), f"_wide_{at}")


def _indented(source: Source, statement: ast.stmt, heads: list[str]) -> list[Edit]:
    """The statement one level deeper, below new lines."""
    indent = source.indent(statement)
    step = "\t" if "\t" in indent else "    "
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    at = source.offset(first, 0)
    lines = "".join(f"{indent}{head}{source.newline}" for head in heads)
    edits = [Edit(at, at, lines + step)]
    for line in range(first + 1, last + 1):
        edits.append(Edit(source.offset(line, 0), source.offset(line, 0), step))
    return edits


def _arguments(site: Site) -> list[ast.expr]:
    """The tensors that the operation is given."""
    node = site.node
    if isinstance(node, ast.BinOp):
        given = [node.left, node.right]
    elif not isinstance(node, ast.Call):
        return []
    else:
        given = [arg for arg in node.args[:3] if not isinstance(arg, ast.Starred)]
        is_tensor = is_method(site.source, node) and called(node) in _TENSOR_METHODS
        if is_tensor and isinstance(node.func, ast.Attribute):
            given = [node.func.value, *given[:1]]
    return [each for each in given if constant(each) is None]


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
    """An eps of 1e-8 is 0 in float16, and 1 - 1e-8 is 1 in float32."""
    places: list[ast.AST] = [site.statement]
    places += [value_of(site.source, name) for name in names_in(site.node)]
    edits = {
        Edit(site.source.start(node), site.source.end(node), "1e-4" if site.is_half else "1e-6")
        for place in places
        for node in ast.walk(place)
        if isinstance(node, ast.Constant) and _vanishes(site, node)
    }
    if edits:
        what = f"Use an eps that {site.dtype} can hold."
        yield Change(site.source, what, tuple(sorted(edits, key=lambda edit: edit.start)))


def _vanishes(site: Site, node: ast.Constant) -> bool:
    if not 0 < (constant(node) or 0) < 6e-8:
        return False
    parent = site.source.parents.get(node)
    is_sum = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Sub)
    from_one = is_sum and node is getattr(parent, "right", None)
    return site.is_half or (from_one and site.dtype == "float32")


PRECISION = (scaled_first, float32_operands, float32_island, bfloat16)
