"""What can be wrong with a checkpoint, in itself and for those who shall get it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.checkpoint.fit import Fit, as_named_by, fit, is_narrower, name_of
from stayfinite.checkpoint.modules import Members, Placing, parameter_names, places, slot_for
from stayfinite.checkpoint.problem import Problem, Rules, errors_in, matches
from stayfinite.checkpoint.values import (
    Contents,
    Held,
    ModuleRecord,
    OptimizerRecord,
    leaves,
    part_name,
)
from stayfinite.detect.finite import all_finite
from stayfinite.nested import named_tensors
from stayfinite.snapshot import RandomState


@dataclass(kw_only=True)
class Judged:
    """Where everything goes, and all that is wrong."""

    problems: list[Problem] = field(default_factory=list)
    fits: list[tuple[nn.Module, Fit]] = field(default_factory=list)
    other_averages: list[tuple[Any, Any]] = field(default_factory=list)


def judge(
    contents: Contents,
    members: Members,
    rules: Rules,
    *,
    forward: Any = None,
) -> Judged:
    """Check the contents in themselves, and against everyone who shall get them."""
    known = replace(contents, models=_named(contents.models, members.models, rules.ignore))
    judged = Judged(problems=list(own_problems(known, nonfinite_ok=rules.nonfinite_ok)))
    judged.problems += _absent(contents, members)
    _fit_models(judged, contents, members, rules)
    _fit_averages(judged, contents, members, rules)
    for number, (record, optimizer) in enumerate(
        zip(contents.optimizers, members.optimizers, strict=False)
    ):
        part = part_name("optimizer", number, len(members.optimizers))
        names = parameter_names(optimizer, members.models)
        judged.problems += optimizer_problems(record, optimizer, names, part)
    if forward is not None and members.models and not errors_in(judged.problems):
        model, found = judged.fits[0]
        judged.problems += forward_problems(model, found, forward)
    return judged


def _named(
    records: tuple[ModuleRecord, ...], models: tuple[nn.Module, ...], ignore: Sequence[str]
) -> tuple[ModuleRecord, ...]:
    if len(records) != len(models):
        return records
    pairs = zip(models, records, strict=True)
    return tuple(as_named_by(model, record, ignore) for model, record in pairs)


def _absent(contents: Contents, members: Members) -> Iterator[Problem]:
    """Parts that are asked for and not there."""
    pairs = (
        ("model", len(contents.models), len(members.models)),
        ("optimizer", len(contents.optimizers), len(members.optimizers)),
        ("scheduler", len(contents.schedulers), len(members.schedulers)),
        ("scaler", int(contents.scaler is not None), int(members.scaler is not None)),
        ("ema", len(contents.averages), len(members.averages)),
    )
    for part, there, asked in pairs:
        if asked and there != asked:
            message = f"the file has {there or 'none'}, and {asked} shall be loaded."
            yield Problem(kind="missing", key=part, message=message)


def _fit_models(judged: Judged, contents: Contents, members: Members, rules: Rules) -> None:
    for number, (record, model) in enumerate(zip(contents.models, members.models, strict=False)):
        part = part_name("model", number, len(members.models))
        found = fit(record, model, part, rules)
        judged.problems += found.problems
        judged.fits.append((model, found))


def _fit_averages(judged: Judged, contents: Contents, members: Members, rules: Rules) -> None:
    for number, (state, average) in enumerate(
        zip(contents.averages, members.averages, strict=False)
    ):
        part = part_name("ema", number, len(members.averages))
        if not isinstance(average, nn.Module):
            judged.other_averages.append((average, state))
            continue
        record = _record_of(state)
        if record is None:
            message = "is no state of a module, and shall be loaded into one."
            judged.problems.append(Problem(kind="missing", key=part, message=message))
            continue
        found = fit(record, average, part, rules)
        judged.problems += found.problems
        judged.fits.append((average, found))


def _record_of(state: Any) -> ModuleRecord | None:
    if isinstance(state, ModuleRecord):
        return state
    if isinstance(state, dict) and all(isinstance(item, Held) for item in state.values()):
        return ModuleRecord(tensors=state)
    return None


# Squares by their nature: the next step takes their root.
SECOND_MOMENTS = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf"}
)
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_ABSURD_RATE = 1e3  # no update of a training that works is a thousand times its gradient
_SETTINGS = ("eps", "weight_decay", "momentum", "alpha", "dampening", "betas")
_OBSERVED = ("min_val", "max_val")


def own_problems(contents: Contents, *, nonfinite_ok: Sequence[str] = ()) -> Iterator[Problem]:
    """Everything that can be said without the objects it is meant for."""
    fine = (*nonfinite_ok, *contents.nonfinite_ok)
    for number, model in enumerate(contents.models):
        part = part_name("model", number, len(contents.models))
        yield from module_problems(model, part, nonfinite_ok=fine)
    for number, average in enumerate(contents.averages):
        part = part_name("ema", number, len(contents.averages))
        yield from _average_problems(average, part, fine)
    for number, optimizer in enumerate(contents.optimizers):
        part = part_name("optimizer", number, len(contents.optimizers))
        yield from _optimizer_problems(optimizer, part)
    for number, scheduler in enumerate(contents.schedulers):
        part = part_name("scheduler", number, len(contents.schedulers))
        yield from _scheduler_problems(scheduler, part)
    if isinstance(contents.scaler, dict):
        yield from _scaler_problems(contents.scaler)


def module_problems(
    record: ModuleRecord, part: str, *, nonfinite_ok: Sequence[str] = ()
) -> Iterator[Problem]:
    """Bad values among the tensors of a model."""
    for name, held in record.tensors.items():
        key = f"{part}.{name}"
        kind = record.kinds.get(name)
        if not matches(name, nonfinite_ok) and not _is_fine(name, kind, held):
            yield _nonfinite(key, held)
        if name.rpartition(".")[2] == "running_var":
            yield from _variance_problems(key, held)


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
    return Problem(kind="nonfinite", key=key, message=f"holds {held.tally.words} ({count}).")


def _variance_problems(key: str, held: Held) -> Iterator[Problem]:
    tally = held.tally
    if not tally.has_finite:
        return
    if tally.low < 0:
        message = f"a variance is negative ({tally.low:.3g}): its square root is NaN."
        yield Problem(kind="variance", key=key, message=message)
    elif tally.high == 0:
        message = "every variance is 0: outputs are multiplied by 1/sqrt(eps)."
        yield Problem(kind="variance", key=key, message=message)
    elif tally.low == 0:
        message = "a variance is 0: that channel was constant, and 1/sqrt(eps) scales it."
        yield Problem(kind="variance", key=key, message=message, is_error=False)


def _average_problems(average: Any, part: str, fine: Sequence[str]) -> Iterator[Problem]:
    if isinstance(average, ModuleRecord):
        yield from module_problems(average, part, nonfinite_ok=fine)
        return
    for held in leaves(average):
        if not held.tally.is_finite and not matches(held.key, fine):
            yield _nonfinite(held.key, held)


def _optimizer_problems(record: OptimizerRecord, part: str) -> Iterator[Problem]:
    for number, group in enumerate(record.state_dict.get("param_groups", ())):
        yield from _group_problems(group, f"{part}.param_groups.{number}")
    names = record.names or ()
    for index, state in record.state_dict.get("state", {}).items():
        known = isinstance(index, int) and index < len(names)
        name = (names[index] if known else None) or index
        yield from _sanity_state_problems(state, f"{part}.state.{name}")


def _group_problems(group: Mapping[str, Any], part: str) -> Iterator[Problem]:
    for name in _RATES:
        yield from _rate_problems(numbers(group.get(name)), f"{part}.{name}")
    for name in _SETTINGS:
        if not all(map(math.isfinite, numbers(group.get(name)))):
            message = f"is {group[name]}, which is not finite."
            yield Problem(kind="optimizer", key=f"{part}.{name}", message=message)


def _rate_problems(rates: Sequence[float], key: str) -> Iterator[Problem]:
    for rate in dict.fromkeys(rates):
        if not math.isfinite(rate) or rate < 0:
            message = f"the learning rate is {rate}; it must be finite and not negative."
            yield Problem(kind="learning_rate", key=key, message=message)
        elif rate > _ABSURD_RATE:
            message = (
                f"the learning rate is {rate:.3g}, which is absurd: training that goes on with it "
                "diverges. Set it anew after loading."
            )
            yield Problem(kind="learning_rate", key=key, message=message, is_error=False)


def numbers(value: Any) -> list[float]:
    """The numbers in a setting: one, several, or a tensor with one of them."""
    if isinstance(value, Held):
        return _extremes(value)
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [float(value)] if is_number else []


def _extremes(held: Held) -> list[float]:
    tally = held.tally
    if not tally.is_finite:
        return [math.nan]
    return [tally.low, tally.high] if tally.has_finite else []


def _sanity_state_problems(state: Any, part: str) -> Iterator[Problem]:
    for name, value in state.items() if isinstance(state, dict) else ():
        key = f"{part}.{name}"
        for held in leaves(value):
            if not held.tally.is_finite:
                yield _nonfinite(key, held)
            elif name in SECOND_MOMENTS and held.tally.has_finite and held.tally.low < 0:
                message = f"a mean of squares is negative ({held.tally.low:.3g}): its root is NaN."
                yield Problem(kind="optimizer", key=key, message=message)
        if any(not math.isfinite(n) or (name == "step" and n < 0) for n in _plain_numbers(value)):
            yield Problem(kind="optimizer", key=key, message=f"is {value}.")


def _plain_numbers(value: Any) -> list[float]:
    return [] if isinstance(value, Held) else numbers(value)


def _scheduler_problems(state: Any, part: str) -> Iterator[Problem]:
    for name in ("base_lrs", "_last_lr", "max_lrs", "min_lrs"):
        rates = numbers(state.get(name)) if isinstance(state, dict) else []
        yield from _rate_problems(rates, f"{part}.{name}")


def _scaler_problems(state: Mapping[str, Any]) -> Iterator[Problem]:
    for scale in numbers(state.get("scale")):
        if not math.isfinite(scale) or scale <= 0:
            message = f"the loss scale is {scale}; it must be finite and above 0."
            yield Problem(kind="scaler", key="scaler.scale", message=message)


# State that has one number for each number of the parameter.
_SHAPED = SECOND_MOMENTS - {"sum"} | {"exp_avg", "momentum_buffer", "grad_avg", "prev", "step_size"}


def optimizer_problems(
    record: OptimizerRecord, optimizer: Optimizer, names: Sequence[str | None], part: str
) -> Iterator[Problem]:
    """Everything that does not fit; `names` are those of the optimizer's parameters."""
    if record.class_name not in (None, type(optimizer).__name__):
        message = f"was saved from {record.class_name} and would go to {type(optimizer).__name__}."
        yield Problem(kind="optimizer", key=part, message=message)
    saved = [len(group.get("params", ())) for group in record.state_dict["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        message = f"has groups of {saved} parameters, and the optimizer has {present}."
        yield Problem(kind="optimizer", key=f"{part}.param_groups", message=message)
        return
    yield from _name_problems(record, names, part)
    yield from _optimizer_state_problems(record, optimizer, names, part)


def _name_problems(
    record: OptimizerRecord, names: Sequence[str | None], part: str
) -> Iterator[Problem]:
    """torch matches by order alone, so state can end up with another parameter."""
    for number, (saved, present) in enumerate(zip(record.names or (), names, strict=False)):
        if saved is not None and present is not None and saved != present:
            message = f"was that of {saved}, and would go to {present}: the order has changed."
            yield Problem(kind="optimizer", key=f"{part}.state.{number}", message=message)


def _optimizer_state_problems(
    record: OptimizerRecord, optimizer: Optimizer, names: Sequence[str | None], part: str
) -> Iterator[Problem]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = [number for group in record.state_dict["param_groups"] for number in group["params"]]
    narrow: list[tuple[str, Held, Any]] = []
    for place, (number, param) in enumerate(zip(ids, params, strict=True)):
        state = record.state_dict.get("state", {}).get(number)
        for name, value in state.items() if isinstance(state, dict) else ():
            key = f"{part}.state.{names[place] or place}.{name}"
            for held in leaves(value):
                if name in _SHAPED and held.shape != tuple(param.shape):
                    yield _misshaped(key, held, param)
                if name != "step" and is_narrower(held.dtype, param.dtype):
                    narrow.append((key, held, param))
    if narrow:
        yield _narrowed(narrow)


def _misshaped(key: str, held: Held, param: Any) -> Problem:
    message = f"has shape {list(held.shape)}, and its parameter {list(param.shape)}."
    return Problem(kind="shape", key=key, message=message)


def _narrowed(narrow: list[tuple[str, Held, Any]]) -> Problem:
    key, held, param = narrow[0]
    others = f"and {len(narrow) - 1} more were" if len(narrow) > 1 else "was"
    message = (
        f"{others} saved as {name_of(held.dtype)} for a {name_of(param.dtype)} parameter: small "
        "squares of gradients become 0, and the next update divides by eps alone. Save optimizer "
        "state as it is, or leave it out and warm up again."
    )
    return Problem(kind="narrowed", key=key, message=message)


_ROWS = 2


def forward_problems(model: nn.Module, fit: Fit, batch: Any) -> Iterator[Problem]:
    """What is wrong with the outputs; `batch` is one for the model, or True to make one up.

    A tuple is passed as arguments and a dict by name. The copy runs in eval mode, without
    gradients, and leaves the generators as they are. A batch of our own that the model does not
    take proves nothing, and is a warning.
    """
    given = batch is not True
    batch = batch if given else synthesised(model)
    if batch is None:
        message = "no batch could be made up for this model; give one as `forward`."
        yield Problem(kind="forward", key="forward", message=message, is_error=False)
        return
    random = RandomState.capture()
    try:
        bad = _first_bad(_loaded_copy(model, fit), batch)
    except Exception as error:
        message = f"the model raised {type(error).__name__}: {_short(error)}"
        yield Problem(kind="forward", key="forward", message=message, is_error=given)
        return
    finally:
        random.restore()
    if bad is not None:
        where = bad or "the model itself"
        message = f"the output of {where} is not finite, and its inputs were."
        yield Problem(kind="forward", key="forward", message=message)


def _loaded_copy(model: nn.Module, fit: Fit) -> nn.Module:
    other = copy.deepcopy(model)
    own = places(other)
    moves = []
    for place, held in fit.moves:
        there = own.get(place.name) or slot_for(other, place.name)
        assert there is not None
        assert held.tensor is not None
        moves.append((there, copy.copy(held)))
    with torch.no_grad():
        for there, held in moves:
            assert held.tensor is not None
            if there.tensor is not None:
                there.tensor.copy_(held.tensor)
    empty = [(there, held) for there, held in moves if there.tensor is None]
    with Placing() as placing:
        placing.tensors(empty, other)
    return other.eval()


def _first_bad(model: nn.Module, batch: Any) -> str | None:
    """The name of the first module with a non-finite output; None when all are finite."""
    bad: list[str] = []

    def look(name: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not bad and not all_finite(tensor for _, tensor in named_tensors(output, "")):
                bad.append(name)

        return after

    for name, module in model.named_modules():
        module.register_forward_hook(look(name))
    with torch.no_grad():
        if isinstance(batch, Mapping):
            model(**batch)
        else:
            model(*batch if isinstance(batch, (tuple, list)) else (batch,))
    return bad[0] if bad else None


def synthesised(model: nn.Module) -> Tensor | None:
    """A small random batch for the first layer whose input shape is known."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(floats, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            size = (_ROWS, 8)
            return torch.randint(layer.num_embeddings, size, generator=generator).to(device)
        shape = _input_shape(layer)
        if shape is not None:
            return torch.randn(shape, generator=generator).to(device, dtype)
    return None


def _input_shape(layer: nn.Module) -> tuple[int, ...] | None:
    if isinstance(layer, nn.Linear):
        return (_ROWS, layer.in_features)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return (_ROWS, layer.in_channels, *[32] * len(layer.kernel_size))
    if isinstance(layer, (nn.RNN, nn.LSTM, nn.GRU)):
        return (_ROWS, 8, layer.input_size)
    return None


def _short(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:200]
