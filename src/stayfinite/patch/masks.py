"""Rewrites around masks: of -Inf, in torch.where, and those that leave nothing."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from stayfinite.patch.arithmetic import divides, divisions, powers
from stayfinite.patch.code import Code, Spot
from stayfinite.patch.edit import (
    Rewrite,
    call_method,
    call_methods,
    insert_before,
    rewrite,
    set_keyword,
    swap,
)
from stayfinite.syntax import callee, calls_in, constant, is_call, keyword, names_in

_SOFTMAXES = ("softmax", "log_softmax", "logsumexp", "softmin")
_FILLS = ("masked_fill", "masked_fill_", "where", "fill_")
_PADDING = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask")
_ARITHMETIC = ("sub", "add", "rsub", "sum", "mean", "mul", "mm", "bmm", "addmm", "dot")
_INFINITE = (math.inf, -math.inf, "inf", "-inf")
_OF_LOGARITHMS = ("logaddexp", "logsumexp", "logcumsumexp")
_FINITE_MASK = "Mask with the lowest finite number, so that no row is masked everywhere."
_OPEN_ROWS = "Leave rows open that would be masked everywhere."


def is_infinite(node: ast.AST) -> bool:
    """float("-inf"), -math.inf, -torch.inf, -np.inf."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return is_infinite(node.operand)
    if is_call(node, "float") and len(node.args) == 1:
        text = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
        return str(text).lower().lstrip("+-") in ("inf", "infinity")
    return isinstance(node, ast.Attribute) and node.attr == "inf"


def mask_constant(spot: Spot) -> Iterator[Rewrite]:
    """-1e9 to a number that float16 can hold."""
    if not spot.is_half or spot.is_backward or not isinstance(spot.node, ast.expr):
        return
    for node in (each for around in _sources(spot, spot.node) for each in ast.walk(around)):
        if not isinstance(node, ast.expr) or _has_sign(spot, node):
            continue
        if (value := constant(node)) is not None and value < -65504:
            yield rewrite(spot, node, "-1e4", "Use a mask value that float16 can hold.")


def _has_sign(spot: Spot, node: ast.AST) -> bool:
    return isinstance(spot.source.parents.get(node), ast.UnaryOp)


def set_to_infinity(spot: Spot) -> Iterator[Rewrite]:
    """scores[mask] = -inf, which a softmax could not take."""
    target, value = spot.target, getattr(spot.statement, "value", None)
    if isinstance(target, ast.Subscript) and isinstance(value, ast.expr) and is_infinite(value):
        yield rewrite(spot, value, _lowest(spot, target.value), _FINITE_MASK)


def masked_rows(spot: Spot) -> Iterator[Rewrite]:
    """Mask with the lowest finite number in place of -Inf."""
    if not any(name in spot.op for name in ("softmax", "logsumexp", "attention")):
        return
    torch, _ = spot.source.torch
    for _, scores in spot.operands(_SOFTMAXES):
        yield from _finite_fill(spot, scores)
        lowest = f"{torch}.finfo({spot.source.in_brackets(scores)}.dtype).min"
        what = "Keep the scores finite, so that a row that is masked everywhere has a softmax."
        yield call_method(spot, scores, f".clamp_min({lowest})", what)


def _finite_fill(spot: Spot, scores: ast.expr) -> Iterator[Rewrite]:
    """masked_fill(mask, -inf) to masked_fill(mask, finfo.min), also further up."""
    places = [*_sources(spot, scores), spot.source.scope(spot.node)]
    for node in (each for place in places for each in ast.walk(place)):
        if is_call(node, *_FILLS):
            base = spot.source.operand(node) if callee(node) != "where" else None
            given = node.args
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            base, given = node.targets[0].value, [node.value]
        else:
            continue
        for bad in filter(is_infinite, given):
            yield rewrite(spot, bad, _lowest(spot, base), _FINITE_MASK)


