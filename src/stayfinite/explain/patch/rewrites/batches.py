"""Data that is bad: batches that are left out, and inputs that are bounded."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.edits import Edit
from stayfinite.explain.patch.flow import names_in, value_of
from stayfinite.explain.patch.guards import rewritten
from stayfinite.explain.patch.imports import torch_name
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import called, calls_in

_MOVES = ("to", "cuda", "float", "long", "view", "reshape", "unsqueeze", "from_numpy", "next")


def bad_batch(site: Site) -> Iterator[Change]:
    """Leave out a batch that is not finite."""
    if site.cause not in ("bad_input_data", "bad_label") or site.origin.phase != "data":
        return
    if any("distributed" in each for each in site.source.imported.values()):
        return  # a rank that leaves out a step lets the others wait for it
    found = _in_loop(site)
    if found is None:
        return
    statement, names = found
    torch, imports = torch_name(site.source)
    tests = [_finite(site.source, text, torch) for text in names]
    if tests:
        test = f"not {tests[0]}" if len(tests) == 1 else f"not ({' and '.join(tests)})"
        indent, end = site.source.indent(statement), site.source.newline
        deeper = "\t" if "\t" in indent else "    "
        at = site.source.offset(statement.lineno, 0)
        text = f"{indent}if {test}:{end}{indent}{deeper}continue{end}"
        what = "Leave out a batch that is not finite; better, repair it where it is read."
        yield Change(site.source, what, (Edit(at, at, text),), imports)


def _in_loop(site: Site) -> tuple[ast.stmt, list[str]] | None:
    """The statement of a loop that uses the batch, and the batch's names there."""
    source = site.source
    if _loop_around(source, site.statement) is not None:
        return site.statement, list(_tensors(site))
    scope = source.scope(site.node)
    name = getattr(scope, "name", None)
    for call in calls_in(source.tree, [name] if name else []):
        statement = source.statement(call)
        loop = _loop_around(source, statement) if statement is not None else None
        if statement is not None and isinstance(loop, ast.For):
            bound = {each.id for each in names_in(loop.target)}
            given = [source.of(arg) for arg in call.args if {n.id for n in names_in(arg)} & bound]
            return statement, given
    return None


def _loop_around(source: Source, statement: ast.stmt) -> ast.For | ast.While | None:
    """The loop that a `continue` before the statement would belong to."""
    if isinstance(statement, (ast.For, ast.While)):
        return None
    kinds = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)
    found = next((each for each in source.above(statement) if isinstance(each, kinds)), None)
    return found if isinstance(found, (ast.For, ast.While)) else None


def _finite(source: Source, text: str, torch: str) -> str:
    """The test of one argument, which may be a dict or a tuple of tensors."""
    keys = [
        node.slice.value
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and source.of(node.value) == text
    ]
    if not any(isinstance(key, str) for key in keys):
        return f"{torch}.isfinite({text}).all()"
    return f"all({torch}.isfinite(x).all() for x in {text}.values())"


def _tensors(site: Site) -> Iterator[str]:
    """What goes into the calls of the expression and is not their result: names, parts of them."""
    seen = set()
    for node in ast.walk(site.node):
        for arg in node.args if isinstance(node, ast.Call) else ():
            text, value = site.source.of(arg), value_of(site.source, arg)
            is_plain = isinstance(arg, (ast.Name, ast.Subscript, ast.Attribute))
            is_result = isinstance(value, ast.Call) and called(value) not in _MOVES
            if is_plain and not is_result and text not in seen and not text.startswith("self."):
                seen.add(text)
                yield text


def wide_input(site: Site) -> Iterator[Change]:
    """An input that does not fit into float16 is bounded before it is cast."""
    if site.cause not in ("bn_stats_poisoned", "low_precision_overflow") or site.op != "to_copy":
        return
    if isinstance(site.node, ast.Call) and site.node.args:
        first = site.node.args[0]
        text = f"{site.source.of(first)}.clamp(-1e4, 1e4)"
        what = "Bound the input before it is cast to float16."
        yield rewritten(site, first, text, what)


BATCHES = (bad_batch, wide_input)
