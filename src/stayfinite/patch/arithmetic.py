"""Rewrites of divisions, norms, exponentials, matrices, and functions with a domain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from stayfinite import domains
from stayfinite.patch.code import Spot
from stayfinite.patch.edit import (
    Rewrite,
    call_method,
    call_methods,
    guard_rest,
    insert_before,
    replace,
    rewrite,
    set_keyword,
    swap,
)
from stayfinite.records import TensorSummary
from stayfinite.syntax import callee, calls_in, constant, is_call, is_operation, keyword, names_in

_DIVIDE_CALLS = ("div", "true_divide", "divide", "div_", "reciprocal", "reciprocal_")
_COUNTS = re.compile(r"mask|valid|visible|keep|kept|count|num|present|has_|is_|[<>]|[!=]=|~|bool")
_SIZES = re.compile(r"sum\(|norm|std|var|count|abs\(|exp\(|mask|num|total|area|union|size|\bn\b")
_COUNTERS = ("sum", "count_nonzero", "bincount", "histc")
_NUMBERS = re.compile(r"\b(len|math|int|float|item|shape|size)\b")
_MANY = 16  # values that are a fair sample of a sign
_AWAY_FROM_ZERO = "Keep the denominator away from 0."


class Division(NamedTuple):
    whole: ast.AST
    above: ast.expr | None
    below: ast.expr


def divides(spot: Spot) -> bool:
    is_division = spot.op in (*domains.DIVISIONS, "floor_divide")
    return is_division or spot.autograd in ("Div", "Reciprocal")


def divisions(spot: Spot) -> Iterator[Division]:
    """Divisions by what is no number; those nearest to the operation first."""
    seen: set[ast.AST] = set()
    for around in (spot.node, spot.statement):
        for node in ast.walk(around):
            found = None if node in seen else _division(spot, node)
            seen.add(node)
            if found is not None and constant(found.below) is None:
                yield found
        if is_operation(around, ast.Div):
            return


def _division(spot: Spot, node: ast.AST) -> Division | None:
    if is_operation(node, ast.Div, ast.Mod, ast.FloorDiv):
        return Division(node, node.left, node.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return Division(node, None, node.value)
    if not is_call(node, *_DIVIDE_CALLS):
        return None
    first = spot.source.operand(node)
    if callee(node).startswith("reciprocal"):
        return Division(node, None, first) if first is not None else None
    rest = node.args if spot.source.owner_of(node) is not None else node.args[1:]
    below = rest[0] if rest else keyword(node, "other")
    return Division(node, first, below) if below is not None else None


def _denominators_around(spot: Spot, node: ast.AST) -> list[ast.expr]:
    """Those of all divisions of the function that the node is in."""
    scope = ast.walk(spot.source.scope(node))
    return [found.below for each in scope if (found := _division(spot, each))]


def normalise(spot: Spot) -> Iterator[Rewrite]:
    """x / x.norm(dim=d, keepdim=True) to F.normalize(x, dim=d, eps=eps)."""
    source = spot.source
    for whole, above, below in divisions(spot) if divides(spot) else ():
        norm = source.value_of(below)
        inner, dim = _normed(spot, norm)
        if above is None:
            continue
        same = inner is not None and ast.dump(inner) == ast.dump(above)
        if not same or dim is None or constant(dim) is None or not isinstance(whole, ast.expr):
            continue
        f, imports = source.functional
        small = spot.eps("1e-6", half="1e-3")
        text = f"{f}.normalize({source.of(above)}, dim={source.of(dim)}, eps={small})"
        yield rewrite(spot, whole, text, "Normalise with an eps in the norm.", *imports)


def _normed(spot: Spot, norm: ast.expr) -> tuple[ast.expr | None, ast.expr | None]:
    """x and d of x.norm(dim=d) and of sqrt((x ** 2).sum(dim=d)); None where it is neither."""
    source = spot.source
    if is_call(norm, "norm", "vector_norm"):
        return source.operand(norm), keyword(norm, "dim")
    total = source.operand(norm) if is_call(norm, "sqrt") else None
    if is_operation(total, ast.Add) and constant(total.right) is not None:
        total = total.left
    if total is None or not is_call(total, "sum"):
        return None, None
    square = source.operand(total)
    if is_operation(square, ast.Pow) and constant(square.right) == 2:
        return square.left, source.dim(total)
    if is_call(square, "pow", "square"):
        return source.operand(square), source.dim(total)
    if is_operation(square, ast.Mult) and ast.dump(square.left) == ast.dump(square.right):
        return square.left, source.dim(total)
    return None, None


def clamp_denominator(spot: Spot) -> Iterator[Rewrite]:
    """a / b to a / b.clamp_min(eps), where b counts to a / b.clamp_min(1)."""
    source = spot.source
    for _, _, below in divisions(spot) if divides(spot) else ():
        if _is_number(spot):  # a number of Python's has no clamp
            least = "1" if isinstance(spot.fact("scalars", {}).get("other"), int) else "1e-8"
            yield rewrite(spot, below, f"max({source.of(below)}, {least})", _AWAY_FROM_ZERO)
        elif _may_be_negative(spot, below):
            torch, imports = source.torch
            small, x = _small_denominator(spot), source.in_brackets(below)
            text = f"{torch}.where({x}.abs() < {small}, {small}, {source.of(below)})"
            what = "Keep the denominator away from 0, on either side of it."
            yield rewrite(spot, below, text, what, *imports)
        else:
            yield from _clamp_below(spot, below)


def _clamp_below(spot: Spot, below: ast.expr) -> Iterator[Rewrite]:
    """Here, or for a name also where it is made or for all uses that follow."""
    guards = list(_guards(spot, below))
    made = spot.source.assignment(below)
    further: list[Rewrite] = []
    if made is not None:
        what = "Keep it away from 0 where it is made."
        further = [call_method(spot, made.value, guards[0][0], what)]
    if isinstance(below, ast.Name):
        all_below = _denominators_around(spot, below)
        names = [each.id for each in all_below if isinstance(each, ast.Name)]
        if names.count(below.id) > 1:
            yield from further
    for suffix, what in guards:
        yield call_method(spot, below, suffix, what)
    yield from further or guard_rest(spot, below, guards[0][0])


def _is_number(spot: Spot) -> bool:
    """Whether the denominator is a number of Python's."""
    other = spot.fact("scalars", {}).get("other")
    return spot.op == "div" and isinstance(other, (int, float)) and other == 0


