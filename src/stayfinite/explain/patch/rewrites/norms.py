"""Norms and spreads: derivatives at 0, and groups of one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change, replace
from stayfinite.explain.patch.guards import rewritten, with_keyword
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.syntax import called, constant, in_brackets, is_method, operand

_NORMS = ("norm", "vector_norm", "dist")
_SPREADS = ("std", "var", "std_mean", "var_mean")


def norm_at_zero(site: Site) -> Iterator[Change]:
    """x.norm(dim=d) to x.pow(2).sum(dim=d).clamp_min(eps).sqrt()."""
    made = str(site.fact("made_in") or "")
    if not site.is_backward or not ("Norm" in site.autograd or "Norm" in made or _by_cause(site)):
        return
    for call in site.calls(_NORMS):
        summed = _sum_of_squares(site, call)
        if summed is None:
            continue
        for small in ("1e-6",) if site.is_half else ("1e-12", "1e-8"):
            what = "Write the norm with an eps under its root, where the derivative is finite."
            yield rewritten(site, call, f"({summed} + {small}).sqrt()", what)


def hypotenuse(site: Site) -> Iterator[Change]:
    """torch.hypot(a, b) to (a.pow(2) + b.pow(2) + eps).sqrt()."""
    if site.autograd != "Hypot":
        return
    for call in site.calls(("hypot",)):
        first = operand(site.source, call)
        other = next((arg for arg in call.args if arg is not first), None)
        if first is None or other is None:
            continue
        a, b = (in_brackets(site.source, each) for each in (first, other))
        small = "1e-6" if site.is_half else "1e-12"
        what = "Write the length with an eps under its root, where the derivative is finite."
        yield rewritten(site, call, f"({a}.pow(2) + {b}.pow(2) + {small}).sqrt()", what)


def _by_cause(site: Site) -> bool:
    return site.cause == "norm_grad_at_zero"


def _sum_of_squares(site: Site, call: ast.Call) -> str | None:
    """The text that is under the root of a 2-norm; None for any other norm."""
    inner = operand(site.source, call)
    if inner is None:
        return None
    if called(call) == "dist":
        other = next((arg for arg in call.args if arg is not inner), None)
        pair = [in_brackets(site.source, each) for each in (inner, other) if each is not None]
        return f"({' - '.join(pair)}).pow(2).sum()" if len(call.args) < 3 else None
    args = call.args if is_method(site.source, call) else call.args[1:]
    named = {item.arg: item.value for item in call.keywords if item.arg not in (None, "input")}
    order = args[0] if args else named.pop("p", named.pop("ord", None))
    if order is not None and constant(order) != 2 and ast.unparse(order) not in ("'fro'", "None"):
        return None
    rest = [site.source.of(arg) for arg in args[1:]]
    rest += [f"{name}={site.source.of(value)}" for name, value in named.items() if name != "ord"]
    return f"{in_brackets(site.source, inner)}.pow(2).sum({', '.join(rest)})"


def spread_at_zero(site: Site) -> Iterator[Change]:
    """x.std(...) to (x.var(...) + eps).sqrt()."""
    if not site.is_backward or site.autograd not in ("Std", "StdMean", "Sqrt", "Var"):
        return
    for call in site.calls(["std"]):
        if not isinstance(call.func, ast.Attribute):
            continue
        text = site.source.of(call)
        name = site.source.of(call.func)
        variance = name[: -len("std")] + "var" + text[len(name) :]
        small = "1e-6" if site.is_half else "1e-12"
        what = "Put an eps under the root of the standard deviation."
        yield rewritten(site, call, f"({variance} + {small}).sqrt()", what)


def group_of_one(site: Site) -> Iterator[Change]:
    """x.std() to x.std(correction=0), which is 0 for a single value."""
    names = (site.op.startswith(("std", "var")), site.autograd.startswith(("Std", "Var")))
    if not any(names) and site.cause != "var_of_single":
        return
    for call in site.calls(_SPREADS):
        what = f"Use the biased {'variance' if 'var' in called(call) else 'deviation'}, which "
        what += "is defined for a single value."
        flags = [arg for arg in call.args if isinstance(arg, ast.Constant) and arg.value is True]
        if flags:
            edit = replace(site.source, flags[0], "False")
        elif any(item.arg == "unbiased" for item in call.keywords):
            edit = with_keyword(site.source, call, "unbiased", "False")
        else:
            edit = with_keyword(site.source, call, "correction", "0")
        yield Change(site.source, what, (edit,))


NORMS = (norm_at_zero, hypotenuse, group_of_one, spread_at_zero)
