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

from stayfinite import syntax
from stayfinite.records import Incident, Origin, TensorSummary
from stayfinite.syntax import callee, calls_in, names_in
from stayfinite.text import bare_name, node_name

_LINE_END = re.compile(r"\r\n|\r|\n")
_LARGEST = 2_000_000
_BOM = "\ufeff"

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
Written = tuple[str, tuple[str, ...]]  # how a module is written, and the imports that it needs


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that the compiler has about somebody's source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True, eq=False)
class Code:
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
    def expressions(self) -> list[ast.expr]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.expr)]

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

    @cached_property
    def newline(self) -> str:
        found = _LINE_END.search(self.text)
        return found.group() if found else "\n"

    def quoted(self, text: str) -> str:
        """The text in the quotation marks that are more usual in the file."""
        quote = "'" if self.text.count("'") > self.text.count('"') else '"'
        return f"{quote}{text}{quote}"

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

    def one_line(self, node: ast.expr) -> str:
        """The expression as it is written, or on one line where it is written on several."""
        text = self.of(node)
        return text if "\n" not in text else ast.unparse(node)

    def in_brackets(self, node: ast.expr) -> str:
        """The expression so that a method can be called on it."""
        return syntax.in_brackets(node, self.of(node))

    def indent(self, statement: ast.stmt) -> str:
        """The white space that the statement's line begins with."""
        line = self.line(statement.lineno)
        return line[: len(line) - len(line.lstrip())]

    def deeper(self, statement: ast.stmt) -> str:
        """One more level of indentation, as the statement's line has it."""
        return "\t" if "\t" in self.indent(statement) else "    "

    def expression_at(self, start: int, end: int) -> ast.expr | None:
        """The smallest expression that covers this part of the text."""
        covering = [
            node for node in self.expressions if self.start(node) <= start and end <= self.end(node)
        ]
        # Of a node and its only child with the same text, the outer one comes first.
        return min(covering, key=lambda node: self.end(node) - self.start(node), default=None)

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

    def class_around(self, node: ast.AST) -> ast.ClassDef | None:
        return next((n for n in self.above(node) if isinstance(n, ast.ClassDef)), None)

    def has_name(self, name: str) -> bool:
        return any(each.id == name for each in names_in(self.tree))

    def assignment(self, node: ast.expr) -> ast.Assign | None:
        """The plain `name = value` that this use of a name reads; None for anything else."""
        if not isinstance(node, ast.Name):
            return None
        user, scope = self.statement(node), self.scope(node)
        written = self._written(node.id, scope)
        if not written and scope is not self.tree and node.id not in _parameters(scope):
            everywhere = self._written(node.id, self.tree)
            last = everywhere[0] if len(everywhere) == 1 else None
        else:
            before = [each for each in written if user is not None and each.lineno < user.lineno]
            last = max(before, key=lambda each: each.lineno, default=None)
        found = self.parents.get(last) if last is not None else None
        return found if isinstance(found, ast.Assign) and len(found.targets) == 1 else None

    def _written(self, name: str, scope: Scope) -> list[ast.Name]:
        stored = (each for each in names_in(scope) if isinstance(each.ctx, ast.Store))
        return [each for each in stored if each.id == name and self.scope(each) is scope]

    def value_of(self, node: ast.expr) -> ast.expr:
        """The expression behind a name, through any number of names; the node itself otherwise."""
        for _ in range(8):
            found = self.assignment(node)
            if found is None:
                return node
            node = found.value
        return node

    def readers(self, name: str, *, after: ast.stmt) -> Iterator[ast.Name]:
        """Uses of the name behind a statement in the same function."""
        last = after.end_lineno or after.lineno
        for each in names_in(self.scope(after)):
            if each.id == name and isinstance(each.ctx, ast.Load) and each.lineno > last:
                yield each

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

    def name_of(self, module: str) -> str | None:
        """How the file writes a module: "F" for torch.nn.functional; None if it cannot."""
        exact = [name for name, meaning in self.imported.items() if meaning == module]
        if exact:
            return exact[0]
        parent, _, last = module.rpartition(".")
        above = self.name_of(parent) if parent else None
        return f"{above}.{last}" if above and parent != "torch" else None

    @cached_property
    def torch(self) -> Written:
        known = self.name_of("torch")
        return (known, ()) if known else ("torch", ("import torch",))

    @cached_property
    def functional(self) -> Written:
        """The same for torch.nn.functional."""
        known = self.name_of("torch.nn.functional")
        if known:
            return known, ()
        if not self.has_name("F") and "F" not in self.imported:
            return "F", ("import torch.nn.functional as F",)
        torch, needed = self.torch
        return f"{torch}.nn.functional", needed

    def owner_of(self, call: ast.Call) -> ast.expr | None:
        """The x of x.log(); None for torch.log(x) and log(x)."""
        return syntax.owner_of(call, self.imported)

    def operand(self, call: ast.Call) -> ast.expr | None:
        """What the function works on: x of torch.log(x), x.log() and log(input=x)."""
        return syntax.operand(call, self.imported)

    def other_arguments(self, call: ast.Call) -> list[ast.expr]:
        """What is given by position besides the operand."""
        first = self.operand(call)
        return [arg for arg in call.args if arg is not first]

    def dim(self, call: ast.Call) -> ast.expr | None:
        """The dim of a reduction such as x.sum(dim=1) or torch.sum(x, 1)."""
        return next(iter(self.other_arguments(call)), syntax.keyword(call, "dim"))

    def with_name(self, call: ast.Call, name: str) -> str:
        """The call as it is written, of another function: x.sum(1) for x.mean(1)."""
        before = self.of(call.func)
        return before[: -len(callee(call))] + name + self.of(call)[len(before) :]


