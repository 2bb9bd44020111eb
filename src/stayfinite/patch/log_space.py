"""Logarithms of exponentials, softmaxes and sigmoids, rewritten without leaving log space."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from stayfinite.patch.code import Code, Spot, Written
from stayfinite.patch.edit import Edit, Rewrite, place, rename, replace, rewrite
from stayfinite.syntax import callee, calls_in, constant, is_call, is_operation, keyword, names_in

_OPS = ("log", "exp", "div", "softmax", "sigmoid", "sum", "mul", "add", "log1p")
_NODES = ("Log", "Exp", "Div", "Softmax", "Sigmoid", "Sum", "Mul", "Log1P", "Pow")


def log_space(spot: Spot) -> Iterator[Rewrite]:
    """log(sum(exp(x))) to logsumexp(x), log(softmax(x)) to log_softmax(x), and their kin."""
    if spot.op not in _OPS and spot.autograd not in _NODES:
        return
    for call in calls_in(spot.source.scope(spot.node), ("log", "log1p")):
        written = _in_log_space(spot.source, call)
        if written is None:
            continue
        # Whether the operation that went wrong is part of this logarithm.
        here = {id(each) for root in (call, *written[0].seen) for each in ast.walk(root)}
        if id(spot.node) in here or any(each is call for each in ast.walk(spot.node)):
            yield _all_in_statement(spot, call)


def _in_log_space(source: Code, call: ast.Call) -> tuple[LogText, str] | None:
    """The text for the logarithm, and who wrote it; None if nothing is gained."""
    inner = source.operand(call)
    if inner is None:
        return None
    writer = LogText(source)
    if callee(call) == "log":
        text, _ = writer.of(inner)
        if "math.log(" in text and source.imported.get("math") != "math":
            writer.imports.add("import math")
        return (writer, text) if writer.gains else None
    # log1p(exp(x)) is softplus(x).
    exponent = source.operand(inner) if is_call(inner, "exp") else None
    if exponent is None:
        return None
    writer.seen.append(inner)
    return writer, f"{writer.use(source.functional)}.softplus({source.one_line(exponent)})"


def _all_in_statement(spot: Spot, first: ast.Call) -> Rewrite:
    """The same for all logarithms of the statement, as they will fail in the same way."""
    source = spot.source
    edits: list[Edit] = []
    inlined: list[ast.Assign] = []
    imports: set[str] = set()
    for call in calls_in(source.statement(first) or spot.statement, ("log", "log1p")):
        written, inner = _in_log_space(source, call), source.operand(call)
        if written is None or inner is None:
            continue
        writer, text = written
        name = next((each.id for each in names_in(inner)), "value")
        edits += place(source, call, text, name=f"log_{name}")
        inlined += writer.inlined
        imports |= writer.imports
    edits += _removals(source, inlined, edits)
    what = "Stay in log space instead of taking the logarithm of an exponential."
    return Rewrite(source, what, tuple(edits), tuple(sorted(imports)))


def _removals(source: Code, inlined: list[ast.Assign], edits: list[Edit]) -> list[Edit]:
    """Lines of names that nobody reads any more."""
    gone: list[Edit] = []
    for each in sorted(set(inlined), key=lambda each: -each.lineno):
        (target,) = each.targets
        if not isinstance(target, ast.Name):
            continue
        reads = [
            source.start(name)
            for name in names_in(source.scope(each))
            if name.id == target.id and isinstance(name.ctx, ast.Load)
        ]
        if all(any(e.start <= at < e.end for e in [*edits, *gone]) for at in reads):
            end = (each.end_lineno or each.lineno) + 1
            gone.append(Edit(source.offset(each.lineno, 0), source.offset(end, 0), ""))
    return gone


def use_tanh(spot: Spot) -> Iterator[Rewrite]:
    """log(1 - a ** 2) with a = tanh(u) * scale: the correction is that of tanh(u)."""
    if spot.op != "log" and spot.autograd != "Log":
        return
    for call in spot.calls(["log"]):
        for node in ast.walk(call):
            base = _square_of(spot.source, node)
            value = spot.source.value_of(base) if base is not None else None
            if base is None or not is_operation(value, ast.Mult):
                continue
            factors = [spot.source.value_of(side) for side in (value.left, value.right)]
            for tanh in [each for each in factors if callee(each) == "tanh"][:1]:
                what = "Use the output of tanh itself, which is between -1 and 1, in 1 - x ** 2."
                yield rewrite(spot, base, spot.source.of(tanh), what)


def _square_of(source: Code, node: ast.AST) -> ast.expr | None:
    parent = source.parents.get(node)
    if not is_operation(parent, ast.Sub):
        return None
    if is_operation(node, ast.Pow):
        return node.left
    return source.operand(node) if is_call(node, "pow") else None


def use_logits(spot: Spot) -> Iterator[Rewrite]:
    """binary_cross_entropy(sigmoid(x), y) to the loss on logits."""
    name = "binary_cross_entropy"
    for call in spot.calls([name]) if spot.op.startswith(name) else ():
        first = call.args[0] if call.args else keyword(call, "input")
        logits = spot.source.operand(first) if is_call(first, "sigmoid") else None
        if first is not None and logits is not None:
            edits = (
                rename(spot.source, call, name, f"{name}_with_logits"),
                replace(spot.source, first, spot.source.of(logits)),
            )
            yield Rewrite(spot.source, "Use the loss that works on logits.", edits)


def binary_cross_entropy(spot: Spot) -> Iterator[Rewrite]:
    """-(y * log(p) + (1 - y) * log(1 - p)) to torch's own loss, on logits if p is a sigmoid."""
    source = spot.source
    if not spot.ran(("log",)) and spot.op not in ("mul", "add", "neg"):
        return
    for node in ast.walk(spot.statement):
        found = _two_sided(source, node) if isinstance(node, ast.BinOp) else None
        if found is None or not isinstance(node, ast.BinOp):
            continue
        probability, target = found
        whole, reduction = _around(source, node)
        sign = "-" if whole is node and isinstance(node.op, ast.Add) else ""
        f, imports = source.functional
        value = source.value_of(probability)
        logits = source.operand(value) if is_call(value, "sigmoid") else None
        name, given = "binary_cross_entropy", probability
        if logits is not None:
            name, given = "binary_cross_entropy_with_logits", logits
        text = f"{f}.{name}({source.one_line(given)}, {source.one_line(target)}{reduction})"
        what = f"Use F.{name}, which is finite at 0 and 1."
        edits = place(source, whole, sign + text, name="loss")
        made = source.assignment(probability) if logits is not None else None
        edits = (*edits, *_removals(source, [made], list(edits))) if made is not None else edits
        yield Rewrite(source, what, tuple(edits), tuple(imports))


