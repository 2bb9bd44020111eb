"""Questions about expressions: what is called, on what, and how to write more around it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from stayfinite.explain.patch.source import Source

_PRIMARY = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def called(node: ast.AST) -> str:
    """The bare name of the function that is called: "log" of torch.log(x) and x.log()."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def is_method(source: Source, call: ast.Call) -> bool:
    """Whether it is called on a value, x.log(), and not on a module, torch.log(x)."""
    if not isinstance(call.func, ast.Attribute):
        return False
    first: ast.expr = call.func.value
    while isinstance(first, ast.Attribute):
        first = first.value
    return not (isinstance(first, ast.Name) and first.id in source.imported)


def operand(source: Source, call: ast.Call) -> ast.expr | None:
    """What the function works on: x of torch.log(x), x.log() and log(input=x)."""
    if is_method(source, call) and isinstance(call.func, ast.Attribute):
        return call.func.value
    # Also the x of nn.Softmax(dim=1)(x).
    if call.args and not isinstance(call.args[0], ast.Starred):
        return call.args[0]
    return keyword(call, "input")


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((item.value for item in call.keywords if item.arg == name), None)


def calls_in(node: ast.AST, names: Collection[str]) -> Iterator[ast.Call]:
    """Calls of functions with these names, outermost first."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and called(each) in names:
            yield each


def in_brackets(source: Source, node: ast.expr) -> str:
    """The expression so that a method can be called on it."""
    text = source.of(node)
    return text if isinstance(node, _PRIMARY) else f"({text})"


def constant(node: ast.expr | None) -> float | None:
    """The number that is written there, with a sign if it has one."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = constant(node.operand)
        return None if value is None else -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    return None
