"""What can be wrong with a checkpoint, in itself and for those who shall get it.

Whether it fits a model (names, shapes, dtypes, and where each tensor goes), an optimizer, a batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stayfinite.checkpoint.format import tally
from stayfinite.checkpoint.modules import (
    Members,
    TensorPlace,
    canonical_name,
    is_derived,
    join_names,
    named_owners,
    parameter_names,
    place_tensors,
    places,
    slot_for,
)
from stayfinite.checkpoint.problem import Problem, Rules, error, errors_in, matches, warning
from stayfinite.checkpoint.values import (
    Contents,
    Held,
    ModuleRecord,
    OptimizerRecord,
    is_same,
    leaves,
    named_parts,
)
from stayfinite.detect.finite import all_finite
from stayfinite.nested import named_tensors
from stayfinite.snapshot import RandomState
from stayfinite.training import params_of

# Names that wrappers put before the names of a model; tried in turn on files of others.
_PREFIXES = ("", "module.", "model.", "_orig_mod.", "net.", "network.", "ema.")

# Beyond these a parameter that nobody loaded looks like memory that nobody set.
_LARGE = 1e6
_TINY = 1e-30


@dataclass(kw_only=True)
class Fit:
    """What goes where, and what is wrong with that."""

    moves: list[tuple[TensorPlace, Held]] = field(default_factory=list)
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
    missing = [p for p in _unset_places(own, record.tensors) if not matches(p.name, rules.ignore)]
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


def _plain_name(record: ModuleRecord, own: Mapping[str, TensorPlace]) -> Callable[[str], str]:
    """From a name in the file to the one in the model: without the prefix that most names have."""
    if record.is_complete:
        return lambda name: name
    names = [canonical_name(name) for name in record.tensors]

    def hits(prefix: str) -> int:
        return sum(name.removeprefix(prefix) in own for name in names if name.startswith(prefix))

    best = max(_PREFIXES, key=hits)
    return lambda name: canonical_name(name).removeprefix(best)


def _misfits(place: TensorPlace, held: Held, key: str) -> Iterator[Problem]:
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


def _conflicts(moves: list[tuple[TensorPlace, Held]], part: str) -> Iterator[Problem]:
    """Names that are one tensor in the model but two different ones in the file."""
    first: dict[object, tuple[str, Held]] = {}
    for place, held in moves:
        name, other = first.setdefault(place.identity, (place.name, held))
        if held is not other and not is_same(held, other):
            message = f"is tied to {name} in the model, and they differ in the file."
            yield error("tied", f"{part}.{place.name}", message)


def _unset_places(own: Mapping[str, TensorPlace], wanted: Mapping[str, Held]) -> list[TensorPlace]:
    """Tensors of the model of which the file has none of the names; each once."""
    covered = {place.identity for name, place in own.items() if name in wanted}
    rest: dict[object, TensorPlace] = {}
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
        message = "is not a tensor, so it has no place in the model."
        yield rules.misfit("unexpected", f"{part}.{name}", message)


def _missing_problems(
    missing: Sequence[TensorPlace], part: str, rules: Rules, *, is_complete: bool
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
                    "state_dict() does not contain, so it would start again from its default. Use "
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


def _why_unset(place: TensorPlace) -> str | None:
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


def _dtype_problems(moves: Sequence[tuple[TensorPlace, Held]], part: str) -> Iterator[Problem]:
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


@dataclass(kw_only=True)
class Judged:
    """Where everything goes, and all that is wrong."""

    problems: list[Problem] = field(default_factory=list)
    fits: list[tuple[nn.Module, Fit]] = field(default_factory=list)
    other_averages: list[tuple[Any, Any]] = field(default_factory=list)


def judge(contents: Contents, members: Members, rules: Rules, *, forward: Any = None) -> Judged:
    """Check the contents in themselves, and against everyone who shall get them."""
    pairs = zip(members.models, contents.models, strict=False)
    named = tuple(as_named_by(model, record, rules.ignore) for model, record in pairs)
    is_known = len(contents.models) == len(members.models)
    known = replace(contents, models=named) if is_known else contents
    judged = Judged(problems=list(own_problems(known, nonfinite_ok=rules.nonfinite_ok)))
    for part, asked in members.parts.items():
        there = len(contents.parts[part])
        if asked and there != len(asked):
            message = f"the file has {there or 'none'}, and {len(asked)} is to be loaded."
            judged.problems.append(error("missing", part, message))
    takers: list[tuple[tuple[str, nn.Module], ModuleRecord]]
    takers = [*zip(named_parts("model", members.models), named, strict=False)]
    for (part, average), state in zip(
        named_parts("ema", members.averages), contents.averages, strict=False
    ):
        if not isinstance(average, nn.Module):
            judged.other_averages.append((average, state))
            continue
        if isinstance(state, dict) and all(isinstance(item, Held) for item in state.values()):
            state = ModuleRecord(tensors=state)
        if isinstance(state, ModuleRecord):
            takers.append(((part, average), as_named_by(average, state, rules.ignore)))
        else:
            message = "is not the state of a module, and is to be loaded into one."
            judged.problems.append(error("missing", part, message))
    for (part, module), record in takers:
        found = fit(record, module, part, rules)
        judged.fits.append((module, found))
        judged.problems += found.problems
    for (part, optimizer), saved in zip(
        named_parts("optimizer", members.optimizers), contents.optimizers, strict=False
    ):
        names = parameter_names(optimizer, members.models)
        judged.problems += _optimizer_misfits(saved, optimizer, names, part)
    if forward is not None and members.models and not errors_in(judged.problems):
        judged.problems += forward_problems(*judged.fits[0], forward)
    return judged


# Squares by their nature: the next step takes their root.
SECOND_MOMENTS = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf"}
)
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_SCHEDULED = ("base_lrs", "_last_lr", "max_lrs", "min_lrs")
_ABSURD_RATE = 1e3  # no update of a training that works is a thousand times its gradient
_SETTINGS = ("eps", "weight_decay", "momentum", "alpha", "dampening", "betas")
_OBSERVED = ("min_val", "max_val")


def own_problems(contents: Contents, *, nonfinite_ok: Sequence[str] = ()) -> Iterator[Problem]:
    """Everything that can be said without the objects it is meant for."""
    fine = (*nonfinite_ok, *contents.nonfinite_ok)
    for part, model in named_parts("model", contents.models):
        yield from _module_problems(model, part, fine)
    for part, average in named_parts("ema", contents.averages):
        if isinstance(average, ModuleRecord):
            yield from _module_problems(average, part, fine)
            continue
        for held in leaves(average):
            if not held.tally.is_finite and not matches(held.key, fine):
                yield _nonfinite(held.key, held)
    for part, optimizer in named_parts("optimizer", contents.optimizers):
        yield from _optimizer_problems(optimizer, part)
    for part, state in named_parts("scheduler", contents.schedulers):
        for name in _SCHEDULED if isinstance(state, dict) else ():
            yield from _rate_problems(state.get(name), f"{part}.{name}")
    if isinstance(contents.scaler, dict):
        for scale in numbers(contents.scaler.get("scale")):
            if not math.isfinite(scale) or scale <= 0:
                message = f"the loss scale is {scale}; it must be finite and above 0."
                yield error("scaler", "scaler.scale", message)


def _module_problems(record: ModuleRecord, part: str, fine: Sequence[str]) -> Iterator[Problem]:
    """Bad values among the tensors of a model."""
    for name, held in record.tensors.items():
        key, tally = f"{part}.{name}", held.tally
        if not matches(name, fine) and not _is_fine(name, record.kinds.get(name), held):
            yield _nonfinite(key, held)
        if name.rpartition(".")[2] != "running_var" or not tally.has_finite:
            continue
        if tally.low < 0:
            message = f"a variance is negative ({tally.low:.3g}): its square root is NaN."
            yield error("variance", key, message)
        elif tally.high == 0:
            message = "every variance is 0: outputs are multiplied by 1/sqrt(eps)."
            yield error("variance", key, message)
        elif tally.low == 0:
            message = "a variance is 0: that channel was constant, and 1/sqrt(eps) scales it."
            yield warning("variance", key, message)


def _is_fine(name: str, kind: str | None, held: Held) -> bool:
    """Whether all is finite, or non-finite on purpose: a mask, or an observer that saw nothing."""
    tally = held.tally
    if tally.is_finite:
        return True
    if tally.has_nan or kind == "parameter" or "running_" in name:
        return False
    if name.endswith(_OBSERVED):
        return True
    if held.numel < 2:
        return False
    if kind is None:  # it may be a weight: only 0 beside Inf is surely a mask
        return tally.low == tally.high == 0
    return tally.low == tally.high or not tally.has_pos_inf


def _nonfinite(key: str, held: Held) -> Problem:
    count = f"of shape {list(held.shape)}" if held.shape else "a single value"
    return error("nonfinite", key, f"holds {held.tally.words} ({count}).")


def _optimizer_problems(record: OptimizerRecord, part: str) -> Iterator[Problem]:
    for number, group in enumerate(record.state_dict.get("param_groups", ())):
        above = f"{part}.param_groups.{number}"
        for name in _RATES:
            yield from _rate_problems(group.get(name), f"{above}.{name}")
        for name in _SETTINGS:
            if not all(map(math.isfinite, numbers(group.get(name)))):
                message = f"is {group[name]}, which is not finite."
                yield error("optimizer", f"{above}.{name}", message)
    names = record.names or ()
    for index, state in record.state_dict.get("state", {}).items():
        is_known = isinstance(index, int) and index < len(names)
        param = (names[index] if is_known else None) or index
        for name, value in state.items() if isinstance(state, dict) else ():
            yield from _state_problems(name, value, f"{part}.state.{param}.{name}")


def _state_problems(name: str, value: Any, key: str) -> Iterator[Problem]:
    for held in leaves(value):
        if not held.tally.is_finite:
            yield _nonfinite(key, held)
        elif name in SECOND_MOMENTS and held.tally.has_finite and held.tally.low < 0:
            message = f"a mean of squares is negative ({held.tally.low:.3g}): its root is NaN."
            yield error("optimizer", key, message)
    plain = [] if isinstance(value, Held) else numbers(value)
    if any(not math.isfinite(number) or (name == "step" and number < 0) for number in plain):
        yield error("optimizer", key, f"is {value}.")


def _rate_problems(rates: Any, key: str) -> Iterator[Problem]:
    for rate in dict.fromkeys(numbers(rates)):
        if not math.isfinite(rate) or rate < 0:
            message = f"the learning rate is {rate}; it must be finite and not negative."
            yield error("learning_rate", key, message)
        elif rate > _ABSURD_RATE:
            message = (
                f"the learning rate is {rate:.3g}, which is far too large: training that "
                "continues with it diverges. Set it again after loading."
            )
            yield warning("learning_rate", key, message)


def numbers(value: Any) -> list[float]:
    """The numbers in a setting: one, several, or a tensor with one of them."""
    if isinstance(value, Held):
        tally = value.tally
        if not tally.is_finite:
            return [math.nan]
        return [tally.low, tally.high] if tally.has_finite else []
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [float(value)] if is_number else []


# State that has one number for each number of the parameter.
_SHAPED = SECOND_MOMENTS - {"sum"} | {"exp_avg", "momentum_buffer", "grad_avg", "prev", "step_size"}


def _optimizer_misfits(
    record: OptimizerRecord, optimizer: Optimizer, names: Sequence[str | None], part: str
) -> Iterator[Problem]:
    """Everything that does not fit; `names` are those of the optimizer's parameters."""
    own = type(optimizer).__name__
    if record.class_name not in (None, own):
        message = f"was saved from {record.class_name} and would go to {own}."
        yield error("optimizer", part, message)
    groups = record.state_dict["param_groups"]
    saved = [len(group.get("params", ())) for group in groups]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        message = f"has groups of {saved} parameters, and the optimizer has {present}."
        yield error("optimizer", f"{part}.param_groups", message)
        return
    # torch matches by order alone, so state can end up with another parameter.
    for number, (before, now) in enumerate(zip(record.names or (), names, strict=False)):
        if before is not None and now is not None and before != now:
            message = f"was that of {before}, and would go to {now}: the order has changed."
            yield error("optimizer", f"{part}.state.{number}", message)
    ids = [number for group in groups for number in group["params"]]
    narrow: list[tuple[str, Held, Tensor]] = []
    for place, (number, param) in enumerate(zip(ids, params_of(optimizer), strict=True)):
        state = record.state_dict.get("state", {}).get(number)
        for name, value in state.items() if isinstance(state, dict) else ():
            key = f"{part}.state.{names[place] or place}.{name}"
            for held in leaves(value):
                if name in _SHAPED and held.shape != tuple(param.shape):
                    shapes = f"{list(held.shape)}, and its parameter {list(param.shape)}"
                    yield error("shape", key, f"has shape {shapes}.")
                if name != "step" and is_narrower(held.dtype, param.dtype):
                    narrow.append((key, held, param))
    if narrow:
        key, held, param = narrow[0]
        others = f"and {len(narrow) - 1} more were" if len(narrow) > 1 else "was"
        message = (
            f"{others} saved as {name_of(held.dtype)} for a {name_of(param.dtype)} parameter: "
            "small squares of gradients become 0, and the next update divides by eps alone. Save "
            "optimizer state as it is, or do not save it and warm up again."
        )
        yield error("narrowed", key, message)


