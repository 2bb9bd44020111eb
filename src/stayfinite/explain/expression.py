"""The operands of the user's own expression, for a fix that names it."""

from __future__ import annotations

import ast


def argument(expression: str | None, name: str = "") -> str | None:
    """What the call works on: x of `torch.log(x)` and of `x.log()`; None if it is no call.

    With a name, only a call of that function counts, wherever it stands in the expression.
    """
    for node in _nodes(expression):
        if isinstance(node, ast.Call) and (not name or _called(node) == name):
            if isinstance(node.func, ast.Attribute) and not _is_library(node.func.value):
                return _in_brackets(node.func.value)
            if node.args:
                return _in_brackets(node.args[0])
    return None


def operands(expression: str | None, operator: type[ast.operator]) -> tuple[str, str] | None:
    """Left and right of the outermost such operator."""
    for node in _nodes(expression):
        if isinstance(node, ast.BinOp) and isinstance(node.op, operator):
            return ast.unparse(node.left), _in_brackets(node.right)
    return None


def _nodes(expression: str | None) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse((expression or "").strip(), mode="eval")))
    except (SyntaxError, ValueError):
        return []


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_library(node: ast.expr) -> bool:
    return ast.unparse(node).split(".")[0] in ("torch", "F", "nn", "functional", "np", "math")


def _in_brackets(node: ast.expr) -> str:
    text = ast.unparse(node)
    simple = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    return text if simple else f"({text})"
