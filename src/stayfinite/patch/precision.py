"""Sixteen bits: what overflows there is computed in float32, or in bfloat16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.patch.code import Code, Spot
from stayfinite.patch.edit import Edit, Rewrite, call_methods, rename, replace, swap
from stayfinite.syntax import PRIMARY, callee, constant, is_call, is_operation, names_in

_TENSOR_METHODS = ("matmul", "mm", "bmm", "mul", "pow", "square", "sum", "mean", "prod", "norm")
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, ast.AnnAssign)
_CAUSES = ("low_precision_overflow", "low_precision_underflow", "loss_scale_collapse")


def _is_precision(spot: Spot) -> bool:
    return spot.is_half and (spot.cause in _CAUSES or spot.op in ("mm", "bmm", "addmm"))


def scale_first(spot: Spot) -> Iterator[Rewrite]:
    """(q @ k) / s to (q / s) @ k, which is smaller on the way."""
    source, node, whole = spot.source, spot.node, spot.source.parents.get(spot.node)
    if not _is_precision(spot) or not isinstance(whole, ast.BinOp) or whole.left is not node:
        return
    factors: list[ast.expr | None] = []
    if is_operation(node, ast.MatMult):
        factors = [node.left, node.right]
    elif is_call(node, "matmul", "bmm", "mm"):
        factors = [source.operand(node), *source.other_arguments(node)][:2]
    pair = [source.in_brackets(each) for each in factors if each is not None]
    if len(pair) < 2 or not isinstance(whole.op, (ast.Div, ast.Mult)):
        return
    sign = "/" if isinstance(whole.op, ast.Div) else "*"
    scaled = f"{pair[0]} {sign} {source.in_brackets(whole.right)}"
    text = f"({scaled}) @ {pair[1]}"
    if isinstance(node, ast.Call):
        text = f"{source.torch[0]}.matmul({scaled}, {pair[1]})"
    what = "Scale before the product, not after it."
    yield Rewrite(source, what, (swap(source, whole, text),))


def float32_operands(spot: Spot) -> Iterator[Rewrite]:
    """a / b to a.float() / b.float(); then with the result in the type that it had."""
    source, node = spot.source, spot.node
    if not _is_precision(spot):
        return
    given: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult):
        given = [node.left, node.right]
    elif isinstance(node, ast.Call) and not spot.fact("inside"):
        given = [inner] if (inner := source.operand(node)) is not None else []
    narrow = [each for each in given if not source.of(each).endswith(".float()")]
    edits = call_methods(source, narrow, ".float()")
    if not edits:
        return
    yield Rewrite(source, "Compute it in float32.", edits)
    value = getattr(spot.statement, "value", None)
    names = [each.id for node in given for each in names_in(node)]
    names = [name for name in names if name not in source.imported]
    if isinstance(value, ast.expr) and names:
        opened, closed = ("", "") if isinstance(value, PRIMARY) else ("(", ")")
        start, end = source.start(value), source.end(value)
        around = Edit(start, start, opened), Edit(end, end, f"{closed}.to({names[0]}.dtype)")
        what = "Compute it in float32, and give the result its type back."
        yield Rewrite(source, what, (*around, *edits))


def float32_statement(spot: Spot) -> Iterator[Rewrite]:
    """The statement without autocast, on float32 inputs."""
    source, statement = spot.source, spot.statement
    if not _is_precision(spot) or not isinstance(statement, _SIMPLE):
        return
    torch, imports = source.torch
    device = (spot.origin.inputs[0].device if spot.origin.inputs else "cpu").split(":")[0]
    before: list[str] = []
    edits: list[Edit] = []
    for at, node in enumerate(_arguments(spot)):
        text = f"{source.in_brackets(node)}.float()"
        if any(isinstance(each, ast.Call) for each in ast.walk(node)):
            # It is computed before, as part of it may need autocast.
            names = [f"wide{at or ''}", f"wide_input{at or ''}"]
            name = next((name for name in names if name not in source.text), f"_wide_{at}")
            before.append(f"{name} = {text}")
            text = name
        edits.append(swap(source, node, text))
    heads = [*before, f"with {torch}.autocast({source.quoted(device)}, enabled=False):"]
    edits += _indent_below(source, statement, heads)
    yield Rewrite(source, "Run it in float32, outside autocast.", tuple(edits), imports)


def _indent_below(source: Code, statement: ast.stmt, heads: list[str]) -> Iterator[Edit]:
    """The statement one level deeper, below new lines."""
    indent, step = source.indent(statement), source.deeper(statement)
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    new = "".join(f"{indent}{head}{source.newline}" for head in heads)
    for line in range(first, last + 1):
        at = source.offset(line, 0)
        yield Edit(at, at, new + step if line == first else step)


def _arguments(spot: Spot) -> list[ast.expr]:
    """The tensors that the operation is given."""
    node = spot.node
    given: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        given = [node.left, node.right]
    elif isinstance(node, ast.Call):
        given = [arg for arg in node.args[:3] if not isinstance(arg, ast.Starred)]
        owner = spot.source.owner_of(node)
        if owner is not None and callee(node) in _TENSOR_METHODS:
            given = [owner, *given[:1]]
    return [each for each in given if constant(each) is None]


def bfloat16(spot: Spot) -> Iterator[Rewrite]:
    """float16 to bfloat16, which has float32's range."""
    if not _is_precision(spot) or spot.cause == "low_precision_underflow":
        return
    for source in spot.sources:
        edits = [
            Edit(source.end(node) - len("float16"), source.end(node), "bfloat16")
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute) and node.attr == "float16"
        ]
        edits += [
            rename(source, call, "half", "bfloat16")
            for call in ast.walk(source.tree)
            if is_call(call, "half") and not call.args
        ]
        if edits:
            yield Rewrite(source, "Use bfloat16, which has the range of float32.", tuple(edits))


def larger_eps(spot: Spot) -> Iterator[Rewrite]:
    """An eps of 1e-8 is 0 in float16, and 1 - 1e-8 is 1 in float32."""
    places: list[ast.AST] = [spot.statement]
    places += [spot.source.value_of(name) for name in names_in(spot.node)]
    edits = {
        replace(spot.source, node, "1e-4" if spot.is_half else "1e-6")
        for place in places
        for node in ast.walk(place)
        if isinstance(node, ast.Constant) and _vanishes(spot, node)
    }
    if edits:
        what = f"Use an eps that {spot.dtype} can hold."
        yield Rewrite(spot.source, what, tuple(sorted(edits, key=lambda edit: edit.start)))


def _vanishes(spot: Spot, node: ast.Constant) -> bool:
    if not 0 < (constant(node) or 0) < 6e-8:
        return False
    parent = spot.source.parents.get(node)
    is_difference = is_operation(parent, ast.Sub)
    from_one = is_difference and node is getattr(parent, "right", None)
    return spot.is_half or (from_one and spot.dtype == "float32")


PRECISION = (scale_first, float32_operands, float32_statement, bfloat16)
