"""Python state as strict JSON and back: no pickle, and nothing is stored that would change.

JSON's own values stand for themselves; the rest is an object with one key that begins with "$".
Tensors and arrays are stored beside the JSON, and named in it.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.checkpoint.format.held import Held
from stayfinite.errors import CheckpointError

Tensors = dict[str, Tensor]
Find = Callable[[str], Held]

_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_KINDS = "biufc"  # numpy's booleans, integers, floats and complex numbers
_PLAIN = (bool, int, str, type(None))
_ACCEPTED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, OrderedDict, Counter, "
    "tensors, NumPy arrays and numbers, torch.dtype, torch.device and torch.Size"
)


def encode(value: Any, path: str, tensors: Tensors) -> Any:
    """The value as JSON; its tensors are added to `tensors` under their path.

    CheckpointError names the path of anything that cannot be stored.
    """
    return _encode(value, path, tensors, ())


def _encode(value: Any, path: str, tensors: Tensors, above: tuple[int, ...]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        return {"$tensor": _add(tensors, path, value)}
    if id(value) in above:
        raise CheckpointError(f"{path} holds itself, and cannot be stored.")
    above = (*above, id(value))
    if kind is list:
        return [_encode(v, f"{path}.{i}", tensors, above) for i, v in enumerate(value)]
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, tensors, above)
    if kind in _SEQUENCES:
        items = [_encode(v, f"{path}.{i}", tensors, above) for i, v in enumerate(value)]
        return {_SEQUENCES[kind]: items}
    return _encode_leaf(value, path, tensors)


_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
# torch.Size is a tuple of its own type.
_SEQUENCES[torch.Size] = "$size"


def _encode_mapping(value: Any, path: str, tensors: Tensors, above: tuple[int, ...]) -> Any:
    items = {key: _encode(item, f"{path}.{key}", tensors, above) for key, item in value.items()}
    if type(value) is dict and all(type(key) is str and key[:1] != "$" for key in items):
        return items
    pairs = [[_encode(key, f"{path}.{key}", {}, above), item] for key, item in items.items()]
    return {_MAPPINGS[type(value)]: pairs}


def _encode_leaf(value: Any, path: str, tensors: Tensors) -> Any:
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is complex:
        return {"$complex": [_encode(part, path, tensors, ()) for part in (value.real, value.imag)]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        return {"$array": _add(tensors, path, _tensor_of(value, path))}
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
        return {"$number": [value.dtype.name, _encode(value.item(), path, tensors, ())]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{path} is a {kind}, which cannot be stored without pickle. Store what it is made of: "
        f"{_ACCEPTED}."
    )


def _tensor_of(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))  # a copy: it may not be writable
    except TypeError as error:
        raise CheckpointError(
            f"{path} is an array of {array.dtype}, which torch does not have."
        ) from error


def _add(tensors: Tensors, path: str, tensor: Tensor) -> str:
    """Put the tensor under its path, or under one beside it: keys may hold dots."""
    name = path
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def decode(node: Any, find: Find) -> Any:
    """The value that was encoded, with a leaf for each tensor."""
    if isinstance(node, list):
        return [decode(item, find) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if tag[:1] != "$":
        return {key: decode(item, find) for key, item in node.items()}
    if len(node) != 1 or tag not in _DECODERS:
        raise CheckpointError(f"the state holds {tag}, which this version does not know.")
    try:
        return _DECODERS[tag](node[tag], find)
    except (TypeError, ValueError, KeyError, AttributeError, binascii.Error) as error:
        raise CheckpointError(f"the state holds a {tag} that means nothing.") from error


def _pairs(node: Any, find: Find) -> list[tuple[Any, Any]]:
    return [(decode(key, find), decode(item, find)) for key, item in node]


def dtype_named(name: str) -> torch.dtype:
    found = vars(torch).get(name)  # asking torch itself may import half of it
    if not isinstance(found, torch.dtype):
        raise ValueError(name)
    return found


_DECODERS: dict[str, Callable[[Any, Find], Any]] = {
    "$float": lambda node, find: _NUMBERS[node],
    "$tensor": lambda node, find: find(node),
    "$array": lambda node, find: _as_array(find(node)),
    "$number": lambda node, find: _number(node[0], node[1], find),
    "$complex": lambda node, find: complex(*decode(node, find)),
    "$bytes": lambda node, find: base64.b64decode(node, validate=True),
    "$tuple": lambda node, find: tuple(decode(node, find)),
    "$set": lambda node, find: set(decode(node, find)),
    "$frozenset": lambda node, find: frozenset(decode(node, find)),
    "$size": lambda node, find: torch.Size(decode(node, find)),
    "$dict": lambda node, find: dict(_pairs(node, find)),
    "$ordered": lambda node, find: OrderedDict(_pairs(node, find)),
    "$counter": lambda node, find: Counter(dict(_pairs(node, find))),
    "$dtype": lambda node, find: dtype_named(node),
    "$device": lambda node, find: torch.device(node),
}


def _number(name: str, value: Any, find: Find) -> Any:
    kind = np.sctypeDict.get(name)  # np.dtype(name) warns of old names
    if kind is None or np.dtype(kind).kind not in _KINDS:
        raise ValueError(name)
    return kind(decode(value, find))


def _as_array(held: Held) -> Held:
    return dataclasses.replace(held, is_array=True)
