"""Masks made of -Inf: rows that are masked everywhere, and arithmetic on them."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.flow import names_in, value_of
from stayfinite.explain.patch.guards import followed, rewritten
from stayfinite.explain.patch.imports import torch_name
from stayfinite.explain.patch.layout import swapped
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.syntax import (
    called,
    constant,
    in_brackets,
    keyword,
    operand,
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
