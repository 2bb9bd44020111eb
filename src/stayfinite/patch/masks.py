"""Rewrites around masks: of -Inf, in torch.where, and those that leave nothing."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from stayfinite.patch.arithmetic import divides, divisions, powers
from stayfinite.patch.code import (
    Site,
    Source,
    called,
    calls_in,
    constant,
    in_brackets,
    is_method,
    keyword,
    known_at,
    names_in,
    operand,
    readers,
    torch_name,
    value_of,
)
from stayfinite.patch.edit import (
    Change,
    Edit,
    followed,
    insert_before,
    rewritten,
    swapped,
    with_keyword,
)

_SOFTMAXES = ("softmax", "log_softmax", "logsumexp", "softmin")
_PADDING = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask")
_MASK = -1e4  # below any score, above the lowest float16
_ARITHMETIC = ("sub", "add", "rsub", "sum", "mean", "mul", "mm", "bmm", "addmm", "dot")
_OF_LOGARITHMS = ("logaddexp", "logsumexp", "logcumsumexp")


def is_infinite(node: ast.AST) -> bool:
    """float("-inf"), -math.inf, -torch.inf, -np.inf."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return is_infinite(node.operand)
    if isinstance(node, ast.Call) and called(node) == "float" and len(node.args) == 1:
        text = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
        return str(text).lower().lstrip("+-") in ("inf", "infinity")
    return isinstance(node, ast.Attribute) and node.attr == "inf"


def masked_rows(site: Site) -> Iterator[Change]:
    """Mask with the lowest finite number in place of -Inf."""
    if not any(name in site.op for name in ("softmax", "logsumexp", "attention")):
        return
    torch, _ = torch_name(site.source)
    for call in site.calls(_SOFTMAXES):
        scores = operand(site.source, call)
        if scores is None:
            continue
        yield from _finite_fill(site, scores)
        lowest = f"{torch}.finfo({in_brackets(site.source, scores)}.dtype).min"
        what = "Keep the scores finite, so that a row that is masked everywhere has a softmax."
        yield followed(site, scores, f".clamp_min({lowest})", what)


def set_to_infinity(site: Site) -> Iterator[Change]:
    """scores[mask] = -inf, which a softmax could not take."""
    statement = site.statement
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    value = getattr(statement, "value", None)
    if isinstance(target, ast.Subscript) and isinstance(value, ast.expr) and is_infinite(value):
        what = "Mask with the lowest finite number, so that no row is masked everywhere."
        yield rewritten(site, value, _lowest(site, target.value), what)


def masked_keys(site: Site) -> Iterator[Change]:
    """Masks that are given to an attention of torch's."""
    if not any(name in site.op for name in ("softmax", "attention")):
        return
    for item in ast.walk(site.statement):
        if isinstance(item, ast.keyword) and item.arg in _PADDING:
            mask = in_brackets(site.source, item.value)
            text = f"{mask} & ~{mask}.all(dim=-1, keepdim=True)"
            what = "Leave rows open that would be masked everywhere."
            yield rewritten(site, item.value, text, what)
    for call in site.calls(["scaled_dot_product_attention"]):
        given = keyword(call, "attn_mask") or (call.args[3] if len(call.args) > 3 else None)
        if given is not None:
            yield from _open_rows(site, given)


def _open_rows(site: Site, given: ast.expr) -> Iterator[Change]:
    """A mask of scaled_dot_product_attention, true where a key may be looked at or added."""
    mask = in_brackets(site.source, given)
    what = "Leave rows open that would be masked everywhere."
    yield rewritten(site, given, f"{mask} | ~{mask}.any(dim=-1, keepdim=True)", what)
    torch, _ = torch_name(site.source)
    what = "Mask with the lowest finite number, so that no row is masked everywhere."
    yield followed(site, given, f".clamp_min({torch}.finfo({mask}.dtype).min)", what)