def _small_denominator(spot: Spot) -> str:
    return spot.eps("1e-6", half="1e-3", double="1e-12")


def _denominator(spot: Spot) -> TensorSummary | None:
    return spot.input("other") or spot.input("self")


def _may_be_negative(spot: Spot, below: ast.expr) -> bool:
    """Whether it was, or was not seen, or is a difference of which few values were seen."""
    summary = spot.input("other") if spot.is_backward else _denominator(spot)
    if summary is None:
        return spot.is_backward
    is_difference = is_operation(spot.source.value_of(below), ast.Sub)
    return summary.negative_count > 0 or (is_difference and summary.numel < _MANY)


def _guards(spot: Spot, below: ast.expr) -> Iterator[tuple[str, str]]:
    summary = _denominator(spot)
    is_count = summary is not None and summary.dtype.startswith(("int", "uint"))
    if is_count or _looks_like_count(spot, below):
        yield ".clamp_min(1)", "Divide by at least 1 where nothing was counted."
    yield f".clamp_min({_small_denominator(spot)})", _AWAY_FROM_ZERO
    if spot.is_half:
        yield ".float().clamp_min(1e-6)", f"{_AWAY_FROM_ZERO[:-1]}, in float32."
    elif not is_count:
        yield ".clamp_min(1e-3)", _AWAY_FROM_ZERO


def _looks_like_count(spot: Spot, below: ast.expr) -> bool:
    value = spot.source.value_of(below)
    made = [value, *(spot.source.value_of(name) for name in names_in(value))]
    text = " ".join(spot.source.of(each) for each in made)
    is_sum = any(call for each in made for call in calls_in(each, _COUNTERS))
    return is_sum and bool(_COUNTS.search(text.lower()))


def clamp_all_denominators(spot: Spot) -> Iterator[Rewrite]:
    """The same for all divisions of the function, as they may fail one after the other."""
    if not divides(spot) or _is_number(spot):
        return
    below = [each for each in _denominators_around(spot, spot.node) if _is_size(spot, each)]
    if len(below) > 1 and not any(_may_be_negative(spot, own.below) for own in divisions(spot)):
        edits = call_methods(spot.source, below, f".clamp_min({_small_denominator(spot)})")
        yield Rewrite(spot.source, "Keep all denominators of the function away from 0.", edits)


