"""Logarithms of exponentials, softmaxes and sigmoids, rewritten without leaving log space."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from stayfinite.patch.code import (
    Site,
    Source,
    assignment,
    called,
    calls_in,
    constant,
    functional,
    in_brackets,
    is_method,
    keyword,
    names_in,
    operand,
    torch_name,
    value_of,
)
from stayfinite.patch.edit import Change, Edit, placed, rewritten

_OPS = ("log", "exp", "div", "softmax", "sigmoid", "sum", "mul", "add", "log1p")
_NODES = ("Log", "Exp", "Div", "Softmax", "Sigmoid", "Sum", "Mul", "Log1P", "Pow")


def log_space(site: Site) -> Iterator[Change]:
    """log(sum(exp(x))) to logsumexp(x), log(softmax(x)) to log_softmax(x), and their kin."""
    if site.op not in _OPS and site.autograd not in _NODES:
        return
    scope = site.source.scope(site.node)
    for call in calls_in(scope, ("log", "log1p")):
        written = _written(site.source, call)
        if written is None or not _is_about(site, call, written[0]):
            continue
        yield _change(site, call)


def _written(source: Source, call: ast.Call) -> tuple[LogText, str] | None:
    inner = operand(source, call)
    if inner is None:
        return None
    writer = LogText(source)
    if called(call) == "log1p":
        return _softplus(source, writer, inner)
    text, _ = writer.of(inner)
    if "math.log(" in text and source.imported.get("math") != "math":
        writer.imports.add("import math")
    return (writer, text) if writer.gains else None


def _softplus(source: Source, writer: LogText, inner: ast.expr) -> tuple[LogText, str] | None:
    """log1p(exp(x)) is softplus(x)."""
    if not isinstance(inner, ast.Call) or called(inner) != "exp":
        return None
    exponent = operand(source, inner)
    if exponent is None:
        return None
    name, imports = functional(source)
    writer.imports.update(imports)
    writer.seen.append(inner)
    return writer, f"{name}.softplus({one_line(source, exponent)})"


def _is_about(site: Site, call: ast.Call, writer: LogText) -> bool:
    """Whether the operation that went wrong is part of this logarithm."""
    here = {id(each) for root in (call, *writer.seen) for each in ast.walk(root)}
    return id(site.node) in here or any(each is call for each in ast.walk(site.node))


def _change(site: Site, first: ast.Call) -> Change:
    """The same for all logarithms of the statement, as they will fail in the same way."""
    source = site.source
    statement = source.statement(first) or site.statement
    edits: list[Edit] = []
    inlined: list[ast.Assign] = []
    imports: set[str] = set()
    for call in calls_in(statement, ("log", "log1p")):
        written = _written(source, call)
        if written is None:
            continue
        writer, text = written
        edits += _placed(source, call, text)
        inlined += writer.inlined
        imports |= writer.imports
    edits += _removed(source, inlined, edits)
    what = "Stay in log space instead of taking the logarithm of an exponential."
    return Change(source, what, tuple(edits), tuple(sorted(imports)))


def _placed(source: Source, call: ast.Call, text: str) -> list[Edit]:
    inner = operand(source, call)
    names = [each.id for each in names_in(inner)] if inner is not None else []
    return placed(source, call, text, name=f"log_{names[0]}" if names else "log_value")


def _removed(source: Source, inlined: list[ast.Assign], edits: list[Edit]) -> list[Edit]:
    """Lines of names that nobody reads any more."""
    gone: list[Edit] = []
    for each in sorted(set(inlined), key=lambda each: -each.lineno):
        (target,) = each.targets
        if not isinstance(target, ast.Name):
            continue
        spans = [*edits, *gone]
        reads = [
            name
            for name in names_in(source.scope(each))
            if name.id == target.id and isinstance(name.ctx, ast.Load)
        ]
        still = [
            name for name in reads if not any(e.start <= source.start(name) < e.end for e in spans)
        ]
        if not still:
            end = (each.end_lineno or each.lineno) + 1
            gone.append(Edit(source.offset(each.lineno, 0), source.offset(end, 0), ""))
    return gone


def squashed(site: Site) -> Iterator[Change]:
    """log(1 - a ** 2) with a = tanh(u) * scale: the correction is that of tanh(u)."""
    if site.op != "log" and site.autograd != "Log":
        return
    for call in site.calls(["log"]):
        for power in ast.walk(call):
            base = _squared(site.source, power)
            tanh = _tanh_in(site.source, base) if base is not None else None
            if base is not None and tanh is not None:
                what = "Use the output of tanh itself, which is between -1 and 1, in 1 - x ** 2."
                yield rewritten(site, base, site.source.of(tanh), what)


def _squared(source: Source, node: ast.AST) -> ast.expr | None:
    parent = source.parents.get(node)
    if not isinstance(parent, ast.BinOp) or not isinstance(parent.op, ast.Sub):
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return node.left
    return operand(source, node) if isinstance(node, ast.Call) and called(node) == "pow" else None


def _tanh_in(source: Source, node: ast.expr) -> ast.Call | None:
    """tanh(u) where the name stands for a multiple of it."""
    value = value_of(source, node)
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mult):
        return None
    for side in (value.left, value.right):
        behind = value_of(source, side)
        if isinstance(behind, ast.Call) and called(behind) == "tanh":
            return behind
    return None


def probabilities(site: Site) -> Iterator[Change]:
    """binary_cross_entropy(sigmoid(x), y) to the loss on logits."""
    if not site.op.startswith("binary_cross_entropy"):
        return
    for call in site.calls(["binary_cross_entropy"]):
        first = call.args[0] if call.args else keyword(call, "input")
        if not isinstance(first, ast.Call) or called(first) != "sigmoid":
            continue
        logits = operand(site.source, first)
        if logits is None:
            continue
        name, end = site.source.of(call.func), site.source.end(call.func)
        edits = (
            Edit(end - len("binary_cross_entropy"), end, "binary_cross_entropy_with_logits"),
            Edit(site.source.start(first), site.source.end(first), site.source.of(logits)),
        )
        if name.endswith("binary_cross_entropy"):
            yield Change(site.source, "Use the loss that works on logits.", edits)


LOGS = (log_space, squashed, probabilities)


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
