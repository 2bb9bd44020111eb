"""What differs between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stayfinite.checkpoint.checks.dtypes import is_narrower, name_of
from stayfinite.checkpoint.format.contents import Contents, ModuleRecord, part_name
from stayfinite.checkpoint.format.digests import digest
from stayfinite.checkpoint.format.held import Held, leaves
from stayfinite.checkpoint.format.layout import bytes_of
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
    ours, theirs = all_tensors(contents), all_tensors(other)
    both = [key for key in ours if key in theirs]
    same = [key for key in both if _value(ours[key]) == _value(theirs[key])]
    problems = [*_one_sided(ours, theirs)]
    for key in both:
        problems += _differences(key, ours[key], theirs[key])
    known = set(same)
    changed = tuple(key for key in both if key not in known)
    return Comparison(same=len(same), changed=changed, problems=tuple(problems))


def all_tensors(contents: Contents) -> dict[str, Held]:
    """The tensors of models, averages and optimizers by their full names."""
    found: dict[str, Held] = {}
    for number, model in enumerate(contents.models):
        found |= _of_module(model, part_name("model", number, len(contents.models)))
    for number, average in enumerate(contents.averages):
        part = part_name("ema", number, len(contents.averages))
        if isinstance(average, ModuleRecord):
            found |= _of_module(average, part)
        else:
            found |= {held.key: held for held in leaves(average)}
    for number, optimizer in enumerate(contents.optimizers):
        part = part_name("optimizer", number, len(contents.optimizers))
        for index, state in optimizer.state_dict.get("state", {}).items():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Held):
                    found[f"{part}.state.{index}.{name}"] = value
    return found


def _of_module(record: ModuleRecord, part: str) -> dict[str, Held]:
    return {f"{part}.{name}": held for name, held in record.tensors.items()}


def _value(held: Held) -> tuple[object, ...]:
    known = held.digest
    if known is None and held.tensor is not None:
        known = digest(bytes_of(held.tensor))
    return held.dtype, held.shape, known


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
