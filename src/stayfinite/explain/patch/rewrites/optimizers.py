"""Options of the optimizer: its eps, its line search, its learning rate; clipping before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.edits import Edit
from stayfinite.explain.patch.flow import names_in
from stayfinite.explain.patch.guards import with_keyword
from stayfinite.explain.patch.imports import torch_name
from stayfinite.explain.patch.layout import insert_after, insert_before, swapped
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import called, calls_in, constant, in_brackets, keyword
from stayfinite.explain.patch.training import (
    DEFAULT_RATES,
    Update,
    constructors,
    number,
    rates,
    updates,
)

_DIVERGING = frozenset(
    ["lr_too_high", "gan_divergence", "rl_value_divergence", "exploding_recurrence"]
    + ["unnormalized_input", "bad_init"]
)
_WITH_EPS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta")


def optimizer_eps(site: Site) -> Iterator[Change]:
    """An eps that the type of the weights can hold."""
    if site.cause not in ("optimizer_eps", "division_by_zero_optimizer"):
        return
    small = "1e-4" if site.is_half else "1e-8"
    for source, call in constructors(site.sources):
        if called(call) in _WITH_EPS:
            what = f"Give {called(call)} an eps that is not 0 in {site.dtype}."
            yield Change(source, what, (with_keyword(source, call, "eps", small),))


def line_search(site: Site) -> Iterator[Change]:
    """LBFGS(...) to LBFGS(..., line_search_fn="strong_wolfe")."""
    if site.cause != "lbfgs_no_line_search":
        return
    for source, call in constructors(site.sources):
        if called(call) == "LBFGS":
            value = f"{source.quote}strong_wolfe{source.quote}"
            edit = with_keyword(source, call, "line_search_fn", value)
            yield Change(source, "Let LBFGS search along its direction.", (edit,))


def accumulated(site: Site) -> Iterator[Change]:
    """Each micro-batch counts for its part: loss.backward() to (loss / n).backward()."""
    if site.cause != "grad_accumulation_overflow":
        return
    for source in site.sources:
        for call in calls_in(source.tree, ["backward"]):
            loops = [each for each in source.above(call) if isinstance(each, ast.For)]
            count = _times(source, loops[0]) if loops else None
            if count is None or not isinstance(call.func, ast.Attribute):
                continue
            loss = call.func.value
            text = f"({in_brackets(source, loss)} / {count})"
            what = "Divide the loss by the number of backward passes that are added up."
            yield Change(source, what, (swapped(source, loss, text),))


def _times(source: Source, loop: ast.For) -> str | None:
    """The n of `for ... in range(n)`."""
    if not isinstance(loop.iter, ast.Call) or called(loop.iter) != "range":
        return None
    return source.of(loop.iter.args[0]) if len(loop.iter.args) == 1 else None


def recurrent_start(site: Site) -> Iterator[Change]:
    """A recurrent matrix that keeps lengths, and clipping to keep it so."""
    if site.cause != "exploding_recurrence" or not isinstance(site.node, ast.BinOp):
        return
    weight = site.source.of(site.node.right)
    torch, imports = torch_name(site.source)
    for node in ast.walk(site.source.tree):
        if isinstance(node, ast.Assign) and site.source.of(node.targets[0]) == weight:
            line = f"{torch}.nn.init.orthogonal_({weight})"
            edit = insert_after(site.source, node, line)
            what = "Start with a recurrent matrix that keeps lengths, and clip the gradients."
            clips = [c.edits for c in clipped(site) if c.source is site.source]
            yield Change(site.source, what, (edit, *(clips[0] if clips else ())), imports)
            return


def is_diverging(site: Site) -> bool:
    return site.cause in _DIVERGING


def lower_rate(site: Site) -> Iterator[Change]:
    """A tenth of the learning rate."""
    if is_diverging(site) and site.cause != "exploding_recurrence":
        yield from _lower(site, 10)


def much_lower_rate(site: Site) -> Iterator[Change]:
    """A hundredth of the learning rate."""
    if is_diverging(site):
        yield from _lower(site, 100)


def _lower(site: Site, factor: int) -> Iterator[Change]:
    words = {10: "a tenth", 100: "a hundredth"}[factor]
    found = list(rates(site.sources))
    for source in site.sources:
        edits = [
            Edit(source.start(node), source.end(node), _shrunk(source, node, value / factor))
            for owner, node, value in found
            if owner is source
        ]
        edits = edits or _given(source, factor)
        if edits:
            yield Change(source, f"Lower the learning rate to {words}.", tuple(edits))


def _shrunk(source: Source, node: ast.expr, value: float) -> str:
    return number(value, like=source.of(node))


def _given(source: Source, factor: int) -> list[Edit]:
    """A rate for optimizers that have none."""
    return [
        with_keyword(source, call, "lr", number(DEFAULT_RATES.get(called(call), 1e-3) / factor))
        for _, call in constructors((source,))
        if keyword(call, "lr") is None and len(call.args) == 1
    ]


def clipped(site: Site) -> Iterator[Change]:
    """Clip the norm of the gradients before each update."""
    if not is_diverging(site):
        return
    for source in site.sources:
        found = list(updates((source,)))
        if any(calls_in(source.tree, ["clip_grad_norm_", "clip_grad_value_"])):
            yield from _clip_harder(source)
        elif found:
            torch, imports = torch_name(source)
            edits = tuple(_clip(source, update, torch) for update in found)
            yield Change(source, "Clip the gradient norm before the update.", edits, imports)


def warmed_up(site: Site) -> Iterator[Change]:
    """A learning rate that rises over the first steps."""
    if site.cause != "lr_too_high":
        return
    for source in site.sources:
        for _, call in constructors((source,)):
            made = source.parents.get(call)
            if not isinstance(made, ast.Assign) or called(call) == "LBFGS":
                continue
            optimizer = source.of(made.targets[0])
            after = [each for each in updates((source,)) if _is_reached(source, made, each)]
            if len(after) != 1 or any(each.id == "warmup" for each in names_in(source.tree)):
                continue
            torch, imports = torch_name(source)
            name = "self.warmup" if optimizer.startswith("self.") else "warmup"
            schedule = f"{torch}.optim.lr_scheduler.LinearLR({optimizer}, 0.01, total_iters=500)"
            edits = (
                insert_after(source, made, f"{name} = {schedule}"),
                insert_after(source, after[0].statement, f"{name}.step()"),
            )
            yield Change(source, "Warm the learning rate up over 500 steps.", edits, imports)


def _is_reached(source: Source, made: ast.Assign, update: Update) -> bool:
    """Whether the update reads the optimizer that the statement made."""
    name = source.of(made.targets[0])
    same = source.scope(made) is source.scope(update.statement) or name.startswith("self.")
    return same and name == update.optimizer


def _clip(source: Source, update: Update, torch: str) -> Edit:
    quote, optimizer = source.quote, update.optimizer
    lines = []
    if update.scaler and not any(calls_in(source.tree, ["unscale_"])):
        lines.append(f"{update.scaler}.unscale_({optimizer})")
    parameters = _parameters(source, update)
    if parameters is None:
        groups = f"{optimizer}.param_groups"
        lines.append(f"params = [p for group in {groups} for p in group[{quote}params{quote}]]")
    lines.append(f"{torch}.nn.utils.clip_grad_norm_({parameters or 'params'}, 1.0)")
    return insert_before(source, update.statement, *lines)


def _parameters(source: Source, update: Update) -> str | None:
    """model.parameters() as it was given to the optimizer, where that can be read here too."""
    for _, call in constructors((source,)):
        made = source.parents.get(call)
        if not isinstance(made, ast.Assign) or source.of(made.targets[0]) != update.optimizer:
            continue
        given = call.args[0] if call.args else None
        if given is None or not isinstance(given, ast.Call) or called(given) != "parameters":
            continue
        text = source.of(given)
        if source.scope(made) is source.scope(update.statement) or text.startswith("self."):
            return text
        model = text.removesuffix(".parameters()")
        kept = f"self.{model} = {model}"
        if any(source.of(each) == kept for each in ast.walk(source.scope(made)) if _sets(each)):
            return f"self.{text}"
    return None


def _sets(node: ast.AST) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign)


def _clip_harder(source: Source) -> Iterator[Change]:
    edits = []
    for call in calls_in(source.tree, ["clip_grad_norm_", "clip_grad_value_"]):
        limit = call.args[1] if len(call.args) > 1 else keyword(call, "max_norm")
        value = constant(limit)
        if limit is not None and value:
            text = _shrunk(source, limit, value / 10)
            edits.append(Edit(source.start(limit), source.end(limit), text))
    if edits:
        yield Change(source, "Clip the gradients to a tenth.", tuple(edits))


OPTIMIZER = (optimizer_eps, line_search, accumulated, recurrent_start)