def _parameters(scope: Scope) -> set[str]:
    if isinstance(scope, ast.Module):
        return set()
    given = scope.args
    plain = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {each.arg for each in plain if each is not None}


def read(path: str) -> Code | None:
    """The file, or None when it is not Python in UTF-8 (or far too long)."""
    try:
        if os.path.getsize(path) > _LARGEST:
            return None
        with open(path, encoding="utf-8", newline="") as file:
            source = Code(os.path.abspath(path), file.read())
        return source if source.tree else None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


@dataclass(frozen=True, eq=False)
class Spot:
    """What rewrites look at: the incident, its expression, and the user's other files."""

    incident: Incident
    origin: Origin
    source: Code
    node: ast.expr | ast.stmt
    """The expression that ran the operation, or its statement where no columns are known."""
    others: tuple[Code, ...] = ()

    @cached_property
    def op(self) -> str:
        """The operation that the expression ran; "" where it is part of a derivative of torch's."""
        node = self.origin.node or ""
        is_torchs = self.is_backward and node[-1:].isdigit()  # a Function of the user's has none
        return "" if is_torchs else bare_name(self.origin.op or "")

    @cached_property
    def autograd(self) -> str:
        """The autograd node without "Backward0"; "" in a forward pass."""
        return node_name(self.origin.node)

    def ran(self, names: Collection[str]) -> bool:
        """Whether it is one of these operations that went wrong, or the derivative of one."""
        return self.op in names or self.autograd.lower() in names

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
    def target(self) -> ast.expr | None:
        """What the statement sets first; None if it is no assignment."""
        return self.statement.targets[0] if isinstance(self.statement, ast.Assign) else None

    @property
    def sources(self) -> tuple[Code, ...]:
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

    def eps(self, single: str, *, half: str, double: str | None = None) -> str:
        """A small number that the type of the operation can hold."""
        if self.is_half:
            return half
        return (double or single) if self.dtype == "float64" else single

    def calls(self, names: Collection[str]) -> list[ast.Call]:
        """Calls of these functions: the expression itself, else in it, else in its statement."""
        if isinstance(self.node, ast.Call) and callee(self.node) in names:
            return [self.node]
        return list(calls_in(self.node, names)) or list(calls_in(self.statement, names))

    def operands(self, names: Collection[str]) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Calls of these functions as in `calls`, each with what it works on."""
        for call in self.calls(names):
            if (inner := self.source.operand(call)) is not None:
                yield call, inner

    def function_nodes(self) -> Iterator[ast.AST]:
        """All that stands in the function around the expression."""
        return ast.walk(self.source.scope(self.node))


def spot_of(incident: Incident, *, folder: str, files: Sequence[str]) -> Spot | None:
    """Where the incident began; None when that is no line of the user's, or it has changed."""
    origin = incident.origin
    if origin is None or origin.file is None or origin.line is None:
        return None
    path = os.path.realpath(os.path.join(folder, origin.file))
    allowed = [os.path.realpath(file) for file in files]
    # A line of an installed package is not the user's to change, wherever the environment is.
    if "-packages" + os.sep in path:
        return None
    inside = path.startswith(os.path.realpath(folder) + os.sep)
    source = read(path) if inside or path in allowed else None
    line, last = origin.line, origin.end_line or origin.line
    if source is None or source.line(line).strip() != origin.code.strip():
        return None
    node: ast.expr | ast.stmt | None = None
    if origin.columns is not None and 1 <= line <= last <= source.line_count:
        start, end = origin.columns
        node = source.expression_at(source.offset(line, start), source.offset(last, end))
    node = node or source.statement_at(line)
    others = tuple(found for file in allowed if file != path and (found := read(file)))
    return Spot(incident, origin, source, node, others) if node is not None else None