_ROWS = 2


def forward_problems(model: nn.Module, fit: Fit, batch: Any) -> Iterator[Problem]:
    """What is wrong with the outputs; `batch` is one for the model, or True to make one up.

    A tuple is passed as arguments and a dict by name. The copy runs in eval mode, without
    gradients, and leaves the generators as they are. A batch of our own that the model does not
    take proves nothing, and is a warning.
    """
    is_given = batch is not True
    batch = batch if is_given else made_up_batch(model)
    if batch is None:
        message = "no batch could be made up for this model; give one as `forward`."
        yield warning("forward", "forward", message)
        return
    random = RandomState.capture()
    try:
        bad = _first_bad(_loaded_copy(model, fit), batch)
    except Exception as failure:
        reason = (str(failure).strip() or "no message").splitlines()[0][:200]
        message = f"the model raised {type(failure).__name__}: {reason}"
        yield (error if is_given else warning)("forward", "forward", message)
        return
    finally:
        random.restore()
    if bad is not None:
        where = bad or "the model itself"
        message = f"the output of {where} is not finite, and its inputs were."
        yield error("forward", "forward", message)


def _loaded_copy(model: nn.Module, fit: Fit) -> nn.Module:
    # Copied together, so that the places are those of the other model.
    other, there = copy.deepcopy((model, [place for place, _ in fit.moves]))
    loaded = [replace(held, is_private=False) for _, held in fit.moves]  # still needed
    place_tensors([], zip(there, loaded, strict=True), other)
    return other.eval()


