"""Whether a checkpoint's tensors fit a model: names, shapes, dtypes, and where each goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stayfinite.checkpoint.format import tally
from stayfinite.checkpoint.modules import (
    Place,
    canonical_name,
    is_derived,
    join_names,
    named_owners,
    places,
    slot_for,
)
from stayfinite.checkpoint.problem import Problem, Rules, error, matches, warning
from stayfinite.checkpoint.values import Held, ModuleRecord, is_same

# Names that wrappers put before the names of a model; tried in turn on files of others.
_PREFIXES = ("", "module.", "model.", "_orig_mod.", "net.", "network.", "ema.")

# Beyond these a parameter that nobody loaded looks like memory that nobody set.
_LARGE = 1e6
_TINY = 1e-30


@dataclass(kw_only=True)
class Fit:
    """What goes where, and what is wrong with that."""

    moves: list[tuple[Place, Held]] = field(default_factory=list)
    extra_states: Mapping[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def fit(record: ModuleRecord, model: nn.Module, part: str, rules: Rules) -> Fit:
    """Every tensor of a record with the model's names with its place, and all that does not fit."""
    own, owners = places(model), dict(named_owners(model))
    found = Fit(extra_states=record.extra_states)
    for name, held in record.tensors.items():
        place = own.get(name) or slot_for(owners, name)
        if place is not None:
            found.problems += _misfits(place, held, f"{part}.{name}")
            found.moves.append((place, held))
        elif not _is_derived_name(owners, name):
            message = (
                "has no place in the model: no parameter, buffer or tensor attribute has this name."
            )
            if record.kinds.get(name) == "attribute":
                message += (
                    f' It was a plain attribute; if nothing needs it, pass ignore=["{name}"].'
                )
            found.problems.append(rules.misfit("unexpected", f"{part}.{name}", message))
    found.problems += _dtype_problems(found.moves, part)
    found.problems += _conflicts(found.moves, part)
    missing = [p for p in _uncovered(own, record.tensors) if not matches(p.name, rules.ignore)]
    found.problems += _missing_problems(missing, part, rules, is_complete=record.is_complete)
    found.problems += _other_problems(record, model, part, rules)
    return found


def _is_derived_name(owners: Mapping[str, nn.Module], name: str) -> bool:
    above, _, attribute = name.rpartition(".")
    owner = owners.get(above)
    return owner is not None and attribute in vars(owner) and is_derived(owner, attribute)


def as_named_by(model: nn.Module, record: ModuleRecord, ignore: Sequence[str] = ()) -> ModuleRecord:
    """The record under the model's names and with its kinds, without what is ignored.

    Tied tensors are there under each name. A file of others may have names of wrappers before its
    names, and does not know what is a parameter.
    """
    own = places(model)
    named = _plain_name(record, own)
    tied = {alias: record.tensors[name] for alias, name in record.ties.items()}
    tensors = {named(name): held for name, held in {**record.tensors, **tied}.items()}
    tensors = {name: held for name, held in tensors.items() if not matches(name, ignore)}
    return ModuleRecord(
        tensors=tensors,
        kinds={**record.kinds, **{name: own[name].kind for name in tensors if name in own}},
        extra_states={named(f"{name}.")[:-1]: state for name, state in record.extra_states.items()},
        others=tuple(name for name in map(named, record.others) if not matches(name, ignore)),
        is_complete=record.is_complete,
    )


def _plain_name(record: ModuleRecord, own: Mapping[str, Place]) -> Callable[[str], str]:
    """From a name in the file to the one in the model: without the prefix that most names have."""
    if record.is_complete:
        return lambda name: name
    names = [canonical_name(name) for name in record.tensors]

    def hits(prefix: str) -> int:
        return sum(name.removeprefix(prefix) in own for name in names if name.startswith(prefix))

    best = max(_PREFIXES, key=hits)
    return lambda name: canonical_name(name).removeprefix(best)


def _misfits(place: Place, held: Held, key: str) -> Iterator[Problem]:
    tensor = place.tensor
    if tensor is None:
        return
    if is_lazy(tensor):
        message = "has no shape in the model yet; run the model once before loading."
        yield error("shape", key, message)
    elif tensor.is_meta:
        message = "is on the meta device; call model.to_empty(device=...) before loading."
        yield error("shape", key, message)
    elif tuple(tensor.shape) != held.shape:
        message = f"has shape {list(held.shape)}, and in the model {list(tensor.shape)}."
        yield error("shape", key, message)


def _conflicts(moves: list[tuple[Place, Held]], part: str) -> Iterator[Problem]:
    """Names that are one tensor in the model but two different ones in the file."""
    first: dict[object, tuple[str, Held]] = {}
    for place, held in moves:
        name, other = first.setdefault(place.identity, (place.name, held))
        if held is not other and not is_same(held, other):
            message = f"is tied to {name} in the model, and they differ in the file."
            yield error("tied", f"{part}.{place.name}", message)


