"""Rewrites of divisions, norms, exponentials, matrices, and functions with a domain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from stayfinite import domains
from stayfinite.patch.code import Site
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
from stayfinite.syntax import called, calls_in, constant, keyword, names_in

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


def divides(site: Site) -> bool:
    is_division = site.op in (*domains.DIVISIONS, "floor_divide")
    return is_division or site.autograd in ("Div", "Reciprocal")


def divisions(site: Site) -> Iterator[Division]:
    """Divisions by what is no number; those nearest to the operation first."""
    seen: set[ast.AST] = set()
    for around in (site.node, site.statement):
        for node in ast.walk(around):
            found = None if node in seen else _division(site, node)
            seen.add(node)
            if found is not None and constant(found.below) is None:
                yield found
        if isinstance(around, ast.BinOp) and isinstance(around.op, ast.Div):
            return


def _division(site: Site, node: ast.AST) -> Division | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mod, ast.FloorDiv)):
        return Division(node, node.left, node.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return Division(node, None, node.value)
    if not isinstance(node, ast.Call) or called(node) not in _DIVIDE_CALLS:
        return None
    first = site.source.operand(node)
    if called(node).startswith("reciprocal"):
        return Division(node, None, first) if first is not None else None
    rest = node.args if site.source.owner_of(node) is not None else node.args[1:]
    below = rest[0] if rest else keyword(node, "other")
    return Division(node, first, below) if below is not None else None


def _denominators_around(site: Site, node: ast.AST) -> list[ast.expr]:
    """Those of all divisions of the function that the node is in."""
    scope = ast.walk(site.source.scope(node))
    return [found.below for each in scope if (found := _division(site, each))]


def normalise(site: Site) -> Iterator[Rewrite]:
    """x / x.norm(dim=d, keepdim=True) to F.normalize(x, dim=d, eps=eps)."""
    source = site.source
    for whole, above, below in divisions(site) if divides(site) else ():
        norm = source.value_of(below)
        if not isinstance(norm, ast.Call) or above is None:
            continue
        if called(norm) not in ("norm", "vector_norm"):
            continue
        inner, dim = source.operand(norm), keyword(norm, "dim")
        same = inner is not None and ast.dump(inner) == ast.dump(above)
        if not same or dim is None or constant(dim) is None or not isinstance(whole, ast.expr):
            continue
        f, imports = source.functional
        small = site.eps("1e-6", half="1e-3")
        text = f"{f}.normalize({source.of(above)}, dim={source.of(dim)}, eps={small})"
        yield rewrite(site, whole, text, "Normalise with an eps in the norm.", *imports)


def clamp_denominator(site: Site) -> Iterator[Rewrite]:
    """a / b to a / b.clamp_min(eps), where b counts to a / b.clamp_min(1)."""
    source = site.source
    for _, _, below in divisions(site) if divides(site) else ():
        if _is_number(site):  # a number of Python's has no clamp
            least = "1" if isinstance(site.fact("scalars", {}).get("other"), int) else "1e-8"
            yield rewrite(site, below, f"max({source.of(below)}, {least})", _AWAY_FROM_ZERO)
        elif _may_be_negative(site, below):
            torch, imports = source.torch
            small, x = _small_denominator(site), source.in_brackets(below)
            text = f"{torch}.where({x}.abs() < {small}, {small}, {source.of(below)})"
            what = "Keep the denominator away from 0, on either side of it."
            yield rewrite(site, below, text, what, *imports)
        else:
            yield from _clamp_below(site, below)


def _clamp_below(site: Site, below: ast.expr) -> Iterator[Rewrite]:
    """Here, or for a name also where it is made or for all uses that follow."""
    guards = list(_guards(site, below))
    made = site.source.assignment(below)
    further: list[Rewrite] = []
    if made is not None:
        what = "Keep it away from 0 where it is made."
        further = [call_method(site, made.value, guards[0][0], what)]
    if isinstance(below, ast.Name):
        all_below = _denominators_around(site, below)
        names = [each.id for each in all_below if isinstance(each, ast.Name)]
        if names.count(below.id) > 1:
            yield from further
    for suffix, what in guards:
        yield call_method(site, below, suffix, what)
    yield from further or guard_rest(site, below, guards[0][0])


def _is_number(site: Site) -> bool:
    """Whether the denominator is a number of Python's."""
    other = site.fact("scalars", {}).get("other")
    return site.op == "div" and isinstance(other, (int, float)) and other == 0


