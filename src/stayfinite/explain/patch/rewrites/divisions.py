"""Divisions: the denominator is kept away from 0."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.flow import assignment, names_in, value_of
from stayfinite.explain.patch.guards import eps, followed, for_the_rest, rewritten
from stayfinite.explain.patch.imports import functional, torch_name
from stayfinite.explain.patch.layout import swapped
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.syntax import (
    called,
    calls_in,
    constant,
    in_brackets,
    is_method,
    keyword,
    operand,
)
from stayfinite.records import TensorSummary

_OPS = ("div", "true_divide", "reciprocal", "rsqrt", "remainder", "fmod", "floor_divide")
_CALLS = ("div", "true_divide", "divide", "div_", "reciprocal", "reciprocal_")
_NORMS = ("norm", "vector_norm")
_COUNTS = re.compile(r"mask|valid|visible|keep|kept|count|num|present|has_|is_|[<>]|[!=]=|~|bool")
_SIZES = re.compile(r"sum\(|norm|std|var|count|abs\(|exp\(|mask|num|total|area|union|size|\bn\b")
_COUNTERS = ("sum", "count_nonzero", "bincount", "histc")
_NUMBERS = re.compile(r"\b(len|math|int|float|item|shape|size)\b")
_MANY = 16  # values that are a fair sample of a sign
Division = tuple[ast.AST, ast.expr | None, ast.expr]


def divides(site: Site) -> bool:
    return site.op in _OPS or site.autograd in ("Div", "Reciprocal", "RemainderBackward")


def divisions(site: Site) -> Iterator[Division]:
    """(the division, its numerator, its denominator); those nearest to the operation first."""
    seen: set[ast.AST] = set()
    for around in (site.node, site.statement):
        for node in ast.walk(around):
            found = None if node in seen else _division(site, node)
            seen.add(node)
            if found is not None and constant(found[2]) is None:
                yield found
        if seen and isinstance(around, ast.BinOp) and isinstance(around.op, ast.Div):
            return


def _division(site: Site, node: ast.AST) -> Division | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mod, ast.FloorDiv)):
        return node, node.left, node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node, None, node.value
    if not isinstance(node, ast.Call) or called(node) not in _CALLS:
        return None
    first = operand(site.source, node)
    if called(node).startswith("reciprocal"):
        return (node, None, first) if first is not None else None
    rest = node.args if is_method(site.source, node) else node.args[1:]
    below = rest[0] if rest else keyword(node, "other")
    return (node, first, below) if below is not None else None


def normalised(site: Site) -> Iterator[Change]:
    """x / x.norm(dim=d, keepdim=True) to F.normalize(x, dim=d, eps=eps)."""
    if not divides(site):
        return
    for whole, above, below in divisions(site):
        norm = value_of(site.source, below)
        if not isinstance(norm, ast.Call) or called(norm) not in _NORMS or above is None:
            continue
        inner, dim = operand(site.source, norm), keyword(norm, "dim")
        same = inner is not None and ast.dump(inner) == ast.dump(above)
        if not same or dim is None or constant(dim) is None or not isinstance(whole, ast.expr):
            continue
        f, imports = functional(site.source)
        small = eps(site, single="1e-6", half="1e-3")
        text = f"{f}.normalize({site.source.of(above)}, dim={site.source.of(dim)}, eps={small})"
        yield rewritten(site, whole, text, "Normalise with an eps in the norm.", *imports)


def denominator(site: Site) -> Iterator[Change]:
    """a / b to a / b.clamp_min(eps), where b counts to a / b.clamp_min(1)."""
    if not divides(site):
        return
    for _, _, below in divisions(site):
        if _is_number(site):
            yield _at_least(site, below)
        elif _may_be_negative(site, below):
            yield _moved_away(site, below)
        else:
            yield from _kept_above(site, below)


def _at_least(site: Site, below: ast.expr) -> Change:
    """A number of Python's has no clamp."""
    least = "1" if isinstance(site.fact("scalars", {}).get("other"), int) else "1e-8"
    text = f"max({site.source.of(below)}, {least})"
    return rewritten(site, below, text, "Keep the denominator away from 0.")


def _kept_above(site: Site, below: ast.expr) -> Iterator[Change]:
    """Here, or for a name also where it is made or for all uses that follow."""
    guards = list(_guards(site, below))
    made = assignment(site.source, below) if isinstance(below, ast.Name) else None
    further: list[Change] = []
    if made is not None:
        what = "Keep it away from 0 where it is made."
        further = [followed(site, made.value, guards[0][0], what)]
    if _divides_again(site, below):
        yield from further
    for suffix, what in guards:
        yield followed(site, below, suffix, what)
    yield from further or for_the_rest(site, below, guards[0][0])


