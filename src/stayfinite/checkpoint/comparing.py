"""What differs between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stayfinite.checkpoint.checks.dtypes import is_narrower, name_of
from stayfinite.checkpoint.format.contents import Contents, ModuleRecord, part_name
from stayfinite.checkpoint.format.held import Held, is_same
from stayfinite.checkpoint.problems import Problem

GROWTH = 100.0
"""So many times the largest magnitude of before is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How many tensors are the same to the byte, which are not, and what is wrong with that."""

    same: int
    changed: tuple[str, ...]
    problems: tuple[Problem, ...]


def compare(contents: Contents, other: Contents) -> Comparison:
    """The first against the second, tensor by tensor; they must have been read with digests."""
    ours, theirs = _compared(contents), _compared(other)
    both = [key for key in ours if key in theirs]
    same = [key for key in both if is_same(ours[key], theirs[key])]
    problems = [*_one_sided(ours, theirs)]
    for key in both:
        problems += _differences(key, ours[key], theirs[key])
    known = set(same)
    changed = tuple(key for key in both if key not in known)
    return Comparison(same=len(same), changed=changed, problems=tuple(problems))


def tensors_of(contents: Contents) -> dict[str, dict[str, Held]]:
    """The tensors of each part that is there, by their names in it."""
    parts: dict[str, Any] = {}
    several = {
        "model": contents.models,
        "ema": contents.averages,
        "optimizer": [each.state_dict for each in contents.optimizers],
        "scheduler": contents.schedulers,
    }
    for part, trees in several.items():
        for number, tree in enumerate(trees):
            parts[part_name(part, number, len(trees))] = tree
    parts |= {"scaler": contents.scaler, "random": contents.random, "extra": contents.extra}
    return {part: dict(_named(tree)) for part, tree in parts.items() if tree}


def _named(tree: Any, above: str = "") -> Iterator[tuple[str, Held]]:
    if isinstance(tree, Held):
        yield above, tree
    elif isinstance(tree, ModuleRecord):
        yield from tree.tensors.items()
    elif isinstance(tree, (dict, list, tuple)):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _named(item, f"{above}.{key}" if above else str(key))


def _compared(contents: Contents) -> dict[str, Held]:
    """The tensors of models, averages and optimizers by their full names."""
    return {
        f"{part}.{name}": held
        for part, tensors in tensors_of(contents).items()
        if part.partition(".")[0] in ("model", "ema", "optimizer")
        for name, held in tensors.items()
    }


def _one_sided(ours: Mapping[str, Held], theirs: Mapping[str, Held]) -> Iterator[Problem]:
    for key in theirs:
        if key not in ours:
            yield Problem(kind="missing", key=key, message="is only in the other one.")
    for key in ours:
        if key not in theirs:
            yield Problem(kind="unexpected", key=key, message="is not in the other one.")


def _differences(key: str, held: Held, other: Held) -> Iterator[Problem]:
    if held.shape != other.shape:
        message = f"has shape {list(held.shape)}, and {list(other.shape)} in the other one."
        yield Problem(kind="shape", key=key, message=message)
    if held.dtype != other.dtype:
        message = f"is {name_of(held.dtype)}, and {name_of(other.dtype)} in the other one."
        is_error = is_narrower(held.dtype, other.dtype)
        yield Problem(kind="dtype", key=key, message=message, is_error=is_error)
    before, now = other.tally.largest, held.tally.largest
    if before > 0 and now > GROWTH * before and now > 1:
        message = f"its largest magnitude went from {before:.3g} to {now:.3g}."
        yield Problem(kind="drift", key=key, message=message, is_error=False)
