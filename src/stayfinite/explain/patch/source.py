"""A source file as text and as syntax tree, and the way between the two."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

_LINE_END = re.compile(r"\r\n|\r|\n")
_LARGEST = 2_000_000
_BOM = "\ufeff"

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that the compiler has about somebody's source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True, eq=False)
class Source:
    """One file of the user's."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        with quiet():
            return ast.parse(self.text.removeprefix(_BOM))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def _starts(self) -> list[int]:
        """Where each line begins."""
        first = len(_BOM) if self.text.startswith(_BOM) else 0
        return [first, *(found.end() for found in _LINE_END.finditer(self.text))]

    @cached_property
    def _lines(self) -> list[str]:
        return _LINE_END.split(self.text.removeprefix(_BOM))

    def line(self, number: int) -> str:
        """The line without its end; "" when there is none of that number."""
        return self._lines[number - 1] if 1 <= number <= len(self._lines) else ""

    @cached_property
    def longest_line(self) -> int:
        """How long a line may be in this file."""
        return min(120, max(100, *map(len, self._lines)))

    @property
    def line_count(self) -> int:
        return len(self._starts)

    def offset(self, line: int, column: int) -> int:
        """Where in the text that character of that line is."""
        return self._starts[line - 1] + column

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._at(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self._at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _at(self, line: int, column: int) -> int:
        text = self.line(line)
        if not text.isascii():  # the tree counts UTF-8 bytes
            column = len(text.encode()[:column].decode(errors="ignore"))
        return self.offset(line, column)

    def of(self, node: ast.expr | ast.stmt) -> str:
        """The node as it is written."""
        return self.text[self.start(node) : self.end(node)]

    def expression_at(self, start: int, end: int) -> ast.expr | None:
        """The smallest expression that covers this part of the text."""
        covering = [
            node for node in self.expressions if self.start(node) <= start and end <= self.end(node)
        ]
        # Of a node and its only child with the same text, the outer one comes first.
        return min(covering, key=lambda node: self.end(node) - self.start(node), default=None)

    @cached_property
    def expressions(self) -> list[ast.expr]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.expr)]

    def statement_at(self, line: int) -> ast.stmt | None:
        """The innermost statement that covers the line."""
        covering = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        return min(covering, key=lambda n: (n.end_lineno or 0) - n.lineno, default=None)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The node's parents, from the innermost outwards."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The statement that the node belongs to, or is."""
        return next((n for n in (node, *self.above(node)) if isinstance(n, ast.stmt)), None)

    def scope(self, node: ast.AST) -> Scope:
        """The innermost function around the node, or the module."""
        return next((n for n in self.above(node) if isinstance(n, Scope)), self.tree)

    def indent(self, statement: ast.stmt) -> str:
        """The white space that the statement's line begins with."""
        line = self.line(statement.lineno)
        return line[: len(line) - len(line.lstrip())]

    @cached_property
    def imported(self) -> dict[str, str]:
        """What each imported name stands for: {"F": "torch.nn.functional"}."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found

    @cached_property
    def newline(self) -> str:
        found = _LINE_END.search(self.text)
        return found.group() if found else "\n"

    @cached_property
    def quote(self) -> str:
        """The quotation mark that is more usual in the file."""
        return "'" if self.text.count("'") > self.text.count('"') else '"'


def read(path: str) -> Source | None:
    """The file, or None when it is not Python in UTF-8 (or far too long)."""
    try:
        if os.path.getsize(path) > _LARGEST:
            return None
        with open(path, encoding="utf-8", newline="") as file:
            source = Source(os.path.abspath(path), file.read())
        return source if source.tree else None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