def _finite_fill(site: Site, scores: ast.expr) -> Iterator[Change]:
    """masked_fill(mask, -inf) to masked_fill(mask, finfo.min), also further up."""
    places = [*_sources(site, scores), site.source.scope(site.node)]
    for node in (each for place in places for each in ast.walk(place)):
        if isinstance(node, ast.Call) and called(node) in _FILLS:
            base = operand(site.source, node) if called(node) != "where" else None
            given = node.args
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            base, given = node.targets[0].value, [node.value]
        else:
            continue
        for bad in filter(is_infinite, given):
            lowest = _lowest(site, base)
            what = "Mask with the lowest finite number, so that no row is masked everywhere."
            yield rewritten(site, bad, lowest, what)


_FILLS = ("masked_fill", "masked_fill_", "where", "fill_")


def _lowest(site: Site, base: ast.expr | None) -> str:
    """The lowest finite number of the type that the scores have."""
    text = in_brackets(site.source, base) if base is not None else ""
    if len(text) > 24 and base is not None:
        known = {"self", *site.source.imported}
        text = next((each.id for each in names_in(base) if each.id not in known), "")
    return f"{torch_name(site.source)[0]}.finfo({text}.dtype).min" if text else "-1e4"


def _sources(site: Site, node: ast.expr) -> Iterator[ast.expr]:
    """The expression, and what the names in it stand for, a few steps back."""
    todo, seen = [node], set[int]()
    while todo and len(seen) < 12:
        current = todo.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        for name in names_in(current):
            value = value_of(site.source, name)
            if value is not name:
                todo.append(value)


def mask_constant(site: Site) -> Iterator[Change]:
    """-1e9 to a number that float16 can hold."""
    if not site.is_half or site.is_backward:
        return
    for around in _sources(site, site.node) if isinstance(site.node, ast.expr) else ():
        for node in ast.walk(around):
            if not isinstance(node, ast.expr):
                continue
            value = constant(node)
            if value is not None and value < -65504 and not _is_operand_of_sign(site, node):
                what = "Use a mask value that float16 can hold."
                yield rewritten(site, node, "-1e4", what)


def _is_operand_of_sign(site: Site, node: ast.AST) -> bool:
    return isinstance(site.source.parents.get(node), ast.UnaryOp)


def infinite_operands(site: Site) -> Iterator[Change]:
    """Inf - Inf and 0 * Inf: the side that is infinite is bounded before."""
    if site.op not in _ARITHMETIC or site.is_backward:
        return
    infinite = {item.name for item in site.origin.inputs if item.neg_inf_count}
    if infinite:
        torch, _ = torch_name(site.source)
        operands = list(_infinite_sides(site, infinite))
        for low in ("-1e4", None):
            edits = []
            for node in operands:
                x = in_brackets(site.source, node)
                least = low or f"{torch}.finfo({x}.dtype).min"
                edits.append(swapped(site.source, node, f"{x}.clamp_min({least})"))
            if edits:
                what = "Bound what is -Inf by a finite number before the arithmetic on it."
                yield Change(site.source, what, tuple(edits))
    for value in site.fact("scalars", {}).values():
        if value in (math.inf, -math.inf, "inf", "-inf"):
            yield from _infinite_constants(site)


def infinite_logarithms(site: Site) -> Iterator[Change]:
    """logaddexp and its like, whose derivative at -Inf beside -Inf is Inf - Inf."""
    if not (site.autograd or site.op).lower().startswith(_OF_LOGARITHMS):
        return
    for call in site.calls(("logaddexp", "logaddexp2", "logsumexp", "logcumsumexp")):
        first = operand(site.source, call)
        pair = call.args if called(call).startswith("logaddexp") else []
        given = [first, *(arg for arg in pair if arg is not first)]
        low = "-1e4" if site.is_half else "-1e30"
        edits = [
            swapped(site.source, node, f"{in_brackets(site.source, node)}.clamp_min({low})")
            for node in given
            if node is not None and constant(node) is None
        ]
        if edits:
            what = "Bound what is -Inf by a finite number before the sum in log space."
            yield Change(site.source, what, tuple(edits))