def _small_denominator(site: Site) -> str:
    return site.eps("1e-6", half="1e-3", double="1e-12")


def _denominator(site: Site) -> TensorSummary | None:
    return site.input("other") or site.input("self")


def _may_be_negative(site: Site, below: ast.expr) -> bool:
    """Whether it was, or was not seen, or is a difference of which few values were seen."""
    summary = site.input("other") if site.is_backward else _denominator(site)
    if summary is None:
        return site.is_backward
    value = site.source.value_of(below)
    is_difference = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub)
    return summary.negative_count > 0 or (is_difference and summary.numel < _MANY)


def _guards(site: Site, below: ast.expr) -> Iterator[tuple[str, str]]:
    summary = _denominator(site)
    is_count = summary is not None and summary.dtype.startswith(("int", "uint"))
    if is_count or _looks_like_count(site, below):
        yield ".clamp_min(1)", "Divide by at least 1 where nothing was counted."
    yield f".clamp_min({_small_denominator(site)})", _AWAY_FROM_ZERO
    if site.is_half:
        yield ".float().clamp_min(1e-6)", f"{_AWAY_FROM_ZERO[:-1]}, in float32."
    elif not is_count:
        yield ".clamp_min(1e-3)", _AWAY_FROM_ZERO


def _looks_like_count(site: Site, below: ast.expr) -> bool:
    value = site.source.value_of(below)
    made = [value, *(site.source.value_of(name) for name in names_in(value))]
    text = " ".join(site.source.of(each) for each in made)
    is_sum = any(call for each in made for call in calls_in(each, _COUNTERS))
    return is_sum and bool(_COUNTS.search(text.lower()))


def clamp_all_denominators(site: Site) -> Iterator[Rewrite]:
    """The same for all divisions of the function, as they may fail one after the other."""
    if not divides(site) or _is_number(site):
        return
    below = [each for each in _denominators_around(site, site.node) if _is_size(site, each)]
    if len(below) > 1 and not any(_may_be_negative(site, own.below) for own in divisions(site)):
        edits = call_methods(site.source, below, f".clamp_min({_small_denominator(site)})")
        yield Rewrite(site.source, "Keep all denominators of the function away from 0.", edits)


def _is_size(site: Site, node: ast.expr) -> bool:
    """Whether it looks like a tensor that cannot be negative."""
    text = ast.unparse(node)
    if constant(node) is not None or _NUMBERS.search(text) or _is_from_shape(site, node):
        return False
    is_same = any(ast.dump(node) == ast.dump(own.below) for own in divisions(site))
    return is_same or bool(_SIZES.search(text))


def _is_from_shape(site: Site, node: ast.expr) -> bool:
    """Whether it is n of `b, n, _ = x.shape`."""
    names = {each.id for each in names_in(node)}
    for each in ast.walk(site.source.scope(node)):
        if isinstance(each, ast.Assign) and _NUMBERS.search(site.source.of(each.value)):
            targets = {name.id for target in each.targets for name in names_in(target)}
            if names and names <= targets:
                return True
    return False


DIVISIONS = (normalise, clamp_denominator, clamp_all_denominators)


def norm_at_zero(site: Site) -> Iterator[Rewrite]:
    """x.norm(dim=d) to x.pow(2).sum(dim=d).clamp_min(eps).sqrt()."""
    nodes = f"{site.autograd} {site.fact('made_in') or ''}"
    if not site.is_backward or not ("Norm" in nodes or site.cause == "norm_grad_at_zero"):
        return
    what = "Write the norm with an eps under its root, where the derivative is finite."
    for call, inner in site.operands(("norm", "vector_norm", "dist")):
        summed = _sum_of_squares(site, call, inner)
        if summed is not None:
            for small in ("1e-6",) if site.is_half else ("1e-12", "1e-8"):
                yield rewrite(site, call, f"({summed} + {small}).sqrt()", what)


def _sum_of_squares(site: Site, call: ast.Call, inner: ast.expr) -> str | None:
    """The text that is under the root of a 2-norm; None for any other norm."""
    source = site.source
    if called(call) == "dist":
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


def hypotenuse(site: Site) -> Iterator[Rewrite]:
    """torch.hypot(a, b) to (a.pow(2) + b.pow(2) + eps).sqrt()."""
    what = "Write the length with an eps under its root, where the derivative is finite."
    small = "1e-6" if site.is_half else "1e-12"
    for call, first in site.operands(("hypot",)) if site.autograd == "Hypot" else ():
        for other in site.source.other_arguments(call)[:1]:
            a, b = (site.source.in_brackets(each) for each in (first, other))
            yield rewrite(site, call, f"({a}.pow(2) + {b}.pow(2) + {small}).sqrt()", what)


