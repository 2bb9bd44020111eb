"""What `for` and `next` gave the variables of a loop in the turn that is under way.

The body may have assigned something else to them since.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, GeneratorType
from typing import Any

import numpy as np
from torch import Tensor

from stayfinite.living import living
from stayfinite.nested import map_leaves
from stayfinite.replay.loop import CannotRunError, Loop, variables_of, yields_at

# Calls around what is iterated over that hand its items on.
_TRANSPARENT = frozenset(["tqdm", "trange", "track", "iter", "progress_bar", "pbar", "Bar"])
_PURE = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict),
    *(ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context),
)
# Methods that give the same when they are called on their own result.
_IDEMPOTENT = frozenset(
    ["to", "cuda", "cpu", "float", "double", "half", "bfloat16", "long", "int", "bool"]
    + ["contiguous", "detach", "clone", "items"]
)
_NOWHERE = object()


def values_at_start(loop: Loop, frame: FrameType, delivered: Sequence[Any]) -> dict[str, Any]:
    """Those variables that the loop's `for` has set and its body reads and changes, as they were.

    `delivered` is what a loader handed over for this turn, if one did. CannotRunError if they
    cannot be known any more. Those of a function are its arguments.
    """
    node = loop.node
    changed = loop.given & loop.carried
    if not changed or all(_is_same_again(name, node.body) for name in changed):
        return {}
    if not isinstance(node, ast.For):
        raise CannotRunError("an argument was changed, and its old value was not kept")
    variables = variables_of(frame)
    target, source, index = _unwrapped(node)
    item = delivered[-1] if delivered else _item(source, index, frame, variables)
    if item is _NOWHERE:
        raise CannotRunError("its variable was changed, and its old value was not kept")
    values = _bound(target, item)
    is_known = changed <= values.keys()
    if not is_known or any(values[n] is not variables.get(n) for n in values.keys() - changed):
        raise CannotRunError("its variable does not come from the batch that is known")
    return {name: values[name] for name in changed}


def _is_same_again(name: str, body: Sequence[ast.stmt]) -> bool:
    """Whether the body only moves or converts the variable: `x = x.to(device)`."""
    nodes = [node for each in body for node in ast.walk(each)]
    stores = [n for n in nodes if isinstance(n, ast.Name) and n.id == name]
    stores = [n for n in stores if isinstance(n.ctx, ast.Store)]
    moved = 0
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            moved += sum(_is_moved(name, *pair) for pair in _pairs(node.targets[0], node.value))
    return moved == len(stores)


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _is_moved(name: str, target: ast.expr, value: ast.expr) -> bool:
    if not (isinstance(target, ast.Name) and target.id == name):
        return False
    calls = [each for each in ast.walk(value) if isinstance(each, ast.Call)]
    methods = [each.func.attr for each in calls if isinstance(each.func, ast.Attribute)]
    is_only_moved = len(methods) == len(calls) and set(methods) <= _IDEMPOTENT
    if isinstance(value, ast.Call):
        owner = value.func.value if isinstance(value.func, ast.Attribute) else None
        return is_only_moved and len(calls) == 1 and isinstance(owner, ast.Name)
    return is_only_moved and isinstance(value, (ast.DictComp, ast.ListComp))


def _unwrapped(node: ast.For) -> tuple[ast.expr, ast.expr, ast.expr | None]:
    """The target and the source of the items, without `enumerate` and progress bars around them."""
    target, source, index = node.target, node.iter, None
    while isinstance(source, ast.Call) and source.args:
        name = getattr(source.func, "attr", getattr(source.func, "id", ""))
        if name == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            index, target = target.elts
            if len(source.args) > 1 or source.keywords:
                index = None  # it does not count from zero
        elif name not in _TRANSPARENT:
            break
        source = source.args[0]
    return target, source, index


def _item(
    source: ast.expr, index: ast.expr | None, frame: FrameType, variables: Mapping[str, Any]
) -> Any:
    """What the source gave for this turn: a list at a known place, or a generator that waits."""
    if isinstance(source, ast.Call):
        name = getattr(source.func, "attr", getattr(source.func, "id", ""))
        return _yielded([each for each in living(GeneratorType) if _is_waiting(each, name)])
    if not isinstance(source, (ast.Name, ast.Attribute)):
        return _NOWHERE
    sequence = _value_of(source, frame.f_globals, variables)
    if isinstance(sequence, GeneratorType):
        return _yielded([sequence])
    at = variables.get(index.id) if isinstance(index, ast.Name) else None
    if type(sequence) in (list, tuple) and type(at) is int and at < len(sequence):
        return sequence[at]
    return _NOWHERE


def _is_waiting(generator: GeneratorType[Any, Any, Any], name: str) -> bool:
    is_there = generator.gi_frame is not None and not generator.gi_running
    return is_there and generator.gi_code.co_name == name


def _yielded(generators: Sequence[GeneratorType[Any, Any, Any]]) -> Any:
    """What a generator gave last, if it stands at a `yield` of values that can be asked again."""
    frame = generators[0].gi_frame if len(generators) == 1 else None
    yields = [] if frame is None else yields_at(frame.f_code, frame.f_lineno)
    if frame is None or len(yields) != 1 or yields[0].value is None:
        return _NOWHERE
    return _value_of(yields[0].value, frame.f_globals, variables_of(frame))


def _value_of(node: ast.expr, space: dict[str, Any], variables: Mapping[str, Any]) -> Any:
    if not all(isinstance(each, _PURE) for each in ast.walk(node)):
        return _NOWHERE
    try:
        code = compile(ast.Expression(node), "<stayfinite>", "eval")
        return eval(code, space, dict(variables))
    except Exception:
        return _NOWHERE


def _bound(target: ast.expr, item: Any) -> dict[str, Any]:
    """The names of a target with their parts of the item."""
    if isinstance(target, ast.Name):
        return {target.id: item}
    parts = getattr(target, "elts", [])
    if not parts or not isinstance(item, (list, tuple)) or len(parts) != len(item):
        raise CannotRunError("its variable does not come from the batch that is known")
    found: dict[str, Any] = {}
    for part, value in zip(parts, item, strict=True):
        found |= _bound(part, value)
    return found


def taken_in(loop: Loop, frame: FrameType, *, since: int, until: int | None) -> dict[int, Any]:
    """What `next(generator)` has given in this turn, by the number of the generator.

    Only where it was asked once between these lines, by a statement of its own.
    """
    variables = variables_of(frame)
    found: dict[int, list[tuple[GeneratorType[Any, Any, Any], ast.expr]]] = {}
    body = loop.node.body
    for statement in _plain_statements(body):
        is_past = statement.lineno >= since and (until is None or _end(statement) < until)
        asked = _asked(statement) if is_past else None
        if asked is not None:
            target, source = asked
            generator = _value_of(source, frame.f_globals, variables)
            if isinstance(generator, GeneratorType):
                found.setdefault(id(generator), []).append((generator, target))
    taken: dict[int, Any] = {}
    for number, asks in found.items():
        if len(asks) == 1:
            generator, target = asks[0]
            value = _yielded([generator])
            if value is _NOWHERE:
                value = _still_bound(target, body, variables)
            if value is not _NOWHERE:
                taken[number] = value
    return taken


def _plain_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run once in each turn."""
    for statement in body:
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            yield from _plain_statements(statement.body)
        else:
            yield statement