def _infinite_sides(site: Site, infinite: set[str]) -> Iterator[ast.expr]:
    node = site.node
    if isinstance(node, ast.BinOp):
        if infinite & {"self", "input", "tensor", "mat1"}:
            yield node.left
        if infinite & {"other", "mat2", "tensor2"}:
            yield node.right
    elif isinstance(node, ast.Call):
        first = operand(site.source, node)
        rest = [arg for arg in node.args if arg is not first and constant(arg) is None]
        sides = [first, *rest] if first is not None else rest
        yield from sides[: 2 if site.fact("inside") else len(infinite)]


def _infinite_constants(site: Site) -> Iterator[Change]:
    for node in ast.walk(site.node):
        if isinstance(node, ast.expr) and is_infinite(node):
            sign = "-" if not _is_operand_of_sign(site, node) else ""
            text = f"{sign}{'1e4' if site.is_half else '1e9'}"
            yield rewritten(site, node, text, "Multiply by a large finite number, not by Inf.")


MASKS = (
    mask_constant,
    set_to_infinity,
    masked_rows,
    masked_keys,
    infinite_operands,
    infinite_logarithms,
)


_WHAT = "Make the input safe where torch.where takes the other branch."
_UNARY = {
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


def untaken(site: Site) -> Iterator[Change]:
    """where(c, f(x), y) to where(c, f(where(c, x, 1.0)), y)."""
    if not site.is_backward:
        return
    safe = "0.0" if site.autograd in _ZERO_IS_SAFE else "1.0"
    for inner in _operands(site):
        for mask, is_taken in _choices(site, inner):
            if not known_at(site.source, mask, site.statement):
                continue
            torch, imports = torch_name(site.source)
            condition, x = site.source.of(mask), site.source.of(inner)
            pair = f"{x}, {safe}" if is_taken else f"{safe}, {x}"
            yield rewritten(site, inner, f"{torch}.where({condition}, {pair})", _WHAT, *imports)


def _operands(site: Site) -> Iterator[ast.expr]:
    if divides(site):
        yield from (below for _, _, below in divisions(site))
    if site.autograd.startswith("Pow"):
        yield from (base for _, base, _ in powers(site))
    for call in site.calls(_UNARY.get(site.autograd, ())):
        if (inner := operand(site.source, call)) is not None:
            yield inner


def _choices(site: Site, inner: ast.expr) -> Iterator[tuple[ast.expr, bool]]:
    """(condition, whether the branch is taken where it holds) of selections around the operand."""
    yield from _around(site, inner)
    statement = site.statement
    if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
        for use in readers(site.source, target.id, after=statement):
            yield from _around(site, use)


def _around(site: Site, node: ast.expr) -> Iterator[tuple[ast.expr, bool]]:
    below: ast.AST = node
    for parent in site.source.above(node):
        if isinstance(parent, ast.stmt):
            return
        if isinstance(parent, ast.Call):
            yield from _chosen(site, parent, below)
        below = parent


def _chosen(site: Site, call: ast.Call, below: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The choice that a call of where or masked_fill makes about the expression below it."""
    name = called(call)
    if name == "where" and not is_method(site.source, call) and len(call.args) == 3:
        mask, taken, other = call.args
        if below in (taken, other):
            yield mask, below is taken
    elif name == "masked_fill" and call.args and below is call.func:
        yield call.args[0], False


_LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "nll_loss",
    "kl_div",
)
_SHORT = 30


def mean_of_nothing(site: Site) -> Iterator[Change]:
    """x.mean() to x.sum() / max(x.numel(), 1)."""
    if not site.fact("empty") and site.cause != "empty_reduction":
        return
    for call in site.calls(("mean", "nanmean")):
        inner = operand(site.source, call)
        if inner is None or not isinstance(call.func, ast.Attribute):
            continue
        yield _sum_over_count(site, call, inner)
    for call in site.calls(_LOSSES):
        if call.args and keyword(call, "reduction") is None:
            x = in_brackets(site.source, call.args[0])
            summed = _with(site.source, call, "reduction", f"{site.source.quote}sum")
            what = "Sum the loss and divide by the count, which is at least 1."
            yield rewritten(site, call, f"{summed} / max({x}.numel(), 1)", what)
    if isinstance(site.node, ast.Call):
        yield from _only_where_some(site, site.node)


def _sum_over_count(site: Site, call: ast.Call, inner: ast.expr) -> Change:
    name = site.source.of(call.func)
    summed = name[: -len(called(call))] + "sum" + site.source.of(call)[len(name) :]
    x = in_brackets(site.source, inner)
    dim = next((arg for arg in call.args if arg is not inner), keyword(call, "dim"))
    if dim is not None:
        count = f"max({x}.shape[{site.source.of(dim)}], 1)"
    elif isinstance(inner, ast.Subscript) and len(x) > _SHORT:
        count = f"{in_brackets(site.source, inner.slice)}.sum().clamp_min(1)"
    else:
        count = f"max({x}.numel(), 1)"
    text = f"{summed} / {count}"
    what = "Sum and divide by the count, which is at least 1, so that the mean of nothing is 0."
    return rewritten(site, call, text, what)


def _only_where_some(site: Site, call: ast.Call) -> Iterator[Change]:
    first = operand(site.source, call)
    if first is None:
        return
    x = in_brackets(site.source, first)
    text = f"({site.source.of(call)} if {x}.numel() else {x}.sum())"
    yield rewritten(site, call, text, "Leave the term out when nothing is selected.")


def _with(source: Source, call: ast.Call, name: str, value: str) -> str:
    quoted = value + value[0] if value[:1] in ("'", '"') else value
    edit, start = with_keyword(source, call, name, quoted), source.start(call)
    text = source.of(call)
    return text[: edit.start - start] + edit.text + text[edit.end - start :]


def all_ignored(site: Site) -> Iterator[Change]:
    """cross_entropy(x, y) to the sum over what is not ignored, divided by at least 1."""
    if not site.op.startswith(("nll_loss", "cross_entropy")) or site.is_backward:
        return
    for call in site.calls(("cross_entropy", "nll_loss")):
        labels = call.args[1] if len(call.args) > 1 else keyword(call, "target")
        if labels is None or keyword(call, "weight") is not None or len(call.args) > 2:
            continue
        ignored = keyword(call, "ignore_index")
        index = site.source.of(ignored) if ignored is not None else "-100"
        summed = _with(site.source, call, "reduction", f"{site.source.quote}sum")
        counted = f"({in_brackets(site.source, labels)} != {index}).sum().clamp_min(1)"
        what = "Sum the loss and divide by the number of labels that count, at least 1."
        yield Change(site.source, what, tuple(_divided(site.source, call, summed, counted)))
    if isinstance(site.node, ast.Call) and len(site.node.args) > 1:
        logits, target = (in_brackets(site.source, arg) for arg in site.node.args[:2])
        index = str(site.fact("scalars", {}).get("ignore_index", -100))
        loss = site.source.of(site.node)
        text = f"({loss} if ({target} != {index}).any() else {logits}.sum() * 0.0)"
        yield rewritten(site, site.node, text, "Leave out a batch without a label that counts.")


def _divided(source: Source, call: ast.Call, summed: str, count: str) -> Iterator[Edit]:
    """summed / count in place of the call; the count on its own line where that is too long."""
    statement = source.statement(call)
    text = f"{summed} / {count}"
    is_free = not any(each.id == "counted" for each in names_in(source.tree))
    is_simple = isinstance(statement, (ast.Assign, ast.Return, ast.AugAssign))
    if len(text) > source.longest_line - 20 and is_free and is_simple and statement is not None:
        yield insert_before(source, statement, f"counted = {count}")
        text = f"{summed} / counted"
    yield swapped(source, call, text)


def no_alignment(site: Site) -> Iterator[Change]:
    """CTCLoss(...) to CTCLoss(..., zero_infinity=True)."""
    if "ctc_loss" not in site.op and site.cause != "ctc_infeasible":
        return
    what = "Count samples that cannot be aligned as 0."
    for source in (site.source, *site.others):
        for call in calls_in(source.tree, ("ctc_loss", "CTCLoss")):
            yield Change(source, what, (with_keyword(source, call, "zero_infinity", "True"),))


REDUCTIONS = (mean_of_nothing, all_ignored, no_alignment)