def _two_sided(source: Code, node: ast.BinOp) -> tuple[ast.expr, ast.expr] | None:
    """(p, y) of y * log(p) + (1 - y) * log(1 - p), in either order; also of its negative."""
    if not isinstance(node.op, (ast.Add, ast.Sub)):
        return None
    left, right = _weighted_log(source, node.left), _weighted_log(source, node.right)
    if left is None or right is None or left[2] != isinstance(node.op, ast.Sub) or right[2]:
        return None
    for (y, p, _), (rest, other, _) in ((left, right), (right, left)):
        if _is_one_minus(rest, y) and _is_one_minus(other, p):
            return p, y
    return None


def _weighted_log(source: Code, node: ast.expr) -> tuple[ast.expr, ast.expr, bool] | None:
    """(y, p, whether it is negative) of y * log(p), less an eps inside of the logarithm."""
    is_negative = False
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        is_negative, node = True, node.operand
    if not is_operation(node, ast.Mult):
        return None
    for weight, log in ((node.left, node.right), (node.right, node.left)):
        inner = source.operand(log) if is_call(log, "log") else None
        if inner is None:
            continue
        if isinstance(weight, ast.UnaryOp) and isinstance(weight.op, ast.USub):
            is_negative, weight = not is_negative, weight.operand
        if is_operation(inner, ast.Add) and _is_eps(inner.right):
            inner = inner.left
        return weight, inner, is_negative
    return None


