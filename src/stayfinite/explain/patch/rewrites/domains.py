"""Functions at the edge of their domain: the argument is kept inside."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.flow import names_in, value_of
from stayfinite.explain.patch.guards import eps, followed, for_the_rest
from stayfinite.explain.patch.layout import swapped
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.syntax import called, calls_in, constant, in_brackets, operand

LOGS = ("log", "log2", "log10")
_ARCS = ("acos", "arccos", "asin", "arcsin", "atanh", "arctanh", "erfinv")


def logarithm(site: Site) -> Iterator[Change]:
    """log(x) to log(x.clamp_min(eps))."""
    if site.op not in LOGS and site.autograd not in ("Log", "Log2", "Log10"):
        return
    what = "Keep the argument of the logarithm above 0."
    small = eps(site, single="1e-8", half="1e-4", double="1e-12")
    for call in site.calls(LOGS):
        inner = operand(site.source, call)
        if inner is None:
            continue
        yield followed(site, inner, f".clamp_min({small})", what)
        yield from for_the_rest(site, inner, f".clamp_min({small})")
        if site.is_half:
            yield followed(site, inner, ".float().clamp_min(1e-6)", f"{what[:-1]}, in float32.")
    yield from _all_alike(
        site, LOGS, f".clamp_min({small})", "Keep the arguments of the logarithms"
    )


def ratio(site: Site) -> Iterator[Change]:
    """log(p / q) with both sides kept above 0."""
    if site.cause not in ("kl_of_zero", "log_of_zero", "division_by_zero"):
        return
    small = eps(site, single="1e-8", half="1e-4", double="1e-12")
    for call in calls_in(site.statement, LOGS):
        inner = operand(site.source, call)
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div):
            edits = tuple(
                swapped(site.source, each, f"{in_brackets(site.source, each)}.clamp_min({small})")
                for each in (inner.left, inner.right)
                if constant(each) is None
            )
            what = "Keep both sides of the ratio above 0 before its logarithm."
            yield Change(site.source, what, edits)


def _all_alike(site: Site, names: tuple[str, ...], suffix: str, what: str) -> Iterator[Change]:
    """The same guard for all such calls of the statement, then of the function."""
    for around in (site.statement, site.source.scope(site.node)):
        inner = [operand(site.source, call) for call in calls_in(around, names)]
        edits = [
            swapped(site.source, each, f"{in_brackets(site.source, each)}{suffix}")
            for each in inner
            if each is not None and constant(each) is None
        ]
        if len(edits) > 1:
            yield Change(site.source, f"{what} above 0.", tuple(edits))


def logarithm_near_one(site: Site) -> Iterator[Change]:
    """log1p(x) at -1, logit(x) at 0 and 1."""
    edge = eps(site, single="1e-6", half="1e-3")
    if site.op == "log1p" or site.autograd == "Log1P":
        for call in site.calls(["log1p"]):
            if (inner := operand(site.source, call)) is not None:
                what = "Keep the argument of log1p above -1."
                yield followed(site, inner, f".clamp_min(-1 + {edge})", what)
    if site.op == "logit" or site.autograd == "Logit":
        for call in site.calls(["logit"]):
            if (inner := operand(site.source, call)) is not None:
                what = "Keep the probability away from 0 and 1 before logit."
                yield followed(site, inner, f".clamp({edge}, 1 - {edge})", what)


def root(site: Site) -> Iterator[Change]:
    """sqrt(x) to sqrt(x.clamp_min(eps)), which has a finite derivative too."""
    if site.op not in ("sqrt", "rsqrt") and site.autograd not in ("Sqrt", "Rsqrt"):
        return
    for call in site.calls(("sqrt", "rsqrt")):
        inner = operand(site.source, call)
        if inner is None or constant(inner) is not None:
            continue
        what = "Keep the argument of the square root above 0, where its derivative is finite."
        for small in _roots(site):
            yield followed(site, inner, f".clamp_min({small})", what)
    suffix = f".clamp_min({_roots(site)[0]})"
    yield from _all_alike(site, ("sqrt", "rsqrt"), suffix, "Keep the arguments of the square roots")


def _roots(site: Site) -> tuple[str, ...]:
    return ("1e-6", "1e-4") if site.is_half else ("1e-12", "1e-8")


def arc(site: Site) -> Iterator[Change]:
    """acos(x) to acos(x.clamp(-1 + eps, 1 - eps))."""
    if site.op not in _ARCS and site.autograd.lower() not in _ARCS:
        return
    edge = eps(site, single="1e-6", half="1e-3")
    for call in site.calls(_ARCS):
        if (inner := operand(site.source, call)) is not None:
            what = f"Keep the argument of {called(call)} inside (-1, 1)."
            if site.is_backward:
                what = "Keep the argument away from -1 and 1, where the derivative is infinite."
            yield followed(site, inner, f".clamp(-1 + {edge}, 1 - {edge})", what)


def arc_of_large(site: Site) -> Iterator[Change]:
    """acosh(x) at 1."""
    if site.op != "acosh" and site.autograd != "Acosh":
        return
    edge = eps(site, single="1e-6", half="1e-3")
    for call in site.calls(("acosh", "arccosh")):
        if (inner := operand(site.source, call)) is not None:
            yield followed(site, inner, f".clamp_min(1 + {edge})", "Keep acosh above 1.")


def power(site: Site) -> Iterator[Change]:
    """x ** p with a negative base, or a base of 0 where the derivative is infinite."""
    if site.op not in ("pow", "float_power") and not site.autograd.startswith("Pow"):
        return
    if site.cause in ("low_precision_overflow", "lr_too_high"):
        return
    small = eps(site, single="1e-8", half="1e-4", double="1e-12")
    for whole, base, exponent in powers(site):
        if _has_negative(site) and not site.is_backward:
            yield _signed(site, whole, base, exponent)
        what = "Keep the base of the power above 0."
        yield followed(site, base, f".clamp_min({small})", what)
        if _has_negative(site) and site.is_backward:
            yield _signed(site, whole, base, exponent)


def _has_negative(site: Site) -> bool:
    base = site.input("self")
    return base is not None and base.negative_count > 0


def _signed(site: Site, whole: ast.expr, base: ast.expr, exponent: ast.expr) -> Change:
    x, p = in_brackets(site.source, base), site.source.of(exponent)
    power_of = "{}.pow({})" if isinstance(whole, ast.Call) else "{} ** {}"
    if not isinstance(whole, ast.Call) and not isinstance(exponent, (ast.Name, ast.Constant)):
        p = f"({p})"
    text = f"{x}.sign() * {power_of.format(f'{x}.abs()', p)}"
    what = "Raise the magnitude to the power, and give it back its sign."
    return Change(site.source, what, (swapped(site.source, whole, text),))


def powers(site: Site) -> Iterator[tuple[ast.expr, ast.expr, ast.expr]]:
    """(the power, its base, its exponent) of each power in the expression or statement."""
    for root_node in (site.node, site.statement):
        for node in ast.walk(root_node):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
                yield node, node.left, node.right
    for call in site.calls(("pow", "float_power")):
        base = operand(site.source, call)
        rest = [arg for arg in (*call.args, *(k.value for k in call.keywords)) if arg is not base]
        if base is not None and rest:
            yield call, base, rest[0]


def upstream(site: Site) -> Iterator[Change]:
    """The value comes from a root that is 0 there: the root is kept above 0, and both with it."""
    if not site.is_backward:
        return
    names = names_in(site.node)
    values = [value for name in names if (value := value_of(site.source, name)) is not name]
    for value in values:
        edits = [
            swapped(site.source, inner, f"{in_brackets(site.source, inner)}.clamp_min({small})")
            for call in calls_in(value, ("sqrt", "rsqrt"))
            if (inner := operand(site.source, call)) is not None and constant(inner) is None
            for small in _roots(site)[:1]
        ]
        if edits:
            what = "Keep the square root that it comes from above 0."
            yield Change(site.source, what, tuple(edits))


DOMAINS = (logarithm, logarithm_near_one, root, arc, arc_of_large, power, upstream)
