"""Edits of a text, and what they are for."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from stayfinite.explain.patch.edits import Edit, edited
from stayfinite.explain.patch.imports import import_edit
from stayfinite.explain.patch.patch import Patch
from stayfinite.explain.patch.source import Source


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


def replace(source: Source, node: ast.expr | ast.stmt, text: str) -> Edit:
    """Write `text` where the node stands."""
    return Edit(source.start(node), source.end(node), text)


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