def _lowest(spot: Spot, base: ast.expr | None) -> str:
    """The lowest finite number of the type that the scores have."""
    text = spot.source.in_brackets(base) if base is not None else ""
    if len(text) > 24 and base is not None:
        known = {"self", *spot.source.imported}
        text = next((each.id for each in names_in(base) if each.id not in known), "")
    return f"{spot.source.torch[0]}.finfo({text}.dtype).min" if text else "-1e4"


def _sources(spot: Spot, node: ast.expr) -> Iterator[ast.expr]:
    """The expression, and what the names in it stand for, a few steps back."""
    todo, seen = [node], set[int]()
    while todo and len(seen) < 12:
        current = todo.pop(0)
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            values = ((name, spot.source.value_of(name)) for name in names_in(current))
            todo += [value for name, value in values if value is not name]


def masked_keys(spot: Spot) -> Iterator[Rewrite]:
    """Masks that are given to an attention of torch's."""
    if not any(name in spot.op for name in ("softmax", "attention")):
        return
    for item in ast.walk(spot.statement):
        if isinstance(item, ast.keyword) and item.arg in _PADDING:
            mask = spot.source.in_brackets(item.value)
            text = f"{mask} & ~{mask}.all(dim=-1, keepdim=True)"
            yield rewrite(spot, item.value, text, _OPEN_ROWS)
    for call in spot.calls(["scaled_dot_product_attention"]):
        given = keyword(call, "attn_mask") or (call.args[3] if len(call.args) > 3 else None)
        if given is not None:  # true where a key may be looked at, or added to the scores
            mask, (torch, _) = spot.source.in_brackets(given), spot.source.torch
            text = f"{mask} | ~{mask}.any(dim=-1, keepdim=True)"
            yield rewrite(spot, given, text, _OPEN_ROWS)
            lowest = f".clamp_min({torch}.finfo({mask}.dtype).min)"
            yield call_method(spot, given, lowest, _FINITE_MASK)


def infinite_operands(spot: Spot) -> Iterator[Rewrite]:
    """Inf - Inf and 0 * Inf: the side that is infinite is bounded before."""
    if spot.op not in _ARITHMETIC or spot.is_backward:
        return
    source, (torch, _) = spot.source, spot.source.torch
    infinite = {item.name for item in spot.origin.inputs if item.neg_inf_count}
    sides = list(_infinite_sides(spot, infinite)) if infinite else []
    if sides:
        what = "Bound what is -Inf by a finite number before the arithmetic on it."
        for low in ("-1e4", None):
            edits = []
            for node in sides:
                x = source.in_brackets(node)
                least = low or f"{torch}.finfo({x}.dtype).min"
                edits.append(swap(source, node, f"{x}.clamp_min({least})"))
            yield Rewrite(source, what, tuple(edits))
    for value in spot.fact("scalars", {}).values():
        bad = filter(is_infinite, ast.walk(spot.node)) if value in _INFINITE else ()
        for node in (each for each in bad if isinstance(each, ast.expr)):
            sign = "-" if not _has_sign(spot, node) else ""
            text = f"{sign}{'1e4' if spot.is_half else '1e9'}"
            yield rewrite(spot, node, text, "Multiply by a large finite number, not by Inf.")


def _infinite_sides(spot: Spot, infinite: set[str]) -> Iterator[ast.expr]:
    node = spot.node
    if isinstance(node, ast.BinOp):
        if infinite & {"self", "input", "tensor", "mat1"}:
            yield node.left
        if infinite & {"other", "mat2", "tensor2"}:
            yield node.right
    elif isinstance(node, ast.Call):
        first = spot.source.operand(node)
        rest = [arg for arg in spot.source.other_arguments(node) if constant(arg) is None]
        sides = [first, *rest] if first is not None else rest
        yield from sides[: 2 if spot.fact("inside") else len(infinite)]