def spread_of_one(site: Site) -> Iterator[Rewrite]:
    """x.std() to x.std(correction=0), which is 0 for a single value."""
    names = (site.op.startswith(("std", "var")), site.autograd.startswith(("Std", "Var")))
    if not any(names) and site.cause != "var_of_single":
        return
    for call in site.calls(("std", "var", "std_mean", "var_mean")):
        what = f"Use the biased {'variance' if 'var' in called(call) else 'deviation'}, which "
        what += "is defined for a single value."
        flags = [arg for arg in call.args if isinstance(arg, ast.Constant) and arg.value is True]
        if flags:
            edit = replace(site.source, flags[0], "False")
        elif any(item.arg == "unbiased" for item in call.keywords):
            edit = set_keyword(site.source, call, "unbiased", "False")
        else:
            edit = set_keyword(site.source, call, "correction", "0")
        yield Rewrite(site.source, what, (edit,))


def spread_at_zero(site: Site) -> Iterator[Rewrite]:
    """x.std(...) to (x.var(...) + eps).sqrt()."""
    if not site.is_backward or site.autograd not in ("Std", "StdMean", "Sqrt", "Var"):
        return
    small = "1e-6" if site.is_half else "1e-12"
    for call in site.calls(["std"]):
        if isinstance(call.func, ast.Attribute):
            text, name = site.source.of(call), site.source.of(call.func)
            variance = name[: -len("std")] + "var" + text[len(name) :]
            what = "Put an eps under the root of the standard deviation."
            yield rewrite(site, call, f"({variance} + {small}).sqrt()", what)


NORMS = (norm_at_zero, hypotenuse, spread_of_one, spread_at_zero)


def _small_argument(site: Site) -> str:
    return site.eps("1e-8", half="1e-4", double="1e-12")


def clamp_logarithm(site: Site) -> Iterator[Rewrite]:
    """log(x) to log(x.clamp_min(eps))."""
    if not site.ran(domains.LOGS):
        return
    what = "Keep the argument of the logarithm above 0."
    guard = f".clamp_min({_small_argument(site)})"
    for _, inner in site.operands(domains.LOGS):
        yield call_method(site, inner, guard, what)
        yield from guard_rest(site, inner, guard)
        if site.is_half:
            yield call_method(site, inner, ".float().clamp_min(1e-6)", f"{what[:-1]}, in float32.")
    yield from _clamp_all(
        site, domains.LOGS, guard, "Keep the arguments of the logarithms above 0."
    )


def clamp_ratio(site: Site) -> Iterator[Rewrite]:
    """log(p / q) with both sides kept above 0."""
    if site.cause not in ("kl_of_zero", "log_of_zero", "division_by_zero"):
        return
    guard = f".clamp_min({_small_argument(site)})"
    for call in calls_in(site.statement, domains.LOGS):
        inner = site.source.operand(call)
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div):
            edits = call_methods(site.source, (inner.left, inner.right), guard)
            what = "Keep both sides of the ratio above 0 before its logarithm."
            yield Rewrite(site.source, what, edits)


def _clamp_all(site: Site, names: tuple[str, ...], guard: str, what: str) -> Iterator[Rewrite]:
    """The same guard for all such calls of the statement, then of the function."""
    for around in (site.statement, site.source.scope(site.node)):
        inner = [site.source.operand(call) for call in calls_in(around, names)]
        edits = call_methods(site.source, inner, guard)
        if len(edits) > 1:
            yield Rewrite(site.source, what, edits)


def clamp_root(site: Site) -> Iterator[Rewrite]:
    """sqrt(x) to sqrt(x.clamp_min(eps)), which has a finite derivative too."""
    if not site.ran(domains.ROOTS):
        return
    what = "Keep the argument of the square root above 0, where its derivative is finite."
    for _, inner in site.operands(domains.ROOTS):
        if constant(inner) is None:
            for guard in _root_guards(site):
                yield call_method(site, inner, guard, what)
    what = "Keep the arguments of the square roots above 0."
    yield from _clamp_all(site, domains.ROOTS, _root_guards(site)[0], what)


def _root_guards(site: Site) -> tuple[str, str]:
    small, larger = ("1e-6", "1e-4") if site.is_half else ("1e-12", "1e-8")
    return f".clamp_min({small})", f".clamp_min({larger})"