def _is_one_minus(node: ast.expr, other: ast.expr) -> bool:
    if not is_operation(node, ast.Sub) or constant(node.left) != 1:
        return False
    return ast.dump(node.right) == ast.dump(other)


def _around(source: Code, node: ast.expr) -> tuple[ast.expr, str]:
    """The negative mean or sum around the expression, and the reduction that torch's loss needs."""
    each = ', reduction="none"'
    parent = source.parents.get(node)
    reduced, outer = None, parent
    if isinstance(parent, ast.Attribute) and parent.attr in ("mean", "sum"):
        reduced, outer = parent.attr, source.parents.get(parent)
    elif is_call(parent, "mean", "sum") and parent.args == [node]:
        reduced = callee(parent)
    if reduced is not None:
        call = outer
        if not isinstance(call, ast.Call) or len(call.args) + len(call.keywords) > (parent is call):
            reduced = None
    if reduced is not None and isinstance(outer, ast.Call):
        negative = source.parents.get(outer)
        if isinstance(negative, ast.UnaryOp) and isinstance(negative.op, ast.USub):
            return negative, "" if reduced == "mean" else ', reduction="sum"'
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub):
        return parent, each
    return node, each


LOGS = (binary_cross_entropy, log_space, use_tanh, use_logits)


_SELECTIONS = frozenset(
    ["gather", "squeeze", "unsqueeze", "index_select", "reshape", "view", "flatten", "transpose"]
    + ["permute", "select", "expand", "take_along_dim", "masked_select", "contiguous", "float"]
)
_CLAMPS = ("clamp", "clamp_min", "clip")
_EPS = re.compile(r"(^|[._])(eps|epsilon|tiny|EPS|EPSILON)$")
_LARGEST_EPS = 1e-2
_DEPTH = 12
_Text = tuple[str, bool]  # and whether a method can be called on it as it is


