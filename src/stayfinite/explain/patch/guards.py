"""Small pieces of text around an expression, which most rewrites are made of."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.edits import Edit
from stayfinite.explain.patch.flow import names_in, readers
from stayfinite.explain.patch.layout import insert_before, placed
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import in_brackets


def eps(site: Site, *, single: str, half: str, double: str | None = None) -> str:
    """A small number that the type of the operation can hold."""
    if site.dtype == "float16":
        return half
    return (double or single) if site.dtype == "float64" else single


def followed(site: Site, node: ast.expr, suffix: str, what: str) -> Change:
    """The expression with a method called on it: x to x.clamp_min(1e-8)."""
    return rewritten(site, node, f"{in_brackets(site.source, node)}{suffix}", what)


def rewritten(site: Site, node: ast.expr, text: str, what: str, *imports: str) -> Change:
    """Other text in place of the expression."""
    name = f"safe_{node.id}" if isinstance(node, ast.Name) else "safe"
    return Change(site.source, what, tuple(placed(site.source, node, text, name=name)), imports)


def for_the_rest(site: Site, node: ast.expr, suffix: str) -> Iterator[Change]:
    """A name that is used again: guarded once, before the statement, for all uses from there."""
    if not isinstance(node, ast.Name):
        return
    here = [each for each in names_in(site.statement) if each.id == node.id]
    if len(here) > 1 or any(readers(site.source, node.id, after=site.statement)):
        edit = insert_before(site.source, site.statement, f"{node.id} = {node.id}{suffix}")
        yield Change(site.source, f"Keep {node.id} away from 0 for all that follows.", (edit,))


def with_keyword(source: Source, call: ast.Call, name: str, value: str) -> Edit:
    """The call with a keyword argument set to the value."""
    for item in call.keywords:
        if item.arg == name:
            return Edit(source.start(item.value), source.end(item.value), value)
    inside = source.text[source.end(call.func) : source.end(call) - 1].rstrip()
    at = source.end(call.func) + len(inside)
    comma = "" if inside.endswith("(") else " " if inside.endswith(",") else ", "
    return Edit(at, at, f"{comma}{name}={value}")
