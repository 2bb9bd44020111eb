"""Edits of a text, and what they are for."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from stayfinite.explain.patch.imports import import_edit
from stayfinite.explain.patch.patch import Patch
from stayfinite.explain.patch.source import Source

LONGEST_LINE = 100


@dataclass(frozen=True)
class Edit:
    """Put `text` in place of what is between the two offsets."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Change:
    """Edits of one file that belong together."""

    source: Source
    what: str
    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()

    def patch(self) -> Patch | None:
        """The patch that it makes; None when nothing changes or the result is no Python."""
        edits = [*self.edits, *_imports(self.source, self.imports)]
        after = edited(self.source.text, edits)
        if after == self.source.text or not _parses(after):
            return None
        return Patch(file=self.source.path, before=self.source.text, after=after, what=self.what)


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made; of edits that overlap, the later ones are left out."""
    pieces, done = [], 0
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start < done:
            continue
        pieces += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*pieces, text[done:]])


def replace(source: Source, node: ast.expr | ast.stmt, text: str) -> Edit:
    """Write `text` where the node stands."""
    return Edit(source.start(node), source.end(node), text)


def insert_before(source: Source, statement: ast.stmt, *lines: str) -> Edit:
    """New lines before the statement, indented like it."""
    indent, end = source.indent(statement), source.newline
    at = source.offset(statement.lineno, 0)
    return Edit(at, at, "".join(f"{indent}{line}{end}" for line in lines))


def insert_after(source: Source, statement: ast.stmt, *lines: str) -> Edit:
    """New lines after the statement, indented like it."""
    indent, end = source.indent(statement), source.newline
    last = statement.end_lineno or statement.lineno
    at = source.offset(last, len(source.line(last)))
    return Edit(at, at, "".join(f"{end}{indent}{line}" for line in lines))


def _imports(source: Source, lines: Iterable[str]) -> Iterable[Edit]:
    for line in lines:
        if (at := import_edit(source, line)) is not None:
            yield Edit(at, at, line + source.newline)


def _parses(text: str) -> bool:
    try:
        compile(text.removeprefix("\ufeff"), "<patch>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True
