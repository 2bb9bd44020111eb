"""Values that were bad before anything was computed: memory, weights, buffers, schedules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from stayfinite.explain.patch.change import Change
from stayfinite.explain.patch.edits import Edit
from stayfinite.explain.patch.imports import name_of, torch_name
from stayfinite.explain.patch.layout import insert_after, swapped
from stayfinite.explain.patch.rewrites.divisions import divisions
from stayfinite.explain.patch.site import Site
from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import called, calls_in, constant, in_brackets, operand

_EMPTY = ("empty", "empty_like", "new_empty", "FloatTensor", "Tensor")
_SCHEDULE = re.compile(r"lr|rate|warm|sched|decay|anneal|ramp", re.I)


def unwritten(site: Site) -> Iterator[Change]:
    """nn.Parameter(torch.empty(a, b)), filled right after."""
    if site.cause != "uninitialized_memory":
        return
    statement = site.statement
    for call in site.calls(_EMPTY):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        is_parameter = "Parameter" in site.source.of(statement)
        shape = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
        if target is not None and is_parameter:
            name = site.source.of(target)
            nn = name_of(site.source, "torch.nn")
            torch, imports = torch_name(site.source)
            several = (ast.Tuple, ast.List, ast.Starred)
            is_matrix = len(shape) > 1 or any(isinstance(arg, several) for arg in call.args)
            fill = "xavier_uniform_" if is_matrix and "bias" not in name else "zeros_"
            line = f"{nn or f'{torch}.nn'}.init.{fill}({name})"
            edit = insert_after(site.source, statement, line)
            yield Change(site.source, "Initialise the parameter.", (edit,), imports)
        yield _zeros(site, call)


def _zeros(site: Site, call: ast.Call) -> Change:
    name = called(call)
    text = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}.get(name)
    end = site.source.end(call.func)
    edit = Edit(end - len(name), end, text or "zeros")
    return Change(site.source, "Allocate memory that is filled with zeros.", (edit,))


def poor_start(site: Site) -> Iterator[Change]:
    """nn.init with a spread that is far too large, or zeros where a direction is needed."""
    if site.cause not in ("bad_init", "weight_norm_of_zero"):
        return
    names = ("zeros_", "constant_") if site.cause != "bad_init" else ("normal_", "uniform_")
    for source in site.sources:
        edits = []
        for call in calls_in(source.tree, names):
            target = operand(source, call)
            if target is None or "bias" in source.of(target):
                continue
            torch, _ = torch_name(source)
            nn = name_of(source, "torch.nn") or f"{torch}.nn"
            text = f"{nn}.init.xavier_uniform_({source.of(target)})"
            edits.append(Edit(source.start(call), source.end(call), text))
        if edits:
            what = "Start from weights of a size that fits the layer."
            yield Change(source, what, tuple(edits))
        yield from _scaled_start(source) if site.cause == "bad_init" else ()


def _scaled_start(source: Source) -> Iterator[Change]:
    """nn.Parameter(torch.randn(a, b)) to one that is scaled with its width."""
    edits = []
    for call in calls_in(source.tree, ["randn", "rand"]):
        parent = source.parents.get(call)
        top = parent if isinstance(parent, ast.BinOp) and parent.left is call else call
        if called(source.parents.get(top, call)) == "Parameter" and len(call.args) > 1:
            text = f"{source.of(call)} * {in_brackets(source, call.args[-1])} ** -0.5"
            edits.append(Edit(source.start(top), source.end(top), text))
    if edits:
        yield Change(source, "Scale the first weights with their width.", tuple(edits))


def lost_buffer(site: Site) -> Iterator[Change]:
    """self.x = torch.zeros(()) to self.register_buffer("x", ...), which is saved and restored."""
    if site.cause not in ("checkpoint_incomplete", "division_by_zero"):
        return
    for _, _, below in divisions(site):
        if not isinstance(below, ast.Attribute) or site.source.of(below.value) != "self":
            continue
        owner = next((n for n in site.source.above(below) if isinstance(n, ast.ClassDef)), None)
        made = _made_in_init(site.source, owner, below.attr) if owner else None
        if made is not None:
            quote = site.source.quote
            value = site.source.of(made.value)
            text = f"self.register_buffer({quote}{below.attr}{quote}, {value})"
            edit = Edit(site.source.start(made), site.source.end(made), text)
            what = f"Make {below.attr} a buffer, which is saved and restored with the model."
            yield Change(site.source, what, (edit,))


def _made_in_init(source: Source, owner: ast.ClassDef, name: str) -> ast.Assign | None:
    makers = ("zeros", "ones", "tensor", "full", "empty")
    for function in owner.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "__init__":
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and source.of(node.targets[0]) == f"self.{name}":
                return node if called(node.value) in makers else None
    return None


def lost_statistic(site: Site) -> Iterator[Change]:
    """self.x = None that is measured once: a buffer, so that it is not measured after loading."""
    source, statement = site.source, site.statement
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    around = source.parents.get(statement)
    if not isinstance(target, ast.Attribute) or "load_state_dict" not in source.text:
        return
    name = source.of(target)
    owner = next((n for n in source.above(statement) if isinstance(n, ast.ClassDef)), None)
    unset = f"{name} is None"
    if owner is None or not isinstance(around, ast.If) or source.of(around.test) != unset:
        return
    quote, (torch, imports) = source.quote, torch_name(source)
    made = f"self.register_buffer({quote}{target.attr}{quote}, {torch}.zeros(()))"
    edits = [
        Edit(source.start(node), source.end(node), made)
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign) and source.of(node) == f"{name} = None"
    ]
    if edits:
        edits.append(Edit(source.start(around.test), source.end(around.test), f"{name} == 0"))
        what = f"Make {target.attr} a buffer, which is saved and restored with the model."
        yield Change(source, what, tuple(edits), imports)


def narrowed(site: Site) -> Iterator[Change]:
    """torch.save of v.half() to torch.save of v."""
    if not site.cause.startswith("checkpoint_"):
        return
    what = "Save the state in the precision that it is trained in."
    for source in site.sources:
        for save in calls_in(source.tree, ["save"]):
            for call in calls_in(save, ("half", "bfloat16")):
                if isinstance(call.func, ast.Attribute):
                    text = source.of(call.func.value)
                    yield Change(source, what, (swapped(source, call, text),))


def schedule(site: Site) -> Iterator[Change]:
    """step / warm_up to step / max(warm_up, 1), in the code that computes the rate."""
    if site.cause != "bad_lr_schedule":
        return
    for source in site.sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
                continue
            if constant(node.right) is None and _sets_rate(source, node):
                text = f"max({source.of(node.right)}, 1)"
                what = "Keep the schedule from dividing by 0."
                yield Change(source, what, (swapped(source, node.right, text),))


def _sets_rate(source: Source, node: ast.expr) -> bool:
    scope = source.scope(node)
    name = scope.name if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
    statement = source.statement(node)
    said = source.of(statement) if statement is not None else ""
    return bool(_SCHEDULE.search(name) or _SCHEDULE.search(said))


STARTS = (unwritten, poor_start, lost_buffer, lost_statistic, narrowed, schedule)
