"""From a capsule to JSON with tensors beside it, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.capsule import limits
from stayfinite.capsule.contents import (
    Birth,
    Capsule,
    CodeReference,
    Operation,
    SourceFile,
    State,
)
from stayfinite.capsule.names import check_folders, check_names
from stayfinite.checkpoint.format.held import Held, with_tensors
from stayfinite.checkpoint.format.values import Tensors, decode, encode
from stayfinite.errors import CapsuleError
from stayfinite.records import Incident, NaNType, TensorSummary, from_data, to_data

Find = Callable[[str], Held]
_STATE = "state/"


def packed(capsule: Capsule) -> tuple[dict[str, Any], Tensors]:
    """The capsule as JSON, and its tensors by name."""
    tensors: Tensors = {}
    tree = {
        "incident": to_data(capsule.incident),
        "code": to_data(capsule.code),
        "sources": [_packed_source(each, tensors) for each in capsule.sources],
        "birth": None if capsule.birth is None else _packed_birth(capsule.birth, tensors),
        "state": None if capsule.state is None else _packed_state(capsule.state, tensors),
        "batch": encode(capsule.batch, "batch", tensors),
        "random": encode(capsule.random and dict(capsule.random), "random", tensors),
        "seeds": capsule.seeds,
        "versions": capsule.versions,
        "environment": capsule.environment,
        "config": to_data(capsule.config),
        "notes": list(capsule.notes),
        "made": capsule.made,
    }
    return tree, tensors


def unpacked(tree: Any, held: Mapping[str, Held]) -> Capsule:
    """The capsule that was packed; what makes no sense is an error of any common kind."""
    find: Find = held.__getitem__
    sources = tuple(_source(each, find) for each in _list(tree["sources"], limits.FILES))
    check_names((each.root, each.name) for each in sources)
    batch = with_tensors(decode(tree["batch"], find))
    random = with_tensors(decode(tree["random"], find))
    return Capsule(
        incident=from_data(Incident, tree["incident"]),
        code=_code(tree["code"]),
        sources=sources,
        birth=None if tree["birth"] is None else _birth(tree["birth"], find),
        state=None if tree["state"] is None else _state(tree["state"], held),
        batch=_as(tuple, batch),
        random=None if random is None else _as(dict, random),
        seeds=_as(dict, tree["seeds"]),
        versions=_texts(tree["versions"]),
        environment=_texts(tree["environment"]),
        config=_as(dict, tree["config"]),
        notes=tuple(_as(str, note) for note in _list(tree["notes"], 100)),
        made=float(tree["made"]),
    )


def _code(tree: Any) -> CodeReference:
    code = from_data(CodeReference, tree)
    check_folders([code.folder, *code.paths])
    return code


def _packed_source(source: SourceFile, tensors: Tensors) -> Any:
    key = f"source.{source.root}.{source.name}"
    tensors[key] = torch.from_numpy(np.frombuffer(source.text, dtype=np.uint8).copy())
    return {"name": source.name, "root": source.root, "text": key}


def _source(tree: Any, find: Find) -> SourceFile:
    content = _tensor(find(_as(str, tree["text"])))
    if content.dtype is not torch.uint8 or content.dim() != 1 or len(content) > limits.SOURCE:
        raise CapsuleError("a source file in it is not text, or too long.")
    root = _as(int, tree["root"])
    if not 0 <= root < limits.FILES:
        raise CapsuleError("a source file in it is in no folder.")
    return SourceFile(name=_as(str, tree["name"]), text=content.numpy().tobytes(), root=root)


def _packed_birth(birth: Birth, tensors: Tensors) -> Any:
    forward = birth.forward
    return {
        "operation": _packed_operation(birth.operation, "operation", tensors),
        "nan_type": birth.nan_type.value,
        "forward": None if forward is None else _packed_operation(forward, "forward", tensors),
    }


def _birth(tree: Any, find: Find) -> Birth:
    forward = tree["forward"]
    return Birth(
        operation=_operation(tree["operation"], find),
        nan_type=NaNType(tree["nan_type"]),
        forward=None if forward is None else _operation(forward, find),
    )


def _packed_operation(operation: Operation, path: str, tensors: Tensors) -> Any:
    arguments = {
        name: encode(_packed_value(value), f"{path}.{name}", tensors)
        for name, value in operation.arguments.items()
    }
    return {"op": operation.op, "arguments": arguments}


def _packed_value(value: Any) -> Any:
    if isinstance(value, TensorSummary):
        return to_data(value)  # an object; operators are given none otherwise
    if isinstance(value, (list, tuple)):
        return [_packed_value(item) for item in value]
    return value


def _operation(tree: Any, find: Find) -> Operation:
    arguments = {
        _as(str, name): _value(with_tensors(decode(value, find)))
        for name, value in _as(dict, tree["arguments"]).items()
    }
    return Operation(op=_as(str, tree["op"]), arguments=arguments)


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return from_data(TensorSummary, value)
    return [_value(item) for item in value] if isinstance(value, list) else value


def _packed_state(state: State, tensors: Tensors) -> Any:
    if state.tensors is not None:
        tensors.update({_STATE + name: tensor for name, tensor in state.tensors.items()})
    return {
        "tree": state.tree,
        "digests": state.digests,
        "is_whole": state.tensors is not None,
    }


def _state(tree: Any, held: Mapping[str, Held]) -> State:
    digests = _texts(tree["digests"])
    if not tree["is_whole"]:
        return State(tree=tree["tree"], digests=digests)
    tensors = {name: _tensor(held[_STATE + name]) for name in digests}
    return State(tree=tree["tree"], digests=digests, tensors=tensors)


def _tensor(held: Held) -> Tensor:
    assert held.tensor is not None, held.key
    return held.tensor


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} must be")
    return value


def _list(value: Any, most: int) -> list[Any]:
    found: list[Any] = _as(list, value)
    if len(found) > most:
        raise CapsuleError(f"it has {len(found):,} entries where {most} are possible.")
    return found


def _texts(value: Any) -> dict[str, str]:
    return {_as(str, key): _as(str, text) for key, text in _as(dict, value).items()}
