"""Losses and means of nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.edits import Edit
from stayfinite.explain.patch.flow import names_in
from stayfinite.explain.patch.guards import rewritten, with_keyword
from stayfinite.explain.patch.layout import insert_before, swapped
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import called, calls_in, in_brackets, keyword, operand

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
