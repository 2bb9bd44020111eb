"""Rewrites of divisions, norms, exponentials, matrices, and functions with a domain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from stayfinite.patch.code import (
    Site,
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
    readers,
    torch_name,
    value_of,
)
from stayfinite.patch.edit import (
    Change,
    eps,
    followed,
    for_the_rest,
    insert_before,
    replace,
    rewritten,
    swapped,
    with_keyword,
)
from stayfinite.patch.log_space import one_line
from stayfinite.records import TensorSummary

_OPS = ("div", "true_divide", "reciprocal", "rsqrt", "remainder", "fmod", "floor_divide")
_CALLS = ("div", "true_divide", "divide", "div_", "reciprocal", "reciprocal_")
_NORM_CALLS = ("norm", "vector_norm")
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
        if not isinstance(norm, ast.Call) or called(norm) not in _NORM_CALLS or above is None:
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


_EXPS = ("exp", "exp2", "expm1", "sinh", "cosh")


def _overflows(site: Site) -> bool:
    return site.op in _EXPS or site.autograd in ("Exp", "Exp2", "Expm1", "Sinh", "Cosh")


def written_out(site: Site) -> Iterator[Change]:
    """1 / (1 + exp(-x)) and exp(x) / (1 + exp(x)) to sigmoid(x)."""
    if not _overflows(site) and site.op not in ("div", "reciprocal", "add"):
        return
    torch, imports = torch_name(site.source)
    for node in ast.walk(site.source.scope(site.node)):
        found = _sigmoid(site, node) if isinstance(node, ast.BinOp) else None
        if found is not None and isinstance(node, ast.expr) and _is_near(site, node):
            text = f"{torch}.sigmoid({found})"
            yield rewritten(site, node, text, "Use sigmoid, which does not overflow.", *imports)


def _is_near(site: Site, node: ast.expr) -> bool:
    inside = {id(each) for each in ast.walk(node)}
    inside |= {id(e) for name in names_in(node) for e in ast.walk(value_of(site.source, name))}
    return id(site.node) in inside or any(each is node for each in ast.walk(site.node))


def _sigmoid(site: Site, node: ast.BinOp) -> str | None:
    """x of a sigmoid that is written out."""
    if not isinstance(node.op, ast.Div):
        return None
    above, below = value_of(site.source, node.left), value_of(site.source, node.right)
    exponent = _one_plus_exp(site, below)
    if exponent is None:
        return None
    if constant(above) == 1:
        if isinstance(exponent, ast.UnaryOp) and isinstance(exponent.op, ast.USub):
            return one_line(site.source, exponent.operand)
        return f"-({one_line(site.source, exponent)})"
    if isinstance(above, ast.Call) and called(above) == "exp":
        inner = operand(site.source, above)
        if inner is not None and ast.dump(inner) == ast.dump(exponent):
            return one_line(site.source, inner)
    return None


def _one_plus_exp(site: Site, node: ast.expr) -> ast.expr | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return None
    for one, other in ((node.left, node.right), (node.right, node.left)):
        call = value_of(site.source, other)
        if constant(one) == 1 and isinstance(call, ast.Call) and called(call) == "exp":
            return operand(site.source, call)
    return None


def softmax_by_hand(site: Site) -> Iterator[Change]:
    """exp(x) / exp(x).sum(dim=d, keepdim=True) to softmax(x, dim=d)."""
    if not _overflows(site) and site.op not in ("div", "sum"):
        return
    torch, imports = torch_name(site.source)
    for node in ast.walk(site.source.scope(site.node)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        above, below = value_of(site.source, node.left), value_of(site.source, node.right)
        if not (isinstance(above, ast.Call) and called(above) == "exp" and _is_near(site, node)):
            continue
        if not isinstance(below, ast.Call) or called(below) != "sum":
            continue
        total = operand(site.source, below)
        inner = operand(site.source, above)
        same = total is not None and ast.dump(value_of(site.source, total)) == ast.dump(above)
        dim = _dim(site, below)
        if same and inner is not None and dim is not None:
            text = f"{torch}.softmax({one_line(site.source, inner)}, dim={dim})"
            yield rewritten(site, node, text, "Use softmax, which does not overflow.", *imports)


def shifted(site: Site) -> Iterator[Change]:
    """exp(x) that is divided by its own sum: exp(x - max), which has the same ratio."""
    statement = site.statement
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not _overflows(site) or not isinstance(target, ast.Name):
        return
    for node in ast.walk(site.source.scope(site.node)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        below = value_of(site.source, node.right)
        if not isinstance(below, ast.Call) or called(below) != "sum":
            continue
        total, dim = operand(site.source, below), _dim(site, below)
        same = isinstance(total, ast.Name) and total.id == target.id == getattr(node.left, "id", "")
        for call in site.calls(["exp"]) if same and dim is not None else ():
            if (inner := operand(site.source, call)) is not None:
                x = in_brackets(site.source, inner)
                text = f"{x} - {x}.amax(dim={dim}, keepdim=True)"
                what = "Subtract the maximum before the exponential, which leaves the ratios."
                yield rewritten(site, inner, text, what)


def _dim(site: Site, call: ast.Call) -> str | None:
    """The dim of a sum, as it is written."""
    inner = operand(site.source, call)
    rest = [arg for arg in call.args if arg is not inner]
    found = rest[0] if rest else keyword(call, "dim")
    return site.source.of(found) if found is not None else None


def shared_exponent(site: Site) -> Iterator[Change]:
    """Several exponentials of one variable: the variable is bounded before all of them."""
    if not _overflows(site):
        return
    scope = site.source.scope(site.node)
    inside = [operand(site.source, call) for call in calls_in(scope, ["exp"])]
    names = [{each.id for each in names_in(node)} for node in inside if node is not None]
    if len(names) < 3 or len(set.union(*names)) != 1:
        return
    (name,) = names[0]
    limit = 2 if site.is_half else 20
    first = min(
        (found for call in calls_in(scope, ["exp"]) if (found := site.source.statement(call))),
        key=lambda statement: statement.lineno,
    )
    what = f"Bound {name} before the exponentials, which overflow together."
    edit = insert_before(site.source, first, f"{name} = {name}.clamp(max={limit})")
    yield Change(site.source, what, (edit,))


def bounded(site: Site) -> Iterator[Change]:
    """exp(x) to exp(x.clamp(max=20))."""
    if not _overflows(site):
        return
    for call in site.calls(_EXPS):
        inner = operand(site.source, call)
        if inner is None:
            continue
        for limit in ("10", "5") if site.is_half else ("20", "8"):
            sides = f"-{limit}, {limit}" if called(call) in ("sinh", "cosh") else f"max={limit}"
            yield followed(site, inner, f".clamp({sides})", "Bound the exponent.")


def bounded_for_all(site: Site) -> Iterator[Change]:
    """Bound the variable itself, where it is used again after this exponential."""
    if not _overflows(site):
        return
    for call in site.calls(["exp"]):
        inner = operand(site.source, call)
        names = {each.id for each in names_in(inner)} if inner is not None else set()
        names -= set(site.source.imported) | {"self"}
        if len(names) != 1:
            continue
        (name,) = names
        if any(readers(site.source, name, after=site.statement)):
            limit = 10 if site.is_half else 20
            line = f"{name} = {name}.clamp(max={limit})"
            edit = insert_before(site.source, site.statement, line)
            what = f"Bound {name} before all that exponentiates it."
            yield Change(site.source, what, (edit,))


def inside_loss(site: Site) -> Iterator[Change]:
    """poisson_nll_loss(x, y), which exponentiates x."""
    if not _overflows(site) or "nn/functional.py" not in str(site.fact("inside") or ""):
        return
    if isinstance(site.node, ast.Call) and site.node.args:
        for limit in ("10", "5") if site.is_half else ("20", "8"):
            what = "Bound what the loss exponentiates."
            yield followed(site, site.node.args[0], f".clamp(max={limit})", what)


EXPONENTIALS = (
    written_out,
    softmax_by_hand,
    shifted,
    shared_exponent,
    inside_loss,
    bounded,
    bounded_for_all,
)


_UNARY = {"log": "safe_log", "sqrt": "safe_sqrt", "acos": "safe_acos"}


def safe_operation(site: Site) -> Iterator[Change]:
    """torch.log(x) to stayfinite.safe_log(x)."""
    name = site.op or site.autograd.lower()
    if name in _UNARY:
        for call in site.calls([name]):
            if (inner := operand(site.source, call)) is not None:
                yield _by(site, call, _UNARY[name], inner)
    if divides(site):
        for whole, above, below in divisions(site):
            if isinstance(whole, ast.expr) and above is not None:
                yield _by(site, whole, "safe_div", above, below)
    if name.startswith("pow"):
        for power, base, exponent in powers(site):
            yield _by(site, power, "safe_pow", base, exponent)


def _by(site: Site, node: ast.expr, name: str, *args: ast.expr) -> Change:
    given = ", ".join(site.source.of(arg) for arg in args)
    what = f"Use stayfinite.{name}, which is finite there and has a finite derivative."
    return rewritten(site, node, f"stayfinite.{name}({given})", what, "import stayfinite")


_SPECTRA = ("svd", "svdvals", "eigh", "eig")
_SQUARE = (
    "cholesky", "cholesky_ex", "inv", "inv_ex", "inverse", "solve", "det", "logdet", "slogdet",
)  # fmt: skip
_ANY = ("qr", "pinv", "lstsq")


def magnitude_of_determinant(site: Site) -> Iterator[Change]:
    """torch.logdet(x) to torch.linalg.slogdet(x)[1], which a negative determinant has too."""
    if site.cause not in ("degenerate_linalg", "log_of_negative"):
        return
    for call in site.calls(("logdet",)):
        inner = operand(site.source, call)
        if inner is not None:
            torch, imports = torch_name(site.source)
            text = f"{torch}.linalg.slogdet({site.source.of(inner)})[1]"
            what = "Take the logarithm of the determinant's magnitude, whatever its sign."
            yield rewritten(site, call, text, what, *imports)


def with_diagonal(site: Site) -> Iterator[Change]:
    """A degenerate matrix gets a small diagonal, with distinct entries where they must differ."""
    if site.cause != "degenerate_linalg":
        return
    torch, _ = torch_name(site.source)
    for call in calls_in(site.node, (*_SPECTRA, *_SQUARE, *_ANY)):
        matrix = call.args[0] if call.args else None
        if matrix is None:
            continue
        x = in_brackets(site.source, matrix)
        what = "Add a small diagonal, so that the matrix is not degenerate."
        for size in ("1e-6", "1e-3"):
            diagonal = f"{torch}.eye({x}.shape[-1])"
            if called(call) in _SPECTRA:
                diagonal = f"{torch}.diag({torch}.arange(1.0, {x}.shape[-1] + 1))"
            elif called(call) in _ANY:
                diagonal = f"{torch}.eye(*{x}.shape[-2:])"
            added = f"{x} + {size} * {diagonal}.to({site.source.of(matrix)})"
            if isinstance(matrix, ast.Name):
                edit = insert_before(site.source, site.statement, f"{x} = {added}")
                yield Change(site.source, what, (edit,))
            else:
                yield rewritten(site, matrix, added, what)


MATRICES = (magnitude_of_determinant, with_diagonal)