def clamp_to_domain(site: Site) -> Iterator[Rewrite]:
    """log1p at -1, logit at 0 and 1, acos and its like at -1 and 1, acosh at 1."""
    edge = site.eps("1e-6", half="1e-3")
    inside = f".clamp(-1 + {edge}, 1 - {edge})"
    inside_what = "Keep the argument of {} inside (-1, 1)."
    if site.is_backward:
        inside_what = "Keep the argument away from -1 and 1, where the derivative is infinite."
    logit_what = "Keep the probability away from 0 and 1 before logit."
    for names, guard, what in (
        (("log1p",), f".clamp_min(-1 + {edge})", "Keep the argument of log1p above -1."),
        (("logit",), f".clamp({edge}, 1 - {edge})", logit_what),
        (domains.ARCS, inside, inside_what),
        (domains.ARCS_OF_LARGE, f".clamp_min(1 + {edge})", "Keep acosh above 1."),
    ):
        for call, inner in site.operands(names) if site.ran(names) else ():
            yield call_method(site, inner, guard, what.format(called(call)))


def clamp_power(site: Site) -> Iterator[Rewrite]:
    """x ** p with a negative base, or a base of 0 where the derivative is infinite."""
    if site.op not in domains.POWERS and not site.autograd.startswith("Pow"):
        return
    if site.cause in ("low_precision_overflow", "lr_too_high"):
        return
    seen = site.input("self")
    guard = f".clamp_min({_small_argument(site)})"
    for whole, base, exponent in powers(site):
        above_zero = call_method(site, base, guard, "Keep the base of the power above 0.")
        if seen is None or not seen.negative_count:
            yield above_zero
            continue
        x, p = site.source.in_brackets(base), site.source.of(exponent)
        if isinstance(whole, ast.Call):
            raised = f"{x}.abs().pow({p})"
        else:
            is_plain = isinstance(exponent, (ast.Name, ast.Constant))
            raised = f"{x}.abs() ** {p if is_plain else f'({p})'}"
        edit = swap(site.source, whole, f"{x}.sign() * {raised}")
        what = "Raise the magnitude to the power, and give it back its sign."
        signed = Rewrite(site.source, what, (edit,))
        yield from (above_zero, signed) if site.is_backward else (signed, above_zero)


def powers(site: Site) -> Iterator[tuple[ast.expr, ast.expr, ast.expr]]:
    """(the power, its base, its exponent) of each power in the expression or statement."""
    for around in (site.node, site.statement):
        for node in ast.walk(around):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
                yield node, node.left, node.right
    for call, base in site.operands(domains.POWERS):
        rest = [arg for arg in (*call.args, *(k.value for k in call.keywords)) if arg is not base]
        if rest:
            yield call, base, rest[0]


def clamp_upstream(site: Site) -> Iterator[Rewrite]:
    """The value comes from a root that is 0 there: the root is kept above 0, and both with it."""
    for name in names_in(site.node) if site.is_backward else ():
        value = site.source.value_of(name)
        roots = [site.source.operand(call) for call in calls_in(value, domains.ROOTS)]
        edits = call_methods(site.source, roots, _root_guards(site)[0])
        if value is not name and edits:
            what = "Keep the square root that it comes from above 0."
            yield Rewrite(site.source, what, edits)


DOMAINS = (clamp_logarithm, clamp_root, clamp_to_domain, clamp_power, clamp_upstream)


def write_sigmoid(site: Site) -> Iterator[Rewrite]:
    """1 / (1 + exp(-x)) and exp(x) / (1 + exp(x)) to sigmoid(x)."""
    if not site.ran(domains.EXPONENTIALS) and site.op not in ("div", "reciprocal", "add"):
        return
    torch, imports = site.source.torch
    for node in _quotients_near(site):
        found = _sigmoid_argument(site, node)
        if found is not None:
            text = f"{torch}.sigmoid({found})"
            yield rewrite(site, node, text, "Use sigmoid, which does not overflow.", *imports)


def _quotients_near(site: Site) -> Iterator[ast.BinOp]:
    """Quotients of the function that the operation is part of, also by a name, or that it holds."""
    for node in site.function_nodes():
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        values = (site.source.value_of(name) for name in names_in(node))
        inside = {id(each) for part in (node, *values) for each in ast.walk(part)}
        if id(site.node) in inside or any(each is node for each in ast.walk(site.node)):
            yield node


