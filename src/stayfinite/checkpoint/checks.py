"""What can be wrong with a checkpoint, in itself and for those who shall get it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.checkpoint.fit import Fit, as_named_by, fit, is_narrower, name_of
from stayfinite.checkpoint.modules import Members, parameter_names, place_tensors
from stayfinite.checkpoint.problem import Problem, Rules, error, errors_in, matches, warning
from stayfinite.checkpoint.values import (
    Contents,
    Held,
    ModuleRecord,
    OptimizerRecord,
    leaves,
    named_parts,
)
from stayfinite.detect.finite import all_finite
from stayfinite.nested import named_tensors
from stayfinite.snapshot import RandomState
from stayfinite.training import params_of


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
            message = f"the file has {there or 'none'}, and {len(asked)} shall be loaded."
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
            message = "is no state of a module, and shall be loaded into one."
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
                f"the learning rate is {rate:.3g}, which is absurd: training that goes on with it "
                "diverges. Set it anew after loading."
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
            "optimizer state as it is, or leave it out and warm up again."
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
