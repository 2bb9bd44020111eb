"""Small pieces of text around an expression, which most rewrites are made of."""

from __future__ import annotations

import ast
import re

from stayfinite.explain.patch.change import Change, Edit
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import in_brackets

_OPEN = re.compile(r"\(\s*$")
_CLOSE = re.compile(r"\s*\)")
_IS_ARGUMENT = (ast.Call, ast.keyword)


def eps(site: Site, *, single: str, half: str, double: str | None = None) -> str:
    """A small number that the type of the operation can hold."""
    if site.dtype == "float16":
        return half
    return (double or single) if site.dtype == "float64" else single


def swapped(source: Source, node: ast.expr, text: str) -> Edit:
    """Write `text` for the expression, and for the brackets that only group it."""
    start, end = source.start(node), source.end(node)
    parent = source.parents.get(node)
    before, after = _OPEN.search(source.text, 0, start), _CLOSE.match(source.text, end)
    is_grouped = not isinstance(parent, _IS_ARGUMENT) or node is getattr(parent, "func", None)
    if is_grouped and not isinstance(parent, ast.stmt) and before and after:
        start, end = before.start(), after.end()
    return Edit(start, end, text)


def followed(site: Site, node: ast.expr, suffix: str, what: str) -> Change:
    """The expression with a method called on it: x to x.clamp_min(1e-8)."""
    text = f"{in_brackets(site.source, node)}{suffix}"
    return Change(site.source, what, (swapped(site.source, node, text),))


def rewritten(site: Site, node: ast.expr, text: str, what: str, *imports: str) -> Change:
    """Other text in place of the expression."""
    return Change(site.source, what, (swapped(site.source, node, text),), imports)


def with_keyword(source: Source, call: ast.Call, name: str, value: str) -> Edit:
    """The call with a keyword argument set to the value."""
    for item in call.keywords:
        if item.arg == name:
            return Edit(source.start(item.value), source.end(item.value), value)
    inside = source.text[source.end(call.func) : source.end(call) - 1].rstrip()
    at = source.end(call.func) + len(inside)
    comma = "" if inside.endswith("(") else " " if inside.endswith(",") else ", "
    return Edit(at, at, f"{comma}{name}={value}")