def _first_bad(model: nn.Module, batch: Any) -> str | None:
    """The name of the first module with a non-finite output; None when all are finite."""
    bad: list[str] = []

    def look(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not bad and not all_finite(tensor for _, tensor in named_tensors(output, "")):
            bad.append(name)

    for name, module in model.named_modules():
        module.register_forward_hook(partial(look, name))
    with torch.no_grad():
        if isinstance(batch, Mapping):
            model(**batch)
        else:
            model(*batch if isinstance(batch, (tuple, list)) else (batch,))
    return bad[0] if bad else None


def made_up_batch(model: nn.Module) -> Tensor | None:
    """A small random batch for the first layer whose input shape is known."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(floats, torch.float32)
    generator = torch.Generator().manual_seed(0)
    shape: tuple[int, ...]
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            size = (_ROWS, 8)
            return torch.randint(layer.num_embeddings, size, generator=generator).to(device)
        if isinstance(layer, nn.Linear):
            shape = (_ROWS, layer.in_features)
        elif isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            shape = (_ROWS, layer.in_channels, *[32] * len(layer.kernel_size))
        elif isinstance(layer, (nn.RNN, nn.LSTM, nn.GRU)):
            shape = (_ROWS, 8, layer.input_size)
        else:
            continue
        return torch.randn(shape, generator=generator).to(device, dtype)
    return None