def _asked(statement: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """Target and generator of `x = next(generator)`."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    is_next = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "next"
    if not isinstance(statement, ast.Assign) or not isinstance(value, ast.Call) or not is_next:
        return None
    return (statement.targets[0], value.args[0]) if len(statement.targets) == 1 else None


def _still_bound(target: ast.expr, body: Sequence[ast.stmt], variables: Mapping[str, Any]) -> Any:
    """What the target was given, if nothing else in the body assigns to its names."""
    parts = [target] if isinstance(target, ast.Name) else getattr(target, "elts", [])
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    nodes = [node for each in body for node in ast.walk(each) if isinstance(node, ast.Name)]
    stores = [node.id for node in nodes if isinstance(node.ctx, ast.Store)]
    is_known = len(names) == len(parts) and all(name in variables for name in names)
    if not names or not is_known or any(stores.count(name) != 1 for name in names):
        return _NOWHERE
    if isinstance(target, ast.Name):
        return variables[target.id]
    return tuple(variables[name] for name in names)


def _end(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def replaced_in(value: Any, batch: Any, other: Any) -> Any:
    """The value with the parts of another batch in the place of those that are of this one."""
    if value is batch:
        return other
    both = zip(_parts(batch), _parts(other), strict=False)
    parts = {id(one): two for one, two in both if one is not two}
    return map_leaves(value, lambda leaf: parts.get(id(leaf), leaf), kinds=_LEAVES)


_LEAVES = (Tensor, np.ndarray)


def _parts(batch: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(batch, lambda leaf: found.append(leaf) or leaf, kinds=_LEAVES)  # type: ignore[func-returns-value]
    return found
