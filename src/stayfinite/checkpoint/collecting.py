"""From the members of a training job to what is written: a JSON tree, and tensors beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stayfinite.checkpoint.format.contents import part_name
from stayfinite.checkpoint.format.layout import NAMES, bytes_of
from stayfinite.checkpoint.format.values import Tensors, encode
from stayfinite.checkpoint.members import Members, parameter_names
from stayfinite.checkpoint.modules import canonical, extra_states, identity, places
from stayfinite.checkpoint.problems import matches
from stayfinite.errors import CheckpointError
from stayfinite.snapshot import RandomState


def collect(members: Members, extra: Any, *, ignore: Sequence[str]) -> tuple[Any, Tensors]:
    """The state as JSON, and its tensors by name."""
    tensors: Tensors = {}
    models, averages = members.models, members.averages
    tree = {
        "models": [
            _module(model, part_name("model", i, len(models)), tensors, ignore)
            for i, model in enumerate(models)
        ],
        "optimizers": [
            _optimizer(each, part_name("optimizer", i, len(members.optimizers)), members, tensors)
            for i, each in enumerate(members.optimizers)
        ],
        "schedulers": _states(members.schedulers, "scheduler", tensors),
        "scaler": None if members.scaler is None else _state(members.scaler, "scaler", tensors),
        "averages": [
            _average(each, part_name("ema", i, len(averages)), tensors, ignore)
            for i, each in enumerate(averages)
        ],
        "random": encode(vars(RandomState.capture()), "random", tensors),
        "extra": encode(extra, "extra", tensors),
    }
    return tree, tensors


def _module(model: nn.Module, part: str, tensors: Tensors, ignore: Sequence[str]) -> Any:
    found = {name: p for name, p in places(model).items() if not matches(name, ignore)}
    _require_all_of_state_dict(model, part, found, ignore)
    first: dict[Any, str] = {}
    stored, ties = {}, {}
    for name, place in found.items():
        assert place.tensor is not None
        known = first.setdefault(place.identity, name)
        if known != name:
            ties[name] = known
            continue
        key = f"{part}.{name}"
        tensors[key] = _plain(place.tensor, key)
        stored[name] = {"key": key, "kind": place.kind}
    states = {
        name: encode(state, f"{part}.{name}._extra_state", tensors)
        for name, state in extra_states(model).items()
    }
    return {"class": type(model).__name__, "tensors": stored, "ties": ties, "extra_states": states}


def _require_all_of_state_dict(
    model: nn.Module, part: str, found: Mapping[str, Any], ignore: Sequence[str]
) -> None:
    """Modules may put anything into their state_dict; what we would miss is an error."""
    ours = {place.identity for place in found.values()}
    for name, value in model.state_dict().items():
        plain = canonical(name.removeprefix("module."))
        if plain in found or canonical(name) in found or name.endswith("_extra_state"):
            continue
        if matches(plain, ignore) or _is_among(value, ours):
            continue
        raise CheckpointError(
            f"{part}.{name} is in the state_dict, but no module has a parameter, buffer or "
            "attribute of that name, so it could not be put back. Save it in `extra`, or leave it "
            "out with `ignore`."
        )


def _is_among(value: Any, identities: set[Any]) -> bool:
    return isinstance(value, Tensor) and identity(value) in identities


def _optimizer(optimizer: Any, part: str, members: Members, tensors: Tensors) -> Any:
    return {
        "class": type(optimizer).__name__,
        "names": parameter_names(optimizer, members.models),
        "state_dict": _state(optimizer, part, tensors),
    }


def _states(members: tuple[Any, ...], part: str, tensors: Tensors) -> list[Any]:
    return [
        _state(each, part_name(part, i, len(members)), tensors) for i, each in enumerate(members)
    ]


def _state(member: Any, part: str, tensors: Tensors) -> Any:
    return encode(member.state_dict(), part, tensors)


def _average(average: Any, part: str, tensors: Tensors, ignore: Sequence[str]) -> Any:
    if isinstance(average, nn.Module):
        return {"module": _module(average, part, tensors, ignore)}
    return {"state": _state(average, part, tensors)}


def _plain(tensor: Tensor, key: str) -> Tensor:
    """The tensor, if it is an ordinary one; else an error says what it is."""
    kind = type(tensor)
    is_ordinary = kind in (Tensor, nn.Parameter, nn.Buffer) or isinstance(tensor, nn.Parameter)
    if is_lazy(tensor):
        raise CheckpointError(f"{key} has no shape yet; run the model once before saving it.")
    if tensor.is_meta:
        raise CheckpointError(f"{key} is on the meta device, so it has no values to save.")
    if hasattr(tensor, "__tensor_flatten__") or not is_ordinary:
        raise CheckpointError(
            f"{key} is a {kind.__name__}, of which a process may hold only a part. Gather the "
            "whole tensors first, or save with torch.distributed.checkpoint."
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise CheckpointError(
            f"{key} is not a dense tensor, and cannot be stored. Leave it out with `ignore`."
        )
    return tensor.detach()


def storable(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The tensors in dtypes that safetensors has; the others as bytes, with how to view them."""
    stored, views = {}, {}
    for key, tensor in tensors.items():
        plain = _plain(tensor, key)
        if plain.dtype in NAMES:
            stored[key] = plain
        else:
            stored[key] = bytes_of(plain)
            views[key] = [str(plain.dtype).removeprefix("torch."), list(plain.shape)]
    return stored, views
