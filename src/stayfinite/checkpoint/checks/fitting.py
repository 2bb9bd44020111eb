"""Whether a checkpoint's tensors fit a model, and where each of them goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stayfinite.checkpoint.checks.dtypes import dtype_problems
from stayfinite.checkpoint.checks.leftovers import leftover_problems
from stayfinite.checkpoint.format.contents import ModuleRecord
from stayfinite.checkpoint.format.held import Held
from stayfinite.checkpoint.modules import (
    Place,
    canonical,
    is_derived_name,
    named_owners,
    places,
    slot_for,
)
from stayfinite.checkpoint.problems import Problem
from stayfinite.checkpoint.rules import Rules, matches

# Names that wrappers put before the names of a model; tried in turn on files of others.
_PREFIXES = ("", "module.", "model.", "_orig_mod.", "net.", "network.", "ema.")


@dataclass(kw_only=True)
class Fit:
    """What goes where, and what is wrong with that."""

    moves: list[tuple[Place, Held]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def fit(record: ModuleRecord, model: nn.Module, part: str, rules: Rules) -> Fit:
    """Every tensor of the record with its place in the model, and all that does not fit."""
    found = Fit()
    own = places(model)
    wanted = {
        name: held for name, held in _named(record, own).items() if not matches(name, rules.ignore)
    }
    for name, held in wanted.items():
        place = own.get(name) or slot_for(model, name)
        if place is not None:
            found.problems += _misfits(place, held, f"{part}.{name}")
            found.moves.append((place, held))
        elif not is_derived_name(model, name):
            found.problems.append(_unexpected(f"{part}.{name}", held, rules.strict))
    found.problems += dtype_problems(found.moves, part)
    found.problems += _conflicts(found.moves, part)
    missing = [place for place in _uncovered(own, wanted) if not matches(place.name, rules.ignore)]
    found.problems += leftover_problems(
        missing, part, strict=rules.strict, is_complete=record.is_complete
    )
    found.problems += _extra_state_problems(record, model, part)
    return found


def with_kinds(record: ModuleRecord, model: nn.Module) -> ModuleRecord:
    """The record under the model's names; a file of others does not know what is a parameter."""
    own = places(model)
    tensors = _named(record, own)
    known = {name: own[name].kind for name in tensors if name in own}
    return ModuleRecord(
        tensors=tensors,
        kinds={**record.kinds, **known},
        ties=record.ties,
        extra_states=record.extra_states,
        is_complete=record.is_complete,
    )


def _named(record: ModuleRecord, own: Mapping[str, Place]) -> dict[str, Held]:
    """The record's tensors by the model's names: tied ones under each, without wrappers."""
    if record.is_complete:
        tied = {alias: record.tensors[name] for alias, name in record.ties.items()}
        return {**record.tensors, **tied}
    tensors = {canonical(name): held for name, held in record.tensors.items()}

    def hits(prefix: str) -> int:
        return sum(name.removeprefix(prefix) in own for name in tensors if name.startswith(prefix))

    best = max(_PREFIXES, key=hits)
    return {
        name.removeprefix(best): held for name, held in tensors.items() if name.startswith(best)
    } | {name: held for name, held in tensors.items() if not name.startswith(best)}


def _misfits(place: Place, held: Held, key: str) -> Iterator[Problem]:
    tensor = place.tensor
    if tensor is None:
        return
    if is_lazy(tensor):
        message = "has no shape in the model yet; run the model once before loading."
        yield Problem(kind="shape", key=key, message=message)
    elif tensor.is_meta:
        message = "is on the meta device; call model.to_empty(device=...) before loading."
        yield Problem(kind="shape", key=key, message=message)
    elif tuple(tensor.shape) != held.shape:
        message = f"has shape {list(held.shape)}, and in the model {list(tensor.shape)}."
        yield Problem(kind="shape", key=key, message=message)


def _unexpected(key: str, held: Held, strict: bool) -> Problem:
    shape = list(held.shape)
    message = f"(shape {shape}) has no place in the model: no parameter, buffer or attribute."
    return Problem(kind="unexpected", key=key, message=message, is_error=strict)


def _conflicts(moves: list[tuple[Place, Held]], part: str) -> Iterator[Problem]:
    """Names that are one tensor in the model but two different ones in the file."""
    first: dict[object, tuple[str, Held]] = {}
    for place, held in moves:
        name, other = first.setdefault(place.identity, (place.name, held))
        if held is other or held.tensor is None or other.tensor is None:
            continue
        if held.shape != other.shape or not torch.equal(held.tensor, other.tensor):
            message = f"is tied to {name} in the model, and they differ in the file."
            yield Problem(kind="tied", key=f"{part}.{place.name}", message=message)


def _uncovered(own: Mapping[str, Place], wanted: Mapping[str, Held]) -> list[Place]:
    """Tensors of the model of which the file has none of the names; each once."""
    covered = {place.identity for name, place in own.items() if name in wanted}
    rest: dict[object, Place] = {}
    for place in own.values():
        known = rest.get(place.identity)
        if place.identity not in covered and (known is None or known.kind == "attribute"):
            rest[place.identity] = place
    return list(rest.values())


def _extra_state_problems(record: ModuleRecord, model: nn.Module, part: str) -> Iterator[Problem]:
    takers = {
        name
        for name, module in named_owners(model)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    for name in record.extra_states:
        if name not in takers:
            key = f"{part}.{name}._extra_state" if name else f"{part}._extra_state"
            message = "has no place in the model: no set_extra_state() there."
            yield Problem(kind="unexpected", key=key, message=message)
    for name in takers - set(record.extra_states) if record.is_complete else ():
        key = f"{part}.{name}._extra_state" if name else f"{part}._extra_state"
        yield Problem(kind="missing", key=key, message="is not in the file.")
