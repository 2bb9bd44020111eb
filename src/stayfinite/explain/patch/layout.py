"""Lines that a person would not write: too long ones are broken, or get a name of their own."""

from __future__ import annotations

import ast
import re

from stayfinite.explain.patch.edits import Edit
from stayfinite.explain.patch.flow import names_in
from stayfinite.explain.patch.source import Source, quiet

LONGEST_LINE = 100
_OPEN = re.compile(r"\(\s*$")
_CLOSE = re.compile(r"\s*\)")
_PRIMARY = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
_TIGHT = (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript, ast.Compare, ast.BoolOp)
_IS_ARGUMENT = (ast.Call, ast.keyword)
_SIMPLE = (ast.Assign, ast.Return, ast.Expr, ast.AugAssign)
_LATER = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp)


def swapped(source: Source, node: ast.expr, text: str) -> Edit:
    """Write `text` for the expression, in brackets where it needs them and only there."""
    start, end = source.start(node), source.end(node)
    parent = source.parents.get(node)
    is_argument = isinstance(parent, _IS_ARGUMENT) and node is not getattr(parent, "func", None)
    before = _OPEN.search(source.text, max(0, start - 200), start)
    after = _CLOSE.match(source.text, end)
    is_grouped = bool(before and after) and not is_argument and not isinstance(parent, ast.stmt)
    if _is_whole(text):
        if is_grouped and before and after:
            start, end = before.start(), after.end()
    elif isinstance(parent, _TIGHT) and not is_grouped and not _binds(parent, text):
        text = f"({text})"
    return Edit(start, end, text)


def _is_whole(text: str) -> bool:
    """Whether a method could be called on the text as it is."""
    node = _parsed(text)
    return isinstance(node, _PRIMARY) or (node is not None and node.col_offset > 0)


def _binds(parent: ast.AST, text: str) -> bool:
    """Whether the text's operator binds more tightly than the sum that it is part of."""
    node = _parsed(text)
    is_sum = isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Add, ast.Sub))
    products = (ast.Mult, ast.Div, ast.Pow, ast.MatMult)
    return is_sum and isinstance(node, ast.BinOp) and isinstance(node.op, products)


def _parsed(text: str) -> ast.expr | None:
    try:
        with quiet():
            return ast.parse(text.replace("\r", ""), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def placed(source: Source, node: ast.expr, text: str, *, name: str) -> list[Edit]:
    """The text for the expression; where that makes the line too long, by a name before it."""
    edit, statement = swapped(source, node, text), source.statement(node)
    line = source.line(node.lineno)
    longer = len(line) + len(text) - (edit.end - edit.start)
    if longer <= max(source.longest_line, len(line)) or not isinstance(statement, _SIMPLE):
        return [edit]
    if statement.value is node:
        return [edit]
    is_taken = any(each.id == name for each in names_in(source.tree))
    if is_taken or not _is_at_once(source, node) or len(text) <= len(name) + 8:
        return [edit]
    return [insert_before(source, statement, f"{name} = {text}"), swapped(source, node, name)]


def _is_at_once(source: Source, node: ast.expr) -> bool:
    """Whether it is computed once, whenever its statement is."""
    for parent in source.above(node):
        if isinstance(parent, ast.stmt):
            return source.indent(parent) == source.line(parent.lineno)[: parent.col_offset]
        if isinstance(parent, (*_LATER, ast.GeneratorExp)):
            return False
    return False


def insert_before(source: Source, statement: ast.stmt, *lines: str) -> Edit:
    """New lines before the statement, indented like it."""
    indent, end = source.indent(statement), source.newline
    at = source.offset(statement.lineno, 0)
    return Edit(at, at, "".join(broken(f"{indent}{line}", end) + end for line in lines))


def insert_after(source: Source, statement: ast.stmt, *lines: str) -> Edit:
    """New lines after the statement, indented like it."""
    indent, end = source.indent(statement), source.newline
    last = statement.end_lineno or statement.lineno
    at = source.offset(last, len(source.line(last)))
    return Edit(at, at, "".join(end + broken(f"{indent}{line}", end) for line in lines))


def broken(line: str, newline: str, *, longest: int = LONGEST_LINE) -> str:
    """The line, or several where it is too long and sets or returns a call or a sum of things."""
    text = line.lstrip()
    if len(line) <= longest or not text.isascii():
        return line
    try:
        with quiet():
            (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return line
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Call) and value.end_col_offset == len(text):
        given: list[ast.expr | ast.keyword] = [*value.args, *value.keywords]
        parts = [f"{text[each.col_offset : each.end_col_offset]}," for each in given]
        head = text[: value.func.end_col_offset]
    elif isinstance(value, ast.BinOp) and value.end_col_offset == len(text):
        head = text[: value.col_offset]
        at = value.left.end_col_offset or 0
        at += len(text[at:]) - len(text[at:].lstrip(") "))
        parts = [text[value.col_offset : at].rstrip(), text[at:]]
    else:
        return line
    indent = line[: len(line) - len(text)]
    deeper = indent + ("\t" if "\t" in indent else "    ")
    inside = [deeper + part for part in parts]
    return newline.join([f"{indent}{head}(", *inside, f"{indent})"])