def _is_size(spot: Spot, node: ast.expr) -> bool:
    """Whether it looks like a tensor that cannot be negative."""
    text = ast.unparse(node)
    if constant(node) is not None or _NUMBERS.search(text) or _is_from_shape(spot, node):
        return False
    is_same = any(ast.dump(node) == ast.dump(own.below) for own in divisions(spot))
    return is_same or bool(_SIZES.search(text))


def _is_from_shape(spot: Spot, node: ast.expr) -> bool:
    """Whether it is n of `b, n, _ = x.shape`."""
    names = {each.id for each in names_in(node)}
    for each in ast.walk(spot.source.scope(node)):
        if isinstance(each, ast.Assign) and _NUMBERS.search(spot.source.of(each.value)):
            targets = {name.id for target in each.targets for name in names_in(target)}
            if names and names <= targets:
                return True
    return False


def quotient_in_root(spot: Spot) -> Iterator[Rewrite]:
    """sqrt(a / b) to sqrt(a / b.clamp_min(eps) + eps): 0 / 0 made finite is a root of 0."""
    source = spot.source
    small, eps = _small_denominator(spot), spot.eps("1e-12", half="1e-6")
    for whole, above, below in divisions(spot) if divides(spot) and not spot.is_backward else ():
        if not is_operation(whole, ast.Div) or above is None:
            continue
        roots = (
            each
            for each in source.above(whole)
            if is_call(each, "sqrt", "sqrt_", "rsqrt", "rsqrt_")
        )
        if any(source.operand(root) is whole for root in roots):
            text = f"{source.of(above)} / {source.in_brackets(below)}.clamp_min({small}) + {eps}"
            what = "Keep the denominator away from 0, and the argument of the root too."
            yield rewrite(spot, whole, text, what)


DIVISIONS = (normalise, clamp_denominator, quotient_in_root, clamp_all_denominators)


def norm_at_zero(spot: Spot) -> Iterator[Rewrite]:
    """x.norm(dim=d) to x.pow(2).sum(dim=d).clamp_min(eps).sqrt()."""
    nodes = f"{spot.autograd} {spot.fact('made_in') or ''}"
    if not spot.is_backward or not ("Norm" in nodes or spot.cause == "norm_grad_at_zero"):
        return
    what = "Write the norm with an eps under its root, where the derivative is finite."
    for call, inner in spot.operands(("norm", "vector_norm", "dist")):
        summed = _sum_of_squares(spot, call, inner)
        if summed is not None:
            for small in ("1e-6",) if spot.is_half else ("1e-12", "1e-8"):
                yield rewrite(spot, call, f"({summed} + {small}).sqrt()", what)


def _sum_of_squares(spot: Spot, call: ast.Call, inner: ast.expr) -> str | None:
    """The text that is under the root of a 2-norm; None for any other norm."""
    source = spot.source
    if callee(call) == "dist":
        pair = [source.in_brackets(each) for each in (inner, *source.other_arguments(call)[:1])]
        return f"({' - '.join(pair)}).pow(2).sum()" if len(call.args) < 3 else None
    args = call.args if source.owner_of(call) is not None else call.args[1:]
    named = {item.arg: item.value for item in call.keywords if item.arg not in (None, "input")}
    order = args[0] if args else named.pop("p", named.pop("ord", None))
    if order is not None and constant(order) != 2 and ast.unparse(order) not in ("'fro'", "None"):
        return None
    rest = [source.of(arg) for arg in args[1:]]
    rest += [f"{name}={source.of(value)}" for name, value in named.items() if name != "ord"]
    return f"{source.in_brackets(inner)}.pow(2).sum({', '.join(rest)})"


def hypotenuse(spot: Spot) -> Iterator[Rewrite]:
    """torch.hypot(a, b) to (a.pow(2) + b.pow(2) + eps).sqrt()."""
    what = "Write the length with an eps under its root, where the derivative is finite."
    small = "1e-6" if spot.is_half else "1e-12"
    for call, first in spot.operands(("hypot",)) if spot.autograd == "Hypot" else ():
        for other in spot.source.other_arguments(call)[:1]:
            a, b = (spot.source.in_brackets(each) for each in (first, other))
            yield rewrite(spot, call, f"({a}.pow(2) + {b}.pow(2) + {small}).sqrt()", what)


