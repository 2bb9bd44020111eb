"""Edits of a text, and what they are for."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from stayfinite.explain.patch.edits import Edit, edited
from stayfinite.explain.patch.imports import import_edit
from stayfinite.explain.patch.layout import broken
from stayfinite.explain.patch.patch import Patch, lines_of
from stayfinite.explain.patch.source import Source, quiet


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
        after = _laid_out(self.source, edited(self.source.text, edits))
        if after == self.source.text or not _parses(after):
            return None
        return Patch(file=self.source.path, before=self.source.text, after=after, what=self.what)


def replace(source: Source, node: ast.expr | ast.stmt, text: str) -> Edit:
    """Write `text` where the node stands."""
    return Edit(source.start(node), source.end(node), text)


def _imports(source: Source, lines: Iterable[str]) -> Iterable[Edit]:
    for line in lines:
        if (at := import_edit(source, line)) is not None:
            yield Edit(at, at, line + source.newline)


def _laid_out(source: Source, after: str) -> str:
    """The text with new lines broken where they are too long, as far as it stays Python."""
    known = set(lines_of(source.text))
    end, longest = source.newline, source.longest_line
    lines = [line if line in known else _broken(line, end, longest) for line in lines_of(after)]
    text = "".join(lines)
    return text if _parses(text) else after


def _broken(line: str, end: str, longest: int) -> str:
    text = line.removesuffix(end)
    return broken(text, end, longest=longest) + line[len(text) :]


def _parses(text: str) -> bool:
    try:
        with quiet():
            compile(text.removeprefix("\ufeff"), "<patch>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True
