"""The parts of a training script that are not one expression: optimizers, rates and updates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stayfinite.explain.patch.source import Source
from stayfinite.explain.patch.syntax import called, calls_in, constant, keyword

OPTIMIZERS = frozenset(
    ["SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adadelta"]
    + ["Adagrad", "Adafactor", "RMSprop", "Rprop", "LBFGS", "Muon"]
)
DEFAULT_RATES = {"SGD": 1e-3, "Adagrad": 1e-2, "RMSprop": 1e-2, "LBFGS": 1.0, "Adamax": 2e-3}
_RATE = re.compile(r"^(lr|learning_rate|learningrate|step_size|base_lr|\w+_lr|lr_\w+)$", re.I)
_OPTIMIZER = re.compile(r"opt", re.I)
_NOT_OPTIMIZER = re.compile(r"sched", re.I)


@dataclass(frozen=True, eq=False)
class Update:
    """A statement that makes an update."""

    source: Source
    statement: ast.stmt
    optimizer: str
    scaler: str | None = None


def constructors(sources: tuple[Source, ...]) -> Iterator[tuple[Source, ast.Call]]:
    """Calls that make an optimizer of torch's."""
    for source in sources:
        for call in calls_in(source.tree, OPTIMIZERS):
            yield source, call


def rates(sources: tuple[Source, ...]) -> Iterator[tuple[Source, ast.expr, float]]:
    """Numbers that are learning rates, where they are written."""
    for source in sources:
        seen: set[ast.expr] = set()
        for node in (*_rate_arguments(source), *_named_rates(source)):
            value = constant(node)
            if value and node not in seen:
                seen.add(node)
                yield source, node, value


def _rate_arguments(source: Source) -> Iterator[ast.expr]:
    for call in calls_in(source.tree, OPTIMIZERS):
        given = keyword(call, "lr")
        if given is None and len(call.args) > 1:
            given = call.args[1]
        if given is not None:
            yield given


def _named_rates(source: Source) -> Iterator[ast.expr]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            if _is_rate(node.targets[0]):
                yield node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None and _is_rate(node.target):
            yield node.value
        elif isinstance(node, ast.arguments):
            yield from _defaults(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and _RATE.match(str(key.value)):
                    yield value
        elif isinstance(node, ast.keyword) and node.arg and _RATE.match(node.arg):
            yield node.value
        elif isinstance(node, ast.Call) and called(node) == "add_argument" and node.args:
            flag = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            default = keyword(node, "default")
            if default is not None and _RATE.match(str(flag).lstrip("-").replace("-", "_")):
                yield default


def _defaults(arguments: ast.arguments) -> Iterator[ast.expr]:
    plain = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(plain[::-1], arguments.defaults[::-1], strict=False)]
    pairs += [
        (name, value)
        for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is not None
    ]
    yield from (value for name, value in pairs if _RATE.match(name.arg))


def _is_rate(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return bool(_RATE.match(name))


def updates(sources: tuple[Source, ...]) -> Iterator[Update]:
    """Statements `optimizer.step()` and `scaler.step(optimizer)`."""
    for source in sources:
        for call in calls_in(source.tree, ["step"]):
            statement = source.parents.get(call)
            if not isinstance(statement, ast.Expr) or not isinstance(call.func, ast.Attribute):
                continue
            owner = source.of(call.func.value)
            if len(call.args) == 1 and "scaler" in owner.lower():
                yield Update(source, statement, source.of(call.args[0]), owner)
            elif not call.args and _OPTIMIZER.search(owner) and not _NOT_OPTIMIZER.search(owner):
                yield Update(source, statement, owner)


def number(value: float, *, like: str = "") -> str:
    """The number as a person writes it: 0.002, or 2e-3 where the old one was written so."""
    text = f"{value:.6e}" if "e" in like else f"{value:g}"
    mantissa, e, power = text.partition("e")
    return f"{float(mantissa):g}e{int(power)}" if e else text
