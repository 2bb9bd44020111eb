"""The place of an incident in the user's source."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stayfinite.explain.clue import bare_name
from stayfinite.explain.patch.source import Source, read
from stayfinite.explain.patch.syntax import called, calls_in
from stayfinite.records import Incident, Origin, TensorSummary


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
