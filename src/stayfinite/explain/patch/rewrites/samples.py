"""Distributions and angles."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.guards import eps, followed, rewritten
from stayfinite.explain.patch.imports import torch_name
from stayfinite.explain.patch.layout import swapped
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import called, calls_in, constant, in_brackets, keyword

_SCALED = ("Normal", "LogNormal", "Laplace", "Cauchy", "Gumbel", "HalfNormal", "StudentT")
_WEIGHTED = ("Categorical", "OneHotCategorical", "Multinomial", "Beta", "Gamma", "Dirichlet")
_WEIGHTS = ("probs", "concentration", "concentration0", "concentration1", "rate")
_WITHOUT_LOCATION = ("HalfNormal", "HalfCauchy")


def scale(site: Site) -> Iterator[Change]:
    """Normal(mu, std) to Normal(mu, std.clamp_min(eps))."""
    if site.cause != "zero_scale_distribution":
        return
    small = eps(site, single="1e-4", half="1e-2")
    what = "Keep the scale of the distribution away from 0."
    for source in site.sources:
        for call in calls_in(source.tree, _SCALED):
            given = _scale_of(call)
            if given is not None and constant(given) is None:
                text = f"{in_brackets(source, given)}.clamp_min({small})"
                yield Change(source, what, (swapped(source, given, text),))


def weights(site: Site) -> Iterator[Change]:
    """Probabilities and concentrations of 0."""
    if site.cause not in ("zero_scale_distribution", "support_boundary"):
        return
    small = eps(site, single="1e-6", half="1e-3")
    for source in site.sources:
        for call in calls_in(source.tree, _WEIGHTED):
            given = [*call.args, *(k.value for k in call.keywords if k.arg in _WEIGHTS)]
            edits = tuple(
                swapped(source, each, f"{in_brackets(source, each)}.clamp_min({small})")
                for each in given
                if constant(each) is None and not isinstance(each, ast.Starred)
            )
            if edits:
                what = f"Keep what {called(call)} is given away from 0."
                yield Change(source, what, edits)


def _scale_of(call: ast.Call) -> ast.expr | None:
    named = keyword(call, "scale")
    at = 0 if called(call) in _WITHOUT_LOCATION else 2 if called(call) == "StudentT" else 1
    return named if named is not None else call.args[at] if len(call.args) > at else None


def edge_of_support(site: Site) -> Iterator[Change]:
    """d.log_prob(x) to d.log_prob(x.clamp(eps, 1 - eps))."""
    if site.cause != "support_boundary":
        return
    edge = eps(site, single="1e-6", half="1e-3")
    what = "Keep the value inside the support of the distribution."
    zeros = [item for item in site.origin.inputs if item.zero_count]
    limits = [f".clamp({edge}, 1 - {edge})", f".clamp_min({edge})"]
    if any((item.max or 0.0) > 1 for item in zeros):
        limits.reverse()
    if site.op == "atanh":  # the inverse of a tanh transform
        limits = [f".clamp(-1 + {edge}, 1 - {edge})"]
    for call in site.calls(["log_prob"]):
        for limit in limits if call.args else ():
            yield followed(site, call.args[0], limit, what)


def angle(site: Site) -> Iterator[Change]:
    """atan2(y, x) with x moved off the origin where both are almost 0."""
    if site.autograd != "Atan2" and site.cause != "atan2_grad_at_zero":
        return
    torch, imports = torch_name(site.source)
    small = eps(site, single="1e-12", half="1e-6")
    for call in site.calls(("atan2", "arctan2")):
        pair = _pair(site.source, call)
        if pair is None:
            continue
        y, x = (in_brackets(site.source, node) for node in pair)
        near = f"{x} ** 2 + {y} ** 2 < {small}"
        text = f"{torch}.where({near}, {torch}.ones_like({site.source.of(pair[1])}), {x})"
        what = "Take the angle at a fixed point where both sides are almost 0."
        yield rewritten(site, pair[1], text, what, *imports)


def _pair(source: Source, call: ast.Call) -> tuple[ast.expr, ast.expr] | None:
    if len(call.args) == 2:
        return call.args[0], call.args[1]
    if len(call.args) == 1 and isinstance(call.func, ast.Attribute):
        return call.func.value, call.args[0]
    return None


SAMPLES = (scale, edge_of_support, weights, angle)