def spread_of_one(spot: Spot) -> Iterator[Rewrite]:
    """x.std() to x.std(correction=0), which is 0 for a single value."""
    names = (spot.op.startswith(("std", "var")), spot.autograd.startswith(("Std", "Var")))
    if not any(names) and spot.cause != "var_of_single":
        return
    for call in spot.calls(("std", "var", "std_mean", "var_mean")):
        what = f"Use the biased {'variance' if 'var' in callee(call) else 'deviation'}, which "
        what += "is defined for a single value."
        flags = [arg for arg in call.args if isinstance(arg, ast.Constant) and arg.value is True]
        if flags:
            edit = replace(spot.source, flags[0], "False")
        elif any(item.arg == "unbiased" for item in call.keywords):
            edit = set_keyword(spot.source, call, "unbiased", "False")
        else:
            edit = set_keyword(spot.source, call, "correction", "0")
        yield Rewrite(spot.source, what, (edit,))


def spread_at_zero(spot: Spot) -> Iterator[Rewrite]:
    """x.std(...) to (x.var(...) + eps).sqrt()."""
    if not spot.is_backward or spot.autograd not in ("Std", "StdMean", "Sqrt", "Var"):
        return
    small = "1e-6" if spot.is_half else "1e-12"
    for call in spot.calls(["std"]):
        if isinstance(call.func, ast.Attribute):
            text = f"({spot.source.with_name(call, 'var')} + {small}).sqrt()"
            yield rewrite(spot, call, text, "Put an eps under the root of the standard deviation.")


NORMS = (norm_at_zero, hypotenuse, spread_of_one, spread_at_zero)


def _small_argument(spot: Spot) -> str:
    return spot.eps("1e-8", half="1e-4", double="1e-12")


def clamp_logarithm(spot: Spot) -> Iterator[Rewrite]:
    """log(x) to log(x.clamp_min(eps))."""
    if not spot.ran(domains.LOGS):
        return
    what = "Keep the argument of the logarithm above 0."
    if (lowest := _lowest(spot)) is not None:
        what += _hides(
            f"the argument is negative, down to {lowest:.3g}",
            "keep it positive by construction, as F.softplus does",
        )
    guard = f".clamp_min({_small_argument(spot)})"
    for _, inner in spot.operands(domains.LOGS):
        yield call_method(spot, inner, guard, what)
        yield from guard_rest(spot, inner, guard)
        if spot.is_half:
            yield call_method(spot, inner, ".float().clamp_min(1e-6)", f"{what[:-1]}, in float32.")
    yield from _clamp_all(
        spot, domains.LOGS, guard, "Keep the arguments of the logarithms above 0."
    )


def clamp_ratio(spot: Spot) -> Iterator[Rewrite]:
    """log(p / q) with both sides kept above 0."""
    if spot.cause not in ("kl_of_zero", "log_of_zero", "division_by_zero"):
        return
    guard = f".clamp_min({_small_argument(spot)})"
    for call in calls_in(spot.statement, domains.LOGS):
        inner = spot.source.operand(call)
        if is_operation(inner, ast.Div):
            edits = call_methods(spot.source, (inner.left, inner.right), guard)
            what = "Keep both sides of the ratio above 0 before its logarithm."
            yield Rewrite(spot.source, what, edits)


def _clamp_all(spot: Spot, names: tuple[str, ...], guard: str, what: str) -> Iterator[Rewrite]:
    """The same guard for all such calls of the statement, then of the function."""
    for around in (spot.statement, spot.source.scope(spot.node)):
        inner = [spot.source.operand(call) for call in calls_in(around, names)]
        edits = call_methods(spot.source, inner, guard)
        if len(edits) > 1:
            yield Rewrite(spot.source, what, edits)