def _sigmoid_argument(site: Site, node: ast.BinOp) -> str | None:
    """x of a sigmoid that is written out."""
    source = site.source
    above, below = source.value_of(node.left), source.value_of(node.right)
    exponent = _one_plus_exp(site, below)
    if exponent is None:
        return None
    if constant(above) == 1:
        if isinstance(exponent, ast.UnaryOp) and isinstance(exponent.op, ast.USub):
            return source.one_line(exponent.operand)
        return f"-({source.one_line(exponent)})"
    if isinstance(above, ast.Call) and called(above) == "exp":
        inner = source.operand(above)
        if inner is not None and ast.dump(inner) == ast.dump(exponent):
            return source.one_line(inner)
    return None


def _one_plus_exp(site: Site, node: ast.expr) -> ast.expr | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return None
    for one, other in ((node.left, node.right), (node.right, node.left)):
        call = site.source.value_of(other)
        if constant(one) == 1 and isinstance(call, ast.Call) and called(call) == "exp":
            return site.source.operand(call)
    return None


def write_softmax(site: Site) -> Iterator[Rewrite]:
    """exp(x) / exp(x).sum(dim=d, keepdim=True) to softmax(x, dim=d)."""
    if not site.ran(domains.EXPONENTIALS) and site.op not in ("div", "sum"):
        return
    torch, imports = site.source.torch
    for node in _quotients_near(site):
        above = site.source.value_of(node.left)
        total, dim = _sum_below(site, node)
        if not isinstance(above, ast.Call) or called(above) != "exp" or total is None:
            continue
        inner = site.source.operand(above)
        same = ast.dump(site.source.value_of(total)) == ast.dump(above)
        if same and inner is not None and dim is not None:
            text = f"{torch}.softmax({site.source.one_line(inner)}, dim={dim})"
            yield rewrite(site, node, text, "Use softmax, which does not overflow.", *imports)


def _sum_below(site: Site, node: ast.BinOp) -> tuple[ast.expr | None, str | None]:
    """What a quotient's denominator sums, and the dim as it is written."""
    below = site.source.value_of(node.right)
    if not isinstance(below, ast.Call) or called(below) != "sum":
        return None, None
    dim = next(iter(site.source.other_arguments(below)), keyword(below, "dim"))
    return site.source.operand(below), site.source.of(dim) if dim is not None else None


def subtract_maximum(site: Site) -> Iterator[Rewrite]:
    """exp(x) that is divided by its own sum: exp(x - max), which has the same ratio."""
    target = site.target
    if not site.ran(domains.EXPONENTIALS) or not isinstance(target, ast.Name):
        return
    for node in site.function_nodes():
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        total, dim = _sum_below(site, node)
        same = isinstance(total, ast.Name) and total.id == target.id == getattr(node.left, "id", "")
        for _, inner in site.operands(["exp"]) if same and dim is not None else ():
            x = site.source.in_brackets(inner)
            text = f"{x} - {x}.amax(dim={dim}, keepdim=True)"
            what = "Subtract the maximum before the exponential, which leaves the ratios."
            yield rewrite(site, inner, text, what)


def bound_shared_exponent(site: Site) -> Iterator[Rewrite]:
    """Several exponentials of one variable: the variable is bounded before all of them."""
    if not site.ran(domains.EXPONENTIALS):
        return
    source = site.source
    calls = list(calls_in(source.scope(site.node), ["exp"]))
    inside = [inner for call in calls if (inner := source.operand(call)) is not None]
    names = [{each.id for each in names_in(node)} for node in inside]
    if len(names) < 3 or len(set.union(*names)) != 1:
        return
    (name,) = names[0]
    statements = [found for call in calls if (found := source.statement(call))]
    first = min(statements, key=lambda statement: statement.lineno)
    line = f"{name} = {name}.clamp(max={2 if site.is_half else 20})"
    what = f"Bound {name} before the exponentials, which overflow together."
    yield Rewrite(source, what, (insert_before(source, first, line),))


def bound_in_loss(site: Site) -> Iterator[Rewrite]:
    """poisson_nll_loss(x, y), which exponentiates x."""
    if not site.ran(domains.EXPONENTIALS) or "nn/functional.py" not in str(
        site.fact("inside") or ""
    ):
        return
    if isinstance(site.node, ast.Call) and site.node.args:
        for limit in _limits(site):
            what = "Bound what the loss exponentiates."
            yield call_method(site, site.node.args[0], f".clamp(max={limit})", what)


def _limits(site: Site) -> tuple[str, str]:
    return ("10", "5") if site.is_half else ("20", "8")