def infinite_logarithms(spot: Spot) -> Iterator[Rewrite]:
    """logaddexp and its like, whose derivative at -Inf beside -Inf is Inf - Inf."""
    if not (spot.autograd or spot.op).lower().startswith(_OF_LOGARITHMS):
        return
    guard = f".clamp_min({'-1e4' if spot.is_half else '-1e30'})"
    for call in spot.calls((*_OF_LOGARITHMS, "logaddexp2")):
        is_pair = callee(call).startswith("logaddexp")
        others = spot.source.other_arguments(call) if is_pair else []
        edits = call_methods(spot.source, [spot.source.operand(call), *others], guard)
        if edits:
            what = "Bound what is -Inf by a finite number before the sum in log space."
            yield Rewrite(spot.source, what, edits)


MASKS = (
    mask_constant,
    set_to_infinity,
    masked_rows,
    masked_keys,
    infinite_operands,
    infinite_logarithms,
)


_BRANCHES = {
    "Log": ("log",),
    "Log2": ("log2",),
    "Log10": ("log10",),
    "Log1P": ("log1p",),
    "Sqrt": ("sqrt",),
    "Rsqrt": ("rsqrt",),
    "Acos": ("acos", "arccos"),
    "Asin": ("asin", "arcsin"),
    "Exp": ("exp",),
    "Expm1": ("expm1",),
    "Reciprocal": ("reciprocal",),
}
_ZERO_IS_SAFE = ("Acos", "Asin", "Exp", "Expm1", "Log1P")


def select_before(spot: Spot) -> Iterator[Rewrite]:
    """where(c, f(x), y) to where(c, f(where(c, x, 1.0)), y)."""
    if not spot.is_backward:
        return
    source, (torch, imports) = spot.source, spot.source.torch
    inner = [below for _, _, below in divisions(spot)] if divides(spot) else []
    inner += [base for _, base, _ in powers(spot)] if spot.autograd.startswith("Pow") else []
    inner += [x for _, x in spot.operands(_BRANCHES.get(spot.autograd, ()))]
    # Names that have no value yet at the statement, or another one.
    late = {
        each.id
        for each in names_in(source.scope(spot.statement))
        if isinstance(each.ctx, ast.Store) and each.lineno >= spot.statement.lineno
    }
    safe = "0.0" if spot.autograd in _ZERO_IS_SAFE else "1.0"
    what = "Make the input safe where torch.where takes the other branch."
    for node in inner:
        for mask, is_taken in _selections(spot, node):
            if late & {each.id for each in names_in(mask)}:
                continue
            x = source.of(node)
            pair = f"{x}, {safe}" if is_taken else f"{safe}, {x}"
            text = f"{torch}.where({source.of(mask)}, {pair})"
            yield rewrite(spot, node, text, what, *imports)


def _selections(spot: Spot, inner: ast.expr) -> Iterator[tuple[ast.expr, bool]]:
    """(condition, whether the branch is taken where it holds) of where and masked_fill.

    They stand around the operand, or around what its statement sets.
    """
    places: list[ast.expr] = [inner]
    if isinstance(spot.target, ast.Name):
        places += spot.source.readers(spot.target.id, after=spot.statement)
    for place in places:
        below: ast.AST = place
        for parent in spot.source.above(place):
            if isinstance(parent, ast.stmt):
                break
            args = parent.args if isinstance(parent, ast.Call) else []
            is_where = is_call(parent, "where") and spot.source.owner_of(parent) is None
            if is_where and len(args) == 3 and below in args[1:]:
                yield args[0], below is args[1]
            elif (
                callee(parent) == "masked_fill" and args and below is getattr(parent, "func", None)
            ):
                yield args[0], False
            below = parent


_LOSSES = frozenset(
    ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "nll_loss", "cross_entropy"]
    + ["binary_cross_entropy", "binary_cross_entropy_with_logits"]
)
_SHORT = 30