def clamp_root(spot: Spot) -> Iterator[Rewrite]:
    """sqrt(x) to sqrt(x.clamp_min(eps)), which has a finite derivative too."""
    if not spot.ran(domains.ROOTS):
        return
    what = "Keep the argument of the square root above 0, where its derivative is finite."
    seen = spot.input("self")
    if (lowest := _lowest(spot)) is not None and seen is not None:
        if _is_difference_of_squares(spot):
            what += _hides("the variance is rounded below 0", "be `x.var(..., correction=0)`")
        elif lowest < -1e-4 * max(1e-30, seen.max or 0.0):
            what += _hides(
                f"the argument is negative, down to {lowest:.3g}", "not be negative there"
            )
    for _, inner in spot.operands(domains.ROOTS):
        if constant(inner) is None:
            for guard in _root_guards(spot):
                yield call_method(spot, inner, guard, what)
    what = f"Keep the arguments of the square roots above 0.{what[what.find('.') + 1 :]}"
    yield from _clamp_all(spot, domains.ROOTS, _root_guards(spot)[0], what)


def _root_guards(spot: Spot) -> tuple[str, str]:
    small, larger = ("1e-6", "1e-4") if spot.is_half else ("1e-12", "1e-8")
    return f".clamp_min({small})", f".clamp_min({larger})"


def clamp_to_domain(spot: Spot) -> Iterator[Rewrite]:
    """log1p at -1, logit at 0 and 1, acos and its like at -1 and 1, acosh at 1."""
    edge = spot.eps("1e-6", half="1e-3")
    inside = f".clamp(-1 + {edge}, 1 - {edge})"
    inside_what = "Keep the argument of {} inside (-1, 1)."
    if spot.is_backward:
        inside_what = "Keep the argument away from -1 and 1, where the derivative is infinite."
    logit_what = "Keep the probability away from 0 and 1 before logit."
    for names, guard, what in (
        (("log1p",), f".clamp_min(-1 + {edge})", "Keep the argument of log1p above -1."),
        (("logit",), f".clamp({edge}, 1 - {edge})", logit_what),
        (domains.ARCS, inside, inside_what),
        (domains.ARCS_OF_LARGE, f".clamp_min(1 + {edge})", "Keep acosh above 1."),
    ):
        for call, inner in spot.operands(names) if spot.ran(names) else ():
            yield call_method(spot, inner, guard, what.format(callee(call)) + _far_outside(spot))


def _lowest(spot: Spot) -> float | None:
    """The most negative argument, if one is negative and this is the forward pass."""
    seen = spot.input("self")
    return seen.min if seen is not None and seen.negative_count and not spot.is_backward else None


def _hides(fact: str, better: str) -> str:
    """For a change with which a wrong formula is finite, and still wrong."""
    return f" This hides that {fact}; the formula should {better}."


def _is_difference_of_squares(spot: Spot) -> bool:
    """Whether the root is of E[x ** 2] - E[x] ** 2."""
    for _, inner in spot.operands(domains.ROOTS):
        value = spot.source.value_of(inner)
        if is_operation(value, ast.Sub):
            sides = [spot.source.value_of(side) for side in (value.left, value.right)]
            squares = [n for side in sides for n in ast.walk(side) if _is_square(n)]
            means = [call for side in sides for call in calls_in(side, ("mean",))]
            return bool(squares and means)
    return False


def _is_square(node: ast.AST) -> bool:
    if is_call(node, "square"):
        return True
    if is_call(node, "pow"):
        return any(constant(arg) == 2 for arg in node.args)
    return is_operation(node, ast.Pow) and constant(node.right) == 2


def _far_outside(spot: Spot) -> str:
    """What a clamp hides where a cosine is outside of its range by more than rounding."""
    seen = spot.input("self")
    worst = 0.0 if seen is None else max(abs(seen.min or 0.0), abs(seen.max or 0.0))
    if not spot.ran(domains.ARCS) or spot.is_backward or worst < 1 + 1e-3:
        return ""
    fact = f"the argument reaches {worst:.4g}"
    return _hides(fact, "give a cosine, of two vectors of length 1 (F.normalize)")


def clamp_power(spot: Spot) -> Iterator[Rewrite]:
    """x ** p with a negative base, or a base of 0 where the derivative is infinite."""
    if spot.op not in domains.POWERS and not spot.autograd.startswith("Pow"):
        return
    if spot.cause in ("low_precision_overflow", "lr_too_high") or _has_overflowed(spot):
        return
    seen = spot.input("self")
    guard = f".clamp_min({_small_argument(spot)})"
    for whole, base, exponent in powers(spot):
        above_zero = call_method(spot, base, guard, "Keep the base of the power above 0.")
        if seen is None or not seen.negative_count:
            yield above_zero
            continue
        x, p = spot.source.in_brackets(base), spot.source.of(exponent)
        # At 0 the derivative of a root is infinite.
        size = f"{x}.abs(){guard if seen.zero_count else ''}"
        if isinstance(whole, ast.Call):
            raised = f"{size}.pow({p})"
        else:
            is_plain = isinstance(exponent, (ast.Name, ast.Constant))
            raised = f"{size} ** {p if is_plain else f'({p})'}"
        edit = swap(spot.source, whole, f"{x}.sign() * {raised}")
        what = "Raise the magnitude to the power, and give it back its sign."
        signed = Rewrite(spot.source, what, (edit,))
        yield from (above_zero, signed) if spot.is_backward else (signed, above_zero)


