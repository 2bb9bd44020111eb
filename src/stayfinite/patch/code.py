"""A source file as text and as syntax tree, and the place of an incident in it."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stayfinite.records import Incident, Origin, TensorSummary
from stayfinite.text import bare_name

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


_PRIMARY = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def called(node: ast.AST) -> str:
    """The bare name of the function that is called: "log" of torch.log(x) and x.log()."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def is_method(source: Source, call: ast.Call) -> bool:
    """Whether it is called on a value, x.log(), and not on a module, torch.log(x)."""
    if not isinstance(call.func, ast.Attribute):
        return False
    first: ast.expr = call.func.value
    while isinstance(first, ast.Attribute):
        first = first.value
    return not (isinstance(first, ast.Name) and first.id in source.imported)


def operand(source: Source, call: ast.Call) -> ast.expr | None:
    """What the function works on: x of torch.log(x), x.log() and log(input=x)."""
    if is_method(source, call) and isinstance(call.func, ast.Attribute):
        return call.func.value
    # Also the x of nn.Softmax(dim=1)(x).
    if call.args and not isinstance(call.args[0], ast.Starred):
        return call.args[0]
    return keyword(call, "input")


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((item.value for item in call.keywords if item.arg == name), None)


def calls_in(node: ast.AST, names: Collection[str]) -> Iterator[ast.Call]:
    """Calls of functions with these names, outermost first."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and called(each) in names:
            yield each


def in_brackets(source: Source, node: ast.expr) -> str:
    """The expression so that a method can be called on it."""
    text = source.of(node)
    return text if isinstance(node, _PRIMARY) else f"({text})"


def constant(node: ast.expr | None) -> float | None:
    """The number that is written there, with a sign if it has one."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = constant(node.operand)
        return None if value is None else -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    return None


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


FUNCTIONAL = "import torch.nn.functional as F"
TORCH = "import torch"


def name_of(source: Source, target: str) -> str | None:
    """How the file writes the module `target`: "F" for torch.nn.functional; None if it cannot."""
    exact = [name for name, meaning in source.imported.items() if meaning == target]
    if exact:
        return exact[0]
    parent, _, last = target.rpartition(".")
    above = name_of(source, parent) if parent else None
    return f"{above}.{last}" if above and parent != "torch" else None


def functional(source: Source) -> tuple[str, tuple[str, ...]]:
    """How to write torch.nn.functional here, and the import that it needs."""
    known = name_of(source, "torch.nn.functional")
    if known:
        return known, ()
    names = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    if "F" not in names | set(source.imported):
        return "F", (FUNCTIONAL,)
    torch, needed = torch_name(source)
    return f"{torch}.nn.functional", needed


def torch_name(source: Source) -> tuple[str, tuple[str, ...]]:
    """How to write torch here, and the import that it needs."""
    known = name_of(source, "torch")
    return (known, ()) if known else ("torch", (TORCH,))


def import_edit(source: Source, line: str) -> int | None:
    """Where to insert the import line: after those of torch; None if it is there already."""
    (wanted,) = ast.parse(line).body
    body = source.tree.body
    if any(ast.dump(node) == ast.dump(wanted) for node in body):
        return None
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    torch_ones = [node for node in imports if ast.unparse(node).split()[1].startswith("torch")]
    after = (torch_ones or imports)[-1:] or _docstring(body)
    if not after:
        return source.offset(1, 0)
    last = after[0].end_lineno or after[0].lineno
    return source.offset(last + 1, 0) if last < source.line_count else None


def _docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[:1]
    is_text = first and isinstance(first[0], ast.Expr) and isinstance(first[0].value, ast.Constant)
    return first if is_text else []


@dataclass(frozen=True, eq=False)
class Site:
    """What rewrites look at: the incident, its expression, and the user's other files."""

    incident: Incident
    origin: Origin
    source: Source
    node: ast.expr | ast.stmt
    """The expression that ran the operation, or its statement where no columns are known."""
    others: tuple[Source, ...] = ()

    @cached_property
    def op(self) -> str:
        """The operation that the expression ran; "" where it is part of a derivative of torch's."""
        node = self.origin.node or ""
        is_torchs = self.is_backward and node[-1:].isdigit()  # a Function of the user's has none
        return "" if is_torchs else bare_name(self.origin.op or "")

    @cached_property
    def autograd(self) -> str:
        """The autograd node without "Backward0"; "" in a forward pass."""
        return (self.origin.node or "").rstrip("0123456789").removesuffix("Backward")

    @property
    def is_backward(self) -> bool:
        return self.origin.phase == "backward"

    @property
    def cause(self) -> str:
        return self.incident.diagnosis.cause if self.incident.diagnosis else "unknown"

    @property
    def statement(self) -> ast.stmt:
        return self.source.statement(self.node) or self.source.tree.body[0]

    @property
    def sources(self) -> tuple[Source, ...]:
        """All files of the user's, that of the operation first."""
        return (self.source, *self.others)

    def fact(self, name: str, default: Any = None) -> Any:
        return self.origin.facts.get(name, default)

    def input(self, name: str) -> TensorSummary | None:
        return next((item for item in self.origin.inputs if item.name == name), None)

    @property
    def dtype(self) -> str:
        """The type that the operation computed in; "float32" when nobody knows."""
        summaries = (*self.origin.outputs, *self.origin.inputs)
        return next((s.dtype for s in summaries if "float" in s.dtype), "float32")

    @property
    def is_half(self) -> bool:
        return self.dtype == "float16"

    def calls(self, names: Collection[str]) -> list[ast.Call]:
        """Calls of these functions: the expression itself, else in it, else in its statement."""
        if isinstance(self.node, ast.Call) and called(self.node) in names:
            return [self.node]
        return list(calls_in(self.node, names)) or list(calls_in(self.statement, names))


def site_of(incident: Incident, *, folder: str, files: Sequence[str]) -> Site | None:
    """Where the incident began; None when that is no line of the user's, or it has changed."""
    origin = incident.origin
    if origin is None or origin.file is None or origin.line is None:
        return None
    path = os.path.realpath(os.path.join(folder, origin.file))
    allowed = [os.path.realpath(file) for file in files]
    inside = path.startswith(os.path.realpath(folder) + os.sep) and "-packages" not in path
    source = read(path) if inside or path in allowed else None
    if source is None or source.line(origin.line).strip() != origin.code.strip():
        return None
    node = _node(source, origin)
    others = tuple(found for file in allowed if file != path and (found := read(file)))
    return Site(incident, origin, source, node, others) if node is not None else None


def _node(source: Source, origin: Origin) -> ast.expr | ast.stmt | None:
    line, last = origin.line or 0, origin.end_line or origin.line or 0
    found: ast.expr | ast.stmt | None = None
    if origin.columns is not None and 1 <= line <= last <= source.line_count:
        start, end = origin.columns
        found = source.expression_at(source.offset(line, start), source.offset(last, end))
    return found or source.statement_at(line)