def _divides_again(site: Site, below: ast.expr) -> bool:
    """Whether the same name is a denominator more than once in the function."""
    found = [_division(site, node) for node in ast.walk(site.source.scope(below))]
    names = [each[2].id for each in found if each and isinstance(each[2], ast.Name)]
    return isinstance(below, ast.Name) and names.count(below.id) > 1


def _is_number(site: Site) -> bool:
    """Whether the denominator is a number of Python's."""
    other = site.fact("scalars", {}).get("other")
    return site.op == "div" and isinstance(other, (int, float)) and other == 0


def _below(site: Site) -> TensorSummary | None:
    return site.input("other") or site.input("self")


def _may_be_negative(site: Site, below: ast.expr) -> bool:
    """Whether it was, or was not seen, or is a difference of which few values were seen."""
    summary = site.input("other") if site.is_backward else _below(site)
    if summary is None:
        return site.is_backward
    value = value_of(site.source, below)
    is_difference = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub)
    return summary.negative_count > 0 or (is_difference and summary.numel < _MANY)


def _guards(site: Site, below: ast.expr) -> Iterator[tuple[str, str]]:
    summary = _below(site)
    is_count = summary is not None and summary.dtype.startswith(("int", "uint"))
    counts = (".clamp_min(1)", "Divide by at least 1 where nothing was counted.")
    if is_count or _looks_like_count(site, below):
        yield counts
    small = eps(site, single="1e-6", half="1e-3", double="1e-12")
    what = "Keep the denominator away from 0."
    yield f".clamp_min({small})", what
    if site.is_half:
        yield ".float().clamp_min(1e-6)", f"{what[:-1]}, in float32."
    elif not is_count:
        yield ".clamp_min(1e-3)", what


def _looks_like_count(site: Site, below: ast.expr) -> bool:
    value = value_of(site.source, below)
    made = [value, *(value_of(site.source, name) for name in names_in(value))]
    sums = [call for each in made for call in calls_in(each, _COUNTERS)]
    text = " ".join(site.source.of(each) for each in made)
    return bool(sums) and bool(_COUNTS.search(text.lower()))


def _moved_away(site: Site, below: ast.expr) -> Change:
    torch, imports = torch_name(site.source)
    small = eps(site, single="1e-6", half="1e-3", double="1e-12")
    x = in_brackets(site.source, below)
    text = f"{torch}.where({x}.abs() < {small}, {small}, {site.source.of(below)})"
    what = "Keep the denominator away from 0, on either side of it."
    return rewritten(site, below, text, what, *imports)


def all_denominators(site: Site) -> Iterator[Change]:
    """The same for all divisions of the function, as they may fail one after the other."""
    if not divides(site) or _is_number(site):
        return
    small = eps(site, single="1e-6", half="1e-3", double="1e-12")
    found = [_division(site, node) for node in ast.walk(site.source.scope(site.node))]
    below = [each[2] for each in found if each is not None and _is_size(site, each[2])]
    if any(_may_be_negative(site, own) for _, _, own in divisions(site)):
        return
    if len(below) > 1:
        edits = tuple(
            swapped(site.source, each, f"{in_brackets(site.source, each)}.clamp_min({small})")
            for each in below
        )
        yield Change(site.source, "Keep all denominators of the function away from 0.", edits)


def _is_size(site: Site, node: ast.expr) -> bool:
    """Whether it looks like a tensor that cannot be negative."""
    if constant(node) is not None or _unpacked_from_shape(site, node):
        return False
    text = ast.unparse(node)
    is_number = _NUMBERS.search(text)
    is_same = any(ast.dump(node) == ast.dump(own) for _, _, own in divisions(site))
    return not is_number and (is_same or bool(_SIZES.search(text)))


def _unpacked_from_shape(site: Site, node: ast.expr) -> bool:
    """Whether it is n of `b, n, _ = x.shape`."""
    names = {each.id for each in names_in(node)}
    for each in ast.walk(site.source.scope(node)):
        if isinstance(each, ast.Assign) and _NUMBERS.search(site.source.of(each.value)):
            targets = {name.id for target in each.targets for name in names_in(target)}
            if names and names <= targets:
                return True
    return False


DIVISIONS = (normalised, denominator, all_denominators)