def _has_overflowed(spot: Spot) -> bool:
    """Whether a positive power passed the type's limit: then the base is too large, not too low."""
    exponent = spot.fact("scalars", {}).get("exponent")
    is_positive = isinstance(exponent, (int, float)) and exponent > 0
    made = spot.origin.outputs
    return not spot.is_backward and is_positive and bool(made) and not made[0].nan_count


def powers(spot: Spot) -> Iterator[tuple[ast.expr, ast.expr, ast.expr]]:
    """(the power, its base, its exponent) of each power in the expression or statement."""
    for around in (spot.node, spot.statement):
        for node in ast.walk(around):
            if is_operation(node, ast.Pow):
                yield node, node.left, node.right
    for call, base in spot.operands(domains.POWERS):
        rest = [arg for arg in (*call.args, *(k.value for k in call.keywords)) if arg is not base]
        if rest:
            yield call, base, rest[0]


def clamp_upstream(spot: Spot) -> Iterator[Rewrite]:
    """The value comes from a root that is 0 there: the root is kept above 0, and both with it."""
    for name in names_in(spot.node) if spot.is_backward else ():
        value = spot.source.value_of(name)
        roots = [spot.source.operand(call) for call in calls_in(value, domains.ROOTS)]
        edits = call_methods(spot.source, roots, _root_guards(spot)[0])
        if value is not name and edits:
            what = "Keep the square root that it comes from above 0."
            yield Rewrite(spot.source, what, edits)


DOMAINS = (clamp_logarithm, clamp_root, clamp_to_domain, clamp_power, clamp_upstream)


def write_sigmoid(spot: Spot) -> Iterator[Rewrite]:
    """1 / (1 + exp(-x)) and exp(x) / (1 + exp(x)) to sigmoid(x)."""
    if not spot.ran(domains.EXPONENTIALS) and spot.op not in ("div", "reciprocal", "add"):
        return
    torch, imports = spot.source.torch
    for node in _quotients_near(spot):
        found = _sigmoid_argument(spot, node)
        if found is not None:
            text = f"{torch}.sigmoid({found})"
            yield rewrite(spot, node, text, "Use sigmoid, which does not overflow.", *imports)


def _quotients_near(spot: Spot) -> Iterator[ast.BinOp]:
    """Quotients of the function that the operation is part of, also by a name, or that it holds."""
    for node in spot.function_nodes():
        if not is_operation(node, ast.Div):
            continue
        values = (spot.source.value_of(name) for name in names_in(node))
        inside = {id(each) for part in (node, *values) for each in ast.walk(part)}
        if id(spot.node) in inside or any(each is node for each in ast.walk(spot.node)):
            yield node


def _sigmoid_argument(spot: Spot, node: ast.BinOp) -> str | None:
    """x of a sigmoid that is written out."""
    source = spot.source
    above, below = source.value_of(node.left), source.value_of(node.right)
    if not is_operation(below, ast.Add):
        return None
    for one, other in ((below.left, below.right), (below.right, below.left)):
        call = source.value_of(other)
        if constant(one) == 1 and is_call(call, "exp"):
            exponent = source.operand(call)
            break
    else:
        return None
    if exponent is None:
        return None
    if constant(above) == 1:
        if isinstance(exponent, ast.UnaryOp) and isinstance(exponent.op, ast.USub):
            return source.one_line(exponent.operand)
        return f"-({source.one_line(exponent)})"
    inner = source.operand(above) if is_call(above, "exp") else None
    is_same = inner is not None and ast.dump(inner) == ast.dump(exponent)
    return source.one_line(exponent) if is_same else None


