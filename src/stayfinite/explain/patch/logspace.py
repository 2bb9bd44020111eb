"""The logarithm of an expression, written without leaving log space."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from stayfinite.explain.patch.flow import assignment
from stayfinite.explain.patch.imports import functional, torch_name
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import (
    called,
    constant,
    in_brackets,
    is_method,
    keyword,
    operand,
)

_SELECTIONS = frozenset(
    ["gather", "squeeze", "unsqueeze", "index_select", "reshape", "view", "flatten", "transpose"]
    + ["permute", "select", "expand", "take_along_dim", "masked_select", "contiguous", "float"]
)
_CLAMPS = ("clamp", "clamp_min", "clip")
_EPS = re.compile(r"(^|[._])(eps|epsilon|tiny|EPS|EPSILON)$")
_LARGEST_EPS = 1e-2
_DEPTH = 12


@dataclass
class LogText:
    """Writes log(x) for expressions of one file; `gains` counts what it need not exponentiate."""

    source: Source
    gains: int = 0
    inlined: list[ast.Assign] = field(default_factory=list)
    seen: list[ast.expr] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)

    def of(self, node: ast.expr, depth: int = 0) -> tuple[str, bool]:
        """The text, and whether a method can be called on it as it is."""
        self.seen.append(node)
        if depth < _DEPTH:
            for write in (self._name, self._call, self._operator, self._index):
                if (found := write(node, depth + 1)) is not None:
                    return found
        return self._leaf(node)

    def _leaf(self, node: ast.expr) -> tuple[str, bool]:
        text = one_line(self.source, node)
        if _is_number(node):
            return f"math.log({text})", True
        return f"{self._torch()}.log({text})", True

    def _name(self, node: ast.expr, depth: int) -> tuple[str, bool] | None:
        found = assignment(self.source, node) if isinstance(node, ast.Name) else None
        if found is None:
            return None
        before = self.gains
        kept = len(self.inlined)
        text = self.of(found.value, depth)
        if self.gains == before:
            del self.inlined[kept:]
            return None
        self.inlined.append(found)
        return text

    def _call(self, node: ast.expr, depth: int) -> tuple[str, bool] | None:
        if not isinstance(node, ast.Call):
            return None
        inner, name = operand(self.source, node), called(node)
        if inner is None:
            return None
        if called(node.func) == "Softmax":
            self.gains += 1
            made = self.source.of(node.func).replace("Softmax", "LogSoftmax", 1)
            return f"{made}({one_line(self.source, inner)})", True
        if name == "exp":
            self.gains += 1
            return one_line(self.source, inner), isinstance(inner, (ast.Name, ast.Attribute))
        if name == "softmax":
            self.gains += 1
            return _renamed(self.source, node, "log_softmax"), True
        if name == "sigmoid":
            self.gains += 1
            return f"{self._functional()}.logsigmoid({one_line(self.source, inner)})", True
        if name in ("sum", "mean"):
            return self._sum(node, inner, depth)
        if name in _SELECTIONS and is_method(self.source, node):
            return self._selected(node, inner, depth)
        return self._if_gained(inner, depth) if name in _CLAMPS else None

    def _sum(self, node: ast.Call, inner: ast.expr, depth: int) -> tuple[str, bool] | None:
        rest = [arg for arg in node.args if arg is not inner]
        dim = rest[0] if rest else keyword(node, "dim")
        text = self._if_gained(inner, depth)
        if text is None or dim is None:
            return None
        keep = keyword(node, "keepdim")
        more = f", keepdim={self.source.of(keep)}" if keep is not None else ""
        summed = f"{self._torch()}.logsumexp({text[0]}, dim={self.source.of(dim)}{more})"
        if called(node) == "sum":
            return summed, True
        count = f"{_bracketed(text)}.shape[{self.source.of(dim)}]"
        return f"{summed} - math.log({count})", False

    def _selected(self, node: ast.Call, inner: ast.expr, depth: int) -> tuple[str, bool] | None:
        text = self._if_gained(inner, depth)
        rest = self.source.text[self.source.end(inner) : self.source.end(node)].lstrip(") \r\n\t")
        return (f"{_bracketed(text)}{rest}", True) if text is not None else None

    def _index(self, node: ast.expr, depth: int) -> tuple[str, bool] | None:
        if not isinstance(node, ast.Subscript):
            return None
        text = self._if_gained(node.value, depth)
        rest = f"[{self.source.of(node.slice)}]"
        return (f"{_bracketed(text)}{rest}", True) if text is not None else None

    def _operator(self, node: ast.expr, depth: int) -> tuple[str, bool] | None:
        if not isinstance(node, ast.BinOp):
            return None
        if isinstance(node.op, (ast.Mult, ast.Div)):
            return self._product(node, depth)
        if isinstance(node.op, ast.Pow):
            text = self._if_gained(node.left, depth)
            power = in_brackets(self.source, node.right)
            return (f"{power} * {_bracketed(text)}", False) if text else None
        if isinstance(node.op, (ast.Add, ast.Sub)):
            return self._sum_of_two(node, depth)
        return None

    def _product(self, node: ast.BinOp, depth: int) -> tuple[str, bool] | None:
        before = self.gains
        left, right = self.of(node.left, depth), self.of(node.right, depth)
        if self.gains == before:
            return None
        if isinstance(node.op, ast.Mult):
            return _added(left[0], right[0]), False
        return f"{left[0]} - {_bracketed(right)}", False

    def _sum_of_two(self, node: ast.BinOp, depth: int) -> tuple[str, bool] | None:
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if constant(one) == 1 and (text := self._one_and(node, other)) is not None:
                return text
            if _is_eps(one) and (one is node.right or isinstance(node.op, ast.Add)):
                return self._if_gained(other, depth)
        return None

    def _one_and(self, node: ast.BinOp, other: ast.expr) -> tuple[str, bool] | None:
        """log(1 + exp(x)), log(1 - sigmoid(x))."""
        found = assignment(self.source, other) if isinstance(other, ast.Name) else None
        call = found.value if found is not None else other
        inner = operand(self.source, call) if isinstance(call, ast.Call) else None
        if inner is None:
            return None
        self.seen.append(call)
        text = one_line(self.source, inner)
        if called(call) == "exp" and isinstance(node.op, ast.Add):
            written = f"softplus({text})"
        elif called(call) == "sigmoid" and isinstance(node.op, ast.Sub) and other is node.right:
            minus = text if isinstance(inner, (ast.Name, ast.Attribute, ast.Call)) else f"({text})"
            written = f"logsigmoid(-{minus})"
        else:
            return None
        self.gains += 1
        if found is not None:
            self.inlined.append(found)
        return f"{self._functional()}.{written}", True

    def _if_gained(self, node: ast.expr, depth: int) -> tuple[str, bool] | None:
        before = self.gains
        text = self.of(node, depth)
        return text if self.gains > before else None

    def _torch(self) -> str:
        name, imports = torch_name(self.source)
        self.imports.update(imports)
        return name

    def _functional(self) -> str:
        name, imports = functional(self.source)
        self.imports.update(imports)
        return name


def one_line(source: Source, node: ast.expr) -> str:
    """The expression as it is written, or on one line where it is written on several."""
    text = source.of(node)
    return text if "\n" not in text else ast.unparse(node)


def _added(left: str, right: str) -> str:
    return f"{left} - {right[1:].lstrip()}" if right.startswith("-") else f"{left} + {right}"


def _bracketed(text: tuple[str, bool]) -> str:
    return text[0] if text[1] else f"({text[0]})"


def _renamed(source: Source, call: ast.Call, name: str) -> str:
    """The call with another function: softmax(x, -1) to log_softmax(x, -1)."""
    function, whole = source.of(call.func), source.of(call)
    return function[: -len(called(call))] + name + whole[len(function) :]


def _is_eps(node: ast.expr) -> bool:
    value = constant(node)
    if value is not None:
        return 0 < value <= _LARGEST_EPS
    return isinstance(node, (ast.Name, ast.Attribute)) and bool(_EPS.search(ast.unparse(node)))


def _is_number(node: ast.expr) -> bool:
    """Whether it is made of numbers and functions of math only."""
    leaves = [each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Constant))]
    return all(isinstance(each, ast.Constant) or each.id == "math" for each in leaves)
