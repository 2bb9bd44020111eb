"""Python syntax of a user's line: calls, what they work on, numbers and brackets."""

from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterator
from typing import TypeGuard

# A method can be called on these as they are written.
PRIMARY = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def callee(node: ast.AST) -> str:
    """The bare name of the function that is called: "log" of torch.log(x) and x.log()."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def is_call(node: ast.AST | None, *names: str) -> TypeGuard[ast.Call]:
    """Whether it calls a function of one of these names."""
    return isinstance(node, ast.Call) and callee(node) in names


def calls_in(node: ast.AST, names: Collection[str]) -> Iterator[ast.Call]:
    """Calls of functions with these names, outermost first."""
    for each in ast.walk(node):
        if is_call(each, *names):
            yield each


def names_in(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def owner_of(call: ast.Call, modules: Container[str]) -> ast.expr | None:
    """The x of x.log(); None for torch.log(x), where torch is one of the modules, and log(x)."""
    if not isinstance(call.func, ast.Attribute):
        return None
    first: ast.expr = call.func.value
    while isinstance(first, ast.Attribute):
        first = first.value
    return None if isinstance(first, ast.Name) and first.id in modules else call.func.value


def operand(call: ast.Call, modules: Container[str]) -> ast.expr | None:
    """What the function works on: x of torch.log(x), x.log() and log(input=x)."""
    owner = owner_of(call, modules)
    if owner is not None:
        return owner
    # Also the x of nn.Softmax(dim=1)(x).
    if call.args and not isinstance(call.args[0], ast.Starred):
        return call.args[0]
    return keyword(call, "input")


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((item.value for item in call.keywords if item.arg == name), None)


def is_operation(node: ast.AST | None, *operators: type[ast.operator]) -> TypeGuard[ast.BinOp]:
    """Whether it is a + b and its like, with one of these operators."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, operators)


def constant(node: ast.expr | None) -> float | None:
    """The number that is written there, with a sign if it has one."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = constant(node.operand)
        return None if value is None else -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    return None


def in_brackets(node: ast.expr, text: str) -> str:
    """The text of the expression so that a method can be called on it."""
    return text if isinstance(node, PRIMARY) else f"({text})"
