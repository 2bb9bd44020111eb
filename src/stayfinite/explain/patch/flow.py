"""Where a name got its value, and where it is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.source import Scope, Source


def assignment(source: Source, name: ast.Name) -> ast.Assign | None:
    """The plain `name = value` that this use reads; None when it was set in any other way."""
    user, scope = source.statement(name), source.scope(name)
    written = list(_written(source, name.id, scope))
    if not written and scope is not source.tree and name.id not in _parameters(scope):
        written, scope = list(_written(source, name.id, source.tree)), source.tree
        return _plain(source, written[0]) if len(written) == 1 else None
    before = [each for each in written if user is not None and each.lineno < user.lineno]
    last = max(before, key=lambda each: each.lineno, default=None)
    return _plain(source, last) if last is not None else None


def _plain(source: Source, name: ast.Name) -> ast.Assign | None:
    found = source.parents.get(name)
    return found if isinstance(found, ast.Assign) and len(found.targets) == 1 else None


def _written(source: Source, name: str, scope: Scope) -> Iterator[ast.Name]:
    for each in names_in(scope):
        is_set = each.id == name and isinstance(each.ctx, ast.Store)
        if is_set and source.scope(each) is scope:
            yield each


def _parameters(scope: Scope) -> set[str]:
    if isinstance(scope, ast.Module):
        return set()
    given = scope.args
    plain = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {each.arg for each in plain if each is not None}


def value_of(source: Source, node: ast.expr) -> ast.expr:
    """The expression behind a name, through any number of names; the node itself otherwise."""
    for _ in range(8):
        found = assignment(source, node) if isinstance(node, ast.Name) else None
        if found is None:
            return node
        node = found.value
    return node


def readers(source: Source, name: str, *, after: ast.stmt) -> Iterator[ast.Name]:
    """Uses of the name behind a statement in the same function."""
    last = after.end_lineno or after.lineno
    for each in names_in(source.scope(after)):
        if each.id == name and isinstance(each.ctx, ast.Load) and each.lineno > last:
            yield each


def names_in(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def known_at(source: Source, node: ast.expr, statement: ast.stmt) -> bool:
    """Whether all names of the expression have their value already at the statement."""
    scope = source.scope(statement)
    late = {
        each.id
        for each in names_in(scope)
        if isinstance(each.ctx, ast.Store) and each.lineno >= statement.lineno
    }
    return not late & {each.id for each in names_in(node)}