def bound_exponent(site: Site) -> Iterator[Rewrite]:
    """exp(x) to exp(x.clamp(max=20))."""
    for call, inner in (
        site.operands(domains.EXPONENTIALS) if site.ran(domains.EXPONENTIALS) else ()
    ):
        for limit in _limits(site):
            sides = f"-{limit}, {limit}" if called(call) in ("sinh", "cosh") else f"max={limit}"
            yield call_method(site, inner, f".clamp({sides})", "Bound the exponent.")


def bound_variable(site: Site) -> Iterator[Rewrite]:
    """Bound the variable itself, where it is used again after this exponential."""
    for _, inner in site.operands(["exp"]) if site.ran(domains.EXPONENTIALS) else ():
        names = {each.id for each in names_in(inner)} - {*site.source.imported, "self"}
        if len(names) != 1:
            continue
        (name,) = names
        if any(site.source.readers(name, after=site.statement)):
            line = f"{name} = {name}.clamp(max={_limits(site)[0]})"
            edit = insert_before(site.source, site.statement, line)
            what = f"Bound {name} before all that exponentiates it."
            yield Rewrite(site.source, what, (edit,))


EXPONENTIALS = (
    write_sigmoid,
    write_softmax,
    subtract_maximum,
    bound_shared_exponent,
    bound_in_loss,
    bound_exponent,
    bound_variable,
)


def use_safe_operation(site: Site) -> Iterator[Rewrite]:
    """torch.log(x) to stayfinite.safe_log(x)."""
    found: list[tuple[ast.expr, str, tuple[ast.expr, ...]]] = []
    name = site.op or site.autograd.lower()
    if name in ("log", "sqrt", "acos"):
        found += [(call, f"safe_{name}", (inner,)) for call, inner in site.operands([name])]
    for whole, above, below in divisions(site) if divides(site) else ():
        if isinstance(whole, ast.expr) and above is not None:
            found.append((whole, "safe_div", (above, below)))
    if name.startswith("pow"):
        found += [(power, "safe_pow", (base, by)) for power, base, by in powers(site)]
    for node, safe, args in found:
        given = ", ".join(site.source.of(arg) for arg in args)
        what = f"Use stayfinite.{safe}, which is finite there and has a finite derivative."
        yield rewrite(site, node, f"stayfinite.{safe}({given})", what, "import stayfinite")


_SPECTRA = ("svd", "svdvals", "eigh", "eig")
_SQUARE = ("cholesky", "cholesky_ex", "inv", "inv_ex", "inverse", "solve")
_DETERMINANTS = ("det", "logdet", "slogdet")
_ANY = ("qr", "pinv", "lstsq")


def magnitude_of_determinant(site: Site) -> Iterator[Rewrite]:
    """torch.logdet(x) to torch.linalg.slogdet(x)[1], which a negative determinant has too."""
    if site.cause not in ("degenerate_linalg", "log_of_negative"):
        return
    torch, imports = site.source.torch
    for call, inner in site.operands(("logdet",)):
        text = f"{torch}.linalg.slogdet({site.source.of(inner)})[1]"
        what = "Take the logarithm of the determinant's magnitude, whatever its sign."
        yield rewrite(site, call, text, what, *imports)


def add_diagonal(site: Site) -> Iterator[Rewrite]:
    """A degenerate matrix gets a small diagonal, with distinct entries where they must differ."""
    if site.cause != "degenerate_linalg":
        return
    source, (torch, _) = site.source, site.source.torch
    what = "Add a small diagonal, so that the matrix is not degenerate."
    for call in calls_in(site.node, (*_SPECTRA, *_SQUARE, *_DETERMINANTS, *_ANY)):
        if not call.args:
            continue
        matrix = call.args[0]
        x = source.in_brackets(matrix)
        if called(call) in _SPECTRA:
            diagonal = f"{torch}.diag({torch}.arange(1.0, {x}.shape[-1] + 1))"
        elif called(call) in _ANY:
            diagonal = f"{torch}.eye(*{x}.shape[-2:])"
        else:
            diagonal = f"{torch}.eye({x}.shape[-1])"
        for size in ("1e-6", "1e-3"):
            added = f"{x} + {size} * {diagonal}.to({source.of(matrix)})"
            if isinstance(matrix, ast.Name):
                edit = insert_before(source, site.statement, f"{x} = {added}")
                yield Rewrite(source, what, (edit,))
            else:
                yield rewrite(site, matrix, added, what)


MATRICES = (magnitude_of_determinant, add_diagonal)