def mean_of_nothing(spot: Spot) -> Iterator[Rewrite]:
    """x.mean() to x.sum() / max(x.numel(), 1)."""
    if not spot.fact("empty") and spot.cause != "empty_reduction":
        return
    source = spot.source
    what = "Sum and divide by the count, which is at least 1, so that the mean of nothing is 0."
    for call, inner in spot.operands(("mean", "nanmean")):
        if isinstance(call.func, ast.Attribute):
            text = f"{source.with_name(call, 'sum')} / {_count(source, call, inner)}"
            yield rewrite(spot, call, text, what)
    what = "Sum the loss and divide by the count, which is at least 1."
    for call in spot.calls(_LOSSES):
        if call.args and keyword(call, "reduction") is None:
            x = source.in_brackets(call.args[0])
            yield rewrite(spot, call, f"{_with_sum(source, call)} / max({x}.numel(), 1)", what)
    first = source.operand(spot.node) if isinstance(spot.node, ast.Call) else None
    if isinstance(spot.node, ast.Call) and first is not None:
        x = source.in_brackets(first)
        text = f"({source.of(spot.node)} if {x}.numel() else {x}.sum())"
        yield rewrite(spot, spot.node, text, "Skip the term when nothing is selected.")


def _count(source: Code, call: ast.Call, inner: ast.expr) -> str:
    x = source.in_brackets(inner)
    dim = source.dim(call)
    if dim is not None:
        return f"max({x}.shape[{source.of(dim)}], 1)"
    if isinstance(inner, ast.Subscript) and len(x) > _SHORT:
        return f"{source.in_brackets(inner.slice)}.sum().clamp_min(1)"
    return f"max({x}.numel(), 1)"


def _with_sum(source: Code, call: ast.Call) -> str:
    """The loss with reduction="sum"."""
    edit = set_keyword(source, call, "reduction", source.quoted("sum"))
    start, text = source.start(call), source.of(call)
    return text[: edit.start - start] + edit.text + text[edit.end - start :]


def all_ignored(spot: Spot) -> Iterator[Rewrite]:
    """cross_entropy(x, y) to the sum over what is not ignored, divided by at least 1."""
    if not spot.op.startswith(("nll_loss", "cross_entropy")) or spot.is_backward:
        return
    source = spot.source
    for call in spot.calls(("cross_entropy", "nll_loss")):
        labels = call.args[1] if len(call.args) > 1 else keyword(call, "target")
        if labels is None or keyword(call, "weight") is not None or len(call.args) > 2:
            continue
        ignored = keyword(call, "ignore_index")
        index = source.of(ignored) if ignored is not None else "-100"
        summed, count = _with_sum(source, call), "counted"
        counted = f"({source.in_brackets(labels)} != {index}).sum().clamp_min(1)"
        edits = []
        statement = source.statement(call)
        is_long = len(f"{summed} / {counted}") > source.longest_line - 20
        is_simple = isinstance(statement, (ast.Assign, ast.Return, ast.AugAssign))
        if is_long and is_simple and statement is not None and not source.has_name("counted"):
            edits.append(insert_before(source, statement, f"counted = {counted}"))
        else:
            count = counted
        edits.append(swap(source, call, f"{summed} / {count}"))
        what = "Sum the loss and divide by the number of labels that count, at least 1."
        yield Rewrite(source, what, tuple(edits))
    if isinstance(spot.node, ast.Call) and len(spot.node.args) > 1:
        logits, target = (source.in_brackets(arg) for arg in spot.node.args[:2])
        index = str(spot.fact("scalars", {}).get("ignore_index", -100))
        loss = source.of(spot.node)
        text = f"({loss} if ({target} != {index}).any() else {logits}.sum() * 0.0)"
        yield rewrite(spot, spot.node, text, "Skip a batch without a label that counts.")


def no_alignment(spot: Spot) -> Iterator[Rewrite]:
    """CTCLoss(...) to CTCLoss(..., zero_infinity=True)."""
    if "ctc_loss" not in spot.op and spot.cause != "ctc_infeasible":
        return
    what = "Count samples that cannot be aligned as 0."
    for source in spot.sources:
        for call in calls_in(source.tree, ("ctc_loss", "CTCLoss")):
            yield Rewrite(source, what, (set_keyword(source, call, "zero_infinity", "True"),))


REDUCTIONS = (mean_of_nothing, all_ignored, no_alignment)