def _uncovered(own: Mapping[str, Place], wanted: Mapping[str, Held]) -> list[Place]:
    """Tensors of the model of which the file has none of the names; each once."""
    covered = {place.identity for name, place in own.items() if name in wanted}
    rest: dict[object, Place] = {}
    for place in own.values():
        known = rest.get(place.identity)
        if place.identity not in covered and (known is None or known.kind == "attribute"):
            rest[place.identity] = place
    return list(rest.values())


def _other_problems(
    record: ModuleRecord, model: nn.Module, part: str, rules: Rules
) -> Iterator[Problem]:
    """What is no tensor: states that modules set themselves, and what has no place at all."""
    takers = {
        name
        for name, module in named_owners(model)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    for name in record.extra_states:
        if name not in takers:
            key = f"{part}.{join_names(name, '_extra_state')}"
            yield error("unexpected", key, "has no place in the model: no set_extra_state() there.")
    for name in takers - set(record.extra_states):
        key = f"{part}.{join_names(name, '_extra_state')}"
        yield rules.misfit("missing", key, "is not in the file.")
    for name in record.others:
        message = "is no tensor, so it has no place in the model."
        yield rules.misfit("unexpected", f"{part}.{name}", message)


def _missing_problems(
    missing: Sequence[Place], part: str, rules: Rules, *, is_complete: bool
) -> Iterator[Problem]:
    """An error for each that should have been saved, and for each that is no usable value."""
    for place in missing:
        key = f"{part}.{place.name}"
        is_derived = place.is_made_anew and not is_complete
        if rules.strict and not is_derived:
            message = f"is not in the file, and the model has it as a {place.kind}."
            if place.kind == "attribute" and is_complete:
                message = (
                    "is not in the file: the model had no such attribute when it was saved. If "
                    f'nothing needs it, pass ignore=["{place.name}"].'
                )
            elif place.kind == "attribute":
                message = (
                    "is not in the file: the model holds it as a plain attribute, which "
                    "state_dict() leaves out, so it would start again from its default. Use "
                    "register_buffer(), or save with save_checkpoint()."
                )
            yield error("missing", key, message)
            continue
        reason = _why_unset(place)
        if reason is not None:
            yield error("leftover", key, f"is not in the file{reason}.")
        if not is_derived:
            message = "is not in the file and keeps the value that the model has now."
            yield warning("missing", key, message)


def _why_unset(place: Place) -> str | None:
    """Why the model's value looks as if nobody had ever set it; buffers may hold all but NaN."""
    tensor, is_parameter = place.tensor, place.kind == "parameter"
    if tensor is None or is_lazy(tensor) or tensor.is_meta:
        return " and has no value in the model either"
    values = tally(tensor)
    looks = ", and in the model it looks uninitialised: "
    if values.has_nan or (is_parameter and not values.is_finite):
        return f"{looks}it holds {values.words}"
    if is_parameter and (values.largest > _LARGE or 0 < values.largest < _TINY):
        return f"{looks}its largest magnitude is {values.largest:.3g}"
    return None


_NEARLY_MAX = 0.99


def _dtype_problems(moves: Sequence[tuple[Place, Held]], part: str) -> Iterator[Problem]:
    """Values that do not survive are errors; lost precision is one warning for all tensors."""
    narrowed: dict[tuple[str, str, bool], list[str]] = {}
    for place, held in moves:
        if place.tensor is None or place.tensor.dtype == held.dtype:
            continue
        key, target, largest = f"{part}.{place.name}", place.tensor.dtype, held.tally.largest
        stored, present = name_of(held.dtype), name_of(target)
        is_narrow = held.dtype.itemsize < target.itemsize
        if (held.dtype.is_complex, held.dtype.is_floating_point) != (
            target.is_complex,
            target.is_floating_point,
        ):
            message = f"is {stored} in the file and {present} in the model."
            yield error("dtype", key, message)
        elif not target.is_floating_point:
            continue
        elif largest > torch.finfo(target).max:
            message = f"holds {largest:.4g}, which is Inf in the model's {present}."
            yield error("narrowed", key, message)
        elif is_narrow and largest >= _NEARLY_MAX * torch.finfo(held.dtype).max:
            message = (
                f"holds {largest:.4g}, the limit of the file's {stored}: it was cut off when it "
                f"was saved, and the model has {present}."
            )
            yield error("narrowed", key, message)
        else:
            narrowed.setdefault((stored, present, is_narrow), []).append(key)
    for (stored, present, was_saved_narrow), keys in narrowed.items():
        lost = "was lost when it was saved" if was_saved_narrow else "is lost by loading"
        others = f"and {len(keys) - 1} more " if len(keys) > 1 else ""
        message = f"{others}is {stored} in the file and {present} in the model: precision {lost}."
        yield warning("narrowed", keys[0], message)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether floats of this dtype have fewer bits."""
    both = dtype.is_floating_point and than.is_floating_point
    return both and dtype.itemsize < than.itemsize