def write_softmax(spot: Spot) -> Iterator[Rewrite]:
    """exp(x) / exp(x).sum(dim=d, keepdim=True) to softmax(x, dim=d)."""
    if not spot.ran(domains.EXPONENTIALS) and spot.op not in ("div", "sum"):
        return
    torch, imports = spot.source.torch
    for node in _quotients_near(spot):
        above = spot.source.value_of(node.left)
        total, dim = _sum_below(spot, node)
        if not is_call(above, "exp") or total is None:
            continue
        inner = spot.source.operand(above)
        same = ast.dump(spot.source.value_of(total)) == ast.dump(above)
        if same and inner is not None and dim is not None:
            text = f"{torch}.softmax({spot.source.one_line(inner)}, dim={dim})"
            yield rewrite(spot, node, text, "Use softmax, which does not overflow.", *imports)


def _sum_below(spot: Spot, node: ast.BinOp) -> tuple[ast.expr | None, str | None]:
    """What a quotient's denominator sums, and the dim as it is written."""
    below = spot.source.value_of(node.right)
    if not is_call(below, "sum"):
        return None, None
    dim = spot.source.dim(below)
    return spot.source.operand(below), spot.source.of(dim) if dim is not None else None


def subtract_maximum(spot: Spot) -> Iterator[Rewrite]:
    """exp(x) that is divided by its own sum: exp(x - max), which has the same ratio."""
    target = spot.target
    if not spot.ran(domains.EXPONENTIALS) or not isinstance(target, ast.Name):
        return
    for node in spot.function_nodes():
        if not is_operation(node, ast.Div):
            continue
        total, dim = _sum_below(spot, node)
        same = isinstance(total, ast.Name) and total.id == target.id == getattr(node.left, "id", "")
        for _, inner in spot.operands(["exp"]) if same and dim is not None else ():
            x = spot.source.in_brackets(inner)
            text = f"{x} - {x}.amax(dim={dim}, keepdim=True)"
            what = "Subtract the maximum before the exponential, which leaves the ratios."
            yield rewrite(spot, inner, text, what)


def bound_shared_exponent(spot: Spot) -> Iterator[Rewrite]:
    """Several exponentials of one variable: the variable is bounded before all of them."""
    if not spot.ran(domains.EXPONENTIALS):
        return
    source = spot.source
    calls = list(calls_in(source.scope(spot.node), ["exp"]))
    inside = [inner for call in calls if (inner := source.operand(call)) is not None]
    names = [{each.id for each in names_in(node)} for node in inside]
    if len(names) < 3 or len(set.union(*names)) != 1:
        return
    (name,) = names[0]
    statements = [found for call in calls if (found := source.statement(call))]
    first = min(statements, key=lambda statement: statement.lineno)
    line = f"{name} = {name}.clamp(max={2 if spot.is_half else 20})"
    what = f"Bound {name} before the exponentials, which overflow together."
    yield Rewrite(source, what, (insert_before(source, first, line),))


def bound_in_loss(spot: Spot) -> Iterator[Rewrite]:
    """poisson_nll_loss(x, y), which exponentiates x."""
    inside = str(spot.fact("inside"))
    if not spot.ran(domains.EXPONENTIALS) or "nn/functional.py" not in inside:
        return
    if isinstance(spot.node, ast.Call) and spot.node.args:
        for limit in _limits(spot):
            what = "Bound what the loss exponentiates."
            yield call_method(spot, spot.node.args[0], f".clamp(max={limit})", what)


def _limits(spot: Spot) -> tuple[str, str]:
    return ("10", "5") if spot.is_half else ("20", "8")


def bound_exponent(spot: Spot) -> Iterator[Rewrite]:
    """exp(x) to exp(x.clamp(max=20))."""
    if not spot.ran(domains.EXPONENTIALS):
        return
    for call, inner in spot.operands(domains.EXPONENTIALS):
        for limit in _limits(spot):
            sides = f"-{limit}, {limit}" if callee(call) in ("sinh", "cosh") else f"max={limit}"
            yield call_method(
                spot, inner, f".clamp({sides})", f"Bound the exponent.{_growth(spot)}"
            )


def _growth(spot: Spot) -> str:
    """What a bound hides where the exponent is beyond what any input should give."""
    if spot.cause == "checkpoint_precision_loss":
        return " This hides that the state that was loaded is wrong; load one that is not."
    seen = spot.input("self")
    if seen is None or seen.max is None or spot.is_half or seen.max < 200:
        return ""
    fact = f"the exponent reaches {seen.max:.4g}"
    return _hides(fact, "stay in log space, or use softplus instead of exp")