@dataclass
class LogText:
    """Writes log(x) for expressions of one file; `gains` counts what it need not exponentiate."""

    source: Code
    gains: int = 0
    inlined: list[ast.Assign] = field(default_factory=list)
    seen: list[ast.expr] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)

    def of(self, node: ast.expr, depth: int = 0) -> _Text:
        """The text, and whether a method can be called on it as it is."""
        self.seen.append(node)
        found = self._gained(node, depth + 1) if depth < _DEPTH else None
        if found is not None:
            return found
        text = self.source.one_line(node)
        # Made of numbers and functions of math only.
        leaves = [each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Constant))]
        if all(isinstance(each, ast.Constant) or each.id == "math" for each in leaves):
            return f"math.log({text})", True
        return f"{self.use(self.source.torch)}.log({text})", True

    def use(self, module: Written) -> str:
        """The module as the file writes it, with its import noted."""
        name, imports = module
        self.imports.update(imports)
        return name

    def _gained(self, node: ast.expr, depth: int) -> _Text | None:
        """None where no exponential is saved."""
        if isinstance(node, ast.Name):
            return self._name(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.BinOp):
            return self._operator(node, depth)
        if isinstance(node, ast.Subscript):
            return self._select(node.value, f"[{self.source.of(node.slice)}]", depth)
        return None

    def _if_gained(self, node: ast.expr, depth: int) -> _Text | None:
        before = self.gains
        text = self.of(node, depth)
        return text if self.gains > before else None

    def _name(self, node: ast.Name, depth: int) -> _Text | None:
        found = self.source.assignment(node)
        if found is None:
            return None
        known = len(self.inlined)
        text = self._if_gained(found.value, depth)
        if text is None:
            del self.inlined[known:]
        else:
            self.inlined.append(found)
        return text

    def _call(self, node: ast.Call, depth: int) -> _Text | None:
        source, name = self.source, callee(node)
        inner = source.operand(node)
        if inner is None:
            return None
        written: _Text
        if callee(node.func) == "Softmax":
            made = source.of(node.func).replace("Softmax", "LogSoftmax", 1)
            written = f"{made}({source.one_line(inner)})", True
        elif name == "exp":
            written = source.one_line(inner), isinstance(inner, (ast.Name, ast.Attribute))
        elif name == "softmax":
            written = source.with_name(node, "log_softmax"), True
        elif name == "sigmoid":
            f = self.use(source.functional)
            written = f"{f}.logsigmoid({source.one_line(inner)})", True
        elif name in ("sum", "mean"):
            return self._sum(node, inner, depth)
        elif name in _SELECTIONS and source.owner_of(node) is not None:
            rest = source.text[source.end(inner) : source.end(node)].lstrip(") \r\n\t")
            return self._select(inner, rest, depth)
        else:
            return self._if_gained(inner, depth) if name in _CLAMPS else None
        self.gains += 1
        return written

    def _sum(self, node: ast.Call, inner: ast.expr, depth: int) -> _Text | None:
        source = self.source
        dim = source.dim(node)
        text = self._if_gained(inner, depth)
        if text is None or dim is None:
            return None
        keep = keyword(node, "keepdim")
        more = f", keepdim={source.of(keep)}" if keep is not None else ""
        torch = self.use(source.torch)
        summed = f"{torch}.logsumexp({text[0]}, dim={source.of(dim)}{more})"
        if callee(node) == "sum":
            return summed, True
        return f"{summed} - math.log({_in_brackets(text)}.shape[{source.of(dim)}])", False

    def _select(self, inner: ast.expr, rest: str, depth: int) -> _Text | None:
        """x.squeeze(1) and x[0], which choose and do not compute."""
        text = self._if_gained(inner, depth)
        return (f"{_in_brackets(text)}{rest}", True) if text is not None else None

    def _operator(self, node: ast.BinOp, depth: int) -> _Text | None:
        if isinstance(node.op, ast.Pow):
            text = self._if_gained(node.left, depth)
            power = self.source.in_brackets(node.right)
            return (f"{power} * {_in_brackets(text)}", False) if text else None
        if isinstance(node.op, (ast.Mult, ast.Div)):
            before = self.gains
            left, right = self.of(node.left, depth), self.of(node.right, depth)
            if self.gains == before:
                return None
            if isinstance(node.op, ast.Div):
                return f"{left[0]} - {_in_brackets(right)}", False
            if right[0].startswith("-"):
                return f"{left[0]} - {right[0][1:].lstrip()}", False
            return f"{left[0]} + {right[0]}", False
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if not isinstance(node.op, (ast.Add, ast.Sub)):
                break
            if constant(one) == 1 and (text := self._one_and(node, other)) is not None:
                return text
            if _is_eps(one) and (one is node.right or isinstance(node.op, ast.Add)):
                return self._if_gained(other, depth)
        return None

    def _one_and(self, node: ast.BinOp, other: ast.expr) -> _Text | None:
        """log(1 + exp(x)), log(1 - sigmoid(x))."""
        found = self.source.assignment(other)
        call = found.value if found is not None else other
        inner = self.source.operand(call) if isinstance(call, ast.Call) else None
        if inner is None:
            return None
        self.seen.append(call)
        text = self.source.one_line(inner)
        if callee(call) == "exp" and isinstance(node.op, ast.Add):
            written = f"softplus({text})"
        elif callee(call) == "sigmoid" and isinstance(node.op, ast.Sub) and other is node.right:
            minus = text if isinstance(inner, (ast.Name, ast.Attribute, ast.Call)) else f"({text})"
            written = f"logsigmoid(-{minus})"
        else:
            return None
        self.gains += 1
        if found is not None:
            self.inlined.append(found)
        return f"{self.use(self.source.functional)}.{written}", True


def _in_brackets(text: _Text) -> str:
    return text[0] if text[1] else f"({text[0]})"


def _is_eps(node: ast.expr) -> bool:
    value = constant(node)
    if value is not None:
        return 0 < value <= _LARGEST_EPS
    return isinstance(node, (ast.Name, ast.Attribute)) and bool(_EPS.search(ast.unparse(node)))