def bound_variable(spot: Spot) -> Iterator[Rewrite]:
    """Bound the variable itself, where it is used again after this exponential."""
    for _, inner in spot.operands(["exp"]) if spot.ran(domains.EXPONENTIALS) else ():
        names = {each.id for each in names_in(inner)} - {*spot.source.imported, "self"}
        if len(names) != 1:
            continue
        (name,) = names
        if any(spot.source.readers(name, after=spot.statement)):
            line = f"{name} = {name}.clamp(max={_limits(spot)[0]})"
            edit = insert_before(spot.source, spot.statement, line)
            what = f"Bound {name} before all that exponentiates it."
            yield Rewrite(spot.source, what, (edit,))


EXPONENTIALS = (
    write_sigmoid,
    write_softmax,
    subtract_maximum,
    bound_shared_exponent,
    bound_in_loss,
    bound_exponent,
    bound_variable,
)


def use_safe_operation(spot: Spot) -> Iterator[Rewrite]:
    """torch.log(x) to stayfinite.safe_log(x)."""
    found: list[tuple[ast.expr, str, tuple[ast.expr, ...]]] = []
    name = spot.op or spot.autograd.lower()
    if name in ("log", "sqrt", "acos"):
        found += [(call, f"safe_{name}", (inner,)) for call, inner in spot.operands([name])]
    for whole, above, below in divisions(spot) if divides(spot) else ():
        if isinstance(whole, ast.expr) and above is not None:
            found.append((whole, "safe_div", (above, below)))
    if name.startswith("pow"):
        found += [(power, "safe_pow", (base, by)) for power, base, by in powers(spot)]
    for node, safe, args in found:
        given = ", ".join(spot.source.of(arg) for arg in args)
        what = f"Use stayfinite.{safe}, which is finite there and has a finite derivative."
        yield rewrite(spot, node, f"stayfinite.{safe}({given})", what, "import stayfinite")


_SPECTRA = ("svd", "svdvals", "eigh", "eig")
_SQUARE = ("cholesky", "cholesky_ex", "inv", "inv_ex", "inverse", "solve")
_DETERMINANTS = ("det", "logdet", "slogdet")
_ANY = ("qr", "pinv", "lstsq")


def magnitude_of_determinant(spot: Spot) -> Iterator[Rewrite]:
    """torch.logdet(x) to torch.linalg.slogdet(x)[1], which a negative determinant has too."""
    if spot.cause not in ("degenerate_linalg", "log_of_negative"):
        return
    torch, imports = spot.source.torch
    for call, inner in spot.operands(("logdet",)):
        text = f"{torch}.linalg.slogdet({spot.source.of(inner)})[1]"
        what = "Take the logarithm of the determinant's magnitude, whatever its sign."
        yield rewrite(spot, call, text, what, *imports)


def add_diagonal(spot: Spot) -> Iterator[Rewrite]:
    """A degenerate matrix gets a small diagonal, with distinct entries where they must differ."""
    if spot.cause != "degenerate_linalg":
        return
    source, (torch, _) = spot.source, spot.source.torch
    what = "Add a small diagonal, so that the matrix is not degenerate."
    for call in calls_in(spot.node, (*_SPECTRA, *_SQUARE, *_DETERMINANTS, *_ANY)):
        if not call.args:
            continue
        matrix = call.args[0]
        x = source.in_brackets(matrix)
        if callee(call) in _SPECTRA:
            diagonal = f"{torch}.diag({torch}.arange(1.0, {x}.shape[-1] + 1))"
        elif callee(call) in _ANY:
            diagonal = f"{torch}.eye(*{x}.shape[-2:])"
        else:
            diagonal = f"{torch}.eye({x}.shape[-1])"
        for size in ("1e-6", "1e-3"):
            added = f"{x} + {size} * {diagonal}.to({source.of(matrix)})"
            if isinstance(matrix, ast.Name):
                edit = insert_before(source, spot.statement, f"{x} = {added}")
                yield Rewrite(source, what, (edit,))
            else:
                yield rewrite(spot, matrix, added, what)


MATRICES = (magnitude_of_determinant, add_diagonal)
