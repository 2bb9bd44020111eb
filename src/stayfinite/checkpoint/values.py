"""What a checkpoint holds: tensors, and python state as strict JSON and back.

No pickle, and nothing is stored that would change.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from stayfinite.checkpoint.format import Tally, bytes_of, digest, tally
from stayfinite.errors import CheckpointError

Layout = Literal["stayfinite", "torch", "lightning", "safetensors", "huggingface", "dcp"]
PlaceKind = Literal["parameter", "buffer", "non-persistent buffer", "attribute"]


@dataclass(frozen=True, kw_only=True)
class ModuleRecord:
    """The tensors of a model by name.

    `kinds` is empty when the file does not say what they are. `others` are names of entries that
    are no tensors. `is_complete`: non-persistent buffers and plain attributes were saved too.
    """

    tensors: Mapping[str, Held]
    kinds: Mapping[str, PlaceKind] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    extra_states: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    is_complete: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """The state_dict of an optimizer; with its class and parameter names where they are known."""

    state_dict: Mapping[str, Any]
    class_name: str | None = None
    names: tuple[str | None, ...] | None = None


class ByPart:
    """What a checkpoint, or a training, has of each kind."""

    models: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    schedulers: tuple[Any, ...]
    scaler: Any
    averages: tuple[Any, ...]

    @property
    def parts(self) -> dict[str, tuple[Any, ...]]:
        return {
            "model": self.models,
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "scaler": () if self.scaler is None else (self.scaler,),
            "ema": self.averages,
        }


@dataclass(frozen=True, kw_only=True)
class Contents(ByPart):
    """Everything in a checkpoint. An average is a record when a module made it, else a tree."""

    layout: Layout
    models: tuple[ModuleRecord, ...] = ()
    optimizers: tuple[OptimizerRecord, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    averages: tuple[Any, ...] = ()
    random: Any = None
    extra: Any = None
    step: int | None = None
    saved_at: float | None = None
    nonfinite_ok: tuple[str, ...] = ()


Item = TypeVar("Item")


def named_parts(part: str, items: Sequence[Item]) -> Iterator[tuple[str, Item]]:
    """Each with its name: "model" when there is one of them, else "model.0", ..."""
    for number, item in enumerate(items):
        yield part if len(items) == 1 else f"{part}.{number}", item


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """A leaf in the place of a tensor; `tensor` is None when the file was only looked through.

    `is_private`: its memory belongs to this file's entry alone, and may be written to.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tally: Tally
    tensor: Tensor | None = None
    digest: bytes | None = None
    is_array: bool = False
    is_private: bool = False

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def hold(key: str, tensor: Tensor) -> Held:
    """The tensor as a leaf, with its values: of a DTensor, those of this rank's shard."""
    return Held(
        key=key,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        tally=tally(local(tensor)),
        tensor=tensor,
    )


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, of which each rank has a part; without importing that class."""
    return isinstance(tensor, Tensor) and hasattr(type(tensor), "to_local")


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor, which shares its memory; other tensors are it themselves."""
    found: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return found


def is_same(one: Held, other: Held) -> bool:
    """Whether two tensors are the same to the byte; both must have values or digests."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (
        digest(bytes_of(local(held.tensor)).numpy())
        if held.digest is None and held.tensor is not None
        else held.digest
        for held in (one, other)
    )
    return first == second


def hold_all(tree: Any, key: str) -> Any:
    """The same nested dicts, lists and tuples, with a leaf for each tensor."""
    if isinstance(tree, Tensor):
        return hold(key, tree)
    if isinstance(tree, dict) and not isinstance(tree, Counter):
        return {name: hold_all(item, f"{key}.{name}") for name, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(hold_all(item, f"{key}.{place}") for place, item in enumerate(tree))
    return tree


def with_tensors(tree: Any) -> Any:
    """The tree with true tensors and arrays in the place of leaves; all must have been kept."""
    if isinstance(tree, Held):
        assert tree.tensor is not None, tree.key
        return tree.tensor.numpy() if tree.is_array else tree.tensor
    if isinstance(tree, dict):
        return type(tree)({key: with_tensors(item) for key, item in tree.items()})
    if type(tree) in (list, tuple, set):
        return type(tree)(map(with_tensors, tree))
    return tree


def named_leaves(tree: Any, above: str = "") -> Iterator[tuple[str, Held]]:
    """All tensors of a tree, each with its path in it."""
    if isinstance(tree, Held):
        yield above, tree
    elif isinstance(tree, ModuleRecord):
        yield from tree.tensors.items()
    elif isinstance(tree, (dict, list, tuple)):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named_leaves(item, f"{above}.{key}" if above else str(key))


def leaves(tree: Any) -> Iterator[Held]:
    """All tensors of a tree."""
    return (held for _, held in named_leaves(tree))


STATE = "state"
"""The key of the JSON tree in the metadata."""


def tree_of(metadata: Mapping[str, str]) -> Any:
    """The JSON tree in a header."""
    try:
        return json.loads(metadata[STATE])
    except (KeyError, ValueError) as error:
        raise CheckpointError("its header has no state.") from error


def own_contents(tree: Any, held: Mapping[str, Held]) -> Contents:
    """The contents that a JSON tree of ours describes."""
    try:
        find = {**held, **view_held(tree["views"], held)}.__getitem__
        return Contents(
            layout="stayfinite",
            models=tuple(_module(each, find) for each in tree["models"]),
            optimizers=tuple(
                OptimizerRecord(
                    state_dict=decode(each["state_dict"], find),
                    class_name=each["class"],
                    names=tuple(each["names"]),
                )
                for each in tree["optimizers"]
            ),
            schedulers=tuple(decode(each, find) for each in tree["schedulers"]),
            scaler=decode(tree["scaler"], find),
            averages=tuple(
                _module(each["module"], find) if "module" in each else decode(each["state"], find)
                for each in tree["averages"]
            ),
            random=decode(tree["random"], find),
            extra=decode(tree["extra"], find),
            step=tree["step"],
            saved_at=tree["saved_at"],
            nonfinite_ok=tuple(tree["nonfinite_ok"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "its state is not as this version of stayfinite writes it."
        ) from error


def _module(tree: Any, find: Find) -> ModuleRecord:
    return ModuleRecord(
        tensors={name: find(each["key"]) for name, each in tree["tensors"].items()},
        kinds={name: each["kind"] for name, each in tree["tensors"].items()},
        ties=tree["ties"],
        extra_states={name: decode(each, find) for name, each in tree["extra_states"].items()},
        is_complete=True,
    )


def view_held(views: Mapping[str, Any], held: Mapping[str, Held]) -> dict[str, Held]:
    """Tensors of dtypes that safetensors does not have, which are stored as bytes."""
    found = {}
    for name, (dtype_name, shape) in views.items():
        dtype, data = dtype_named(dtype_name), held[name].tensor
        tensor = None if data is None else data.view(dtype).reshape(shape)
        found[name] = replace(held[name], dtype=dtype, shape=tuple(shape), tensor=tensor)
    return found


# Python state as strict JSON and back: no pickle, and nothing is stored that would change.
#
# JSON's own values stand for themselves; the rest is an object with one key that begins with "$".
# Tensors and arrays are stored beside the JSON, and named in it.

Tensors = dict[str, Tensor]
Find = Callable[[str], Held]

_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_KINDS = "biufc"  # numpy's booleans, integers, floats and complex numbers
_PLAIN = (bool, int, str, type(None))
_ACCEPTED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, OrderedDict, Counter, "
    "tensors, NumPy arrays and numbers, torch.dtype, torch.device and torch.Size"
)


_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_SEQUENCES: dict[type, str] = {
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
    torch.Size: "$size",
}


def encode(value: Any, path: str, tensors: Tensors, above: tuple[int, ...] = ()) -> Any:
    """The value as JSON; its tensors are added to `tensors` under their path.

    CheckpointError names the path of anything that cannot be stored. `above` are the ids of the
    containers that it is in.
    """
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
    if kind is list or kind in _SEQUENCES:
        listed = [encode(item, f"{path}.{i}", tensors, above) for i, item in enumerate(value)]
        return listed if kind is list else {_SEQUENCES[kind]: listed}
    if kind in _MAPPINGS:
        items = {key: encode(item, f"{path}.{key}", tensors, above) for key, item in value.items()}
        if kind is dict and all(type(key) is str and key[:1] != "$" for key in items):
            return items
        pairs = [[encode(key, f"{path}.{key}", {}, above), item] for key, item in items.items()]
        return {_MAPPINGS[kind]: pairs}
    return _encode_leaf(value, path, tensors)


def _encode_leaf(value: Any, path: str, tensors: Tensors) -> Any:
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is complex:
        return {"$complex": [encode(part, path, tensors) for part in (value.real, value.imag)]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        try:
            tensor = torch.from_numpy(np.array(value, order="C"))  # a copy: it may not be writable
        except TypeError as error:
            raise CheckpointError(
                f"{path} is an array of {value.dtype}, which torch does not have."
            ) from error
        return {"$array": _add(tensors, path, tensor)}
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
        return {"$number": [value.dtype.name, encode(value.item(), path, tensors)]}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored "
        f"without pickle. Store what it is made of: {_ACCEPTED}."
    )


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


def dtype_named(name: str) -> torch.dtype:
    found = vars(torch).get(name)  # asking torch itself may import half of it
    if not isinstance(found, torch.dtype):
        raise ValueError(name)
    return found


def _number(node: Any, find: Find) -> Any:
    kind = np.sctypeDict.get(node[0])  # np.dtype(name) warns of old names
    if kind is None or np.dtype(kind).kind not in _KINDS:
        raise ValueError(node[0])
    return kind(decode(node[1], find))


def _sequence(kind: type, node: Any, find: Find) -> Any:
    return kind(decode(node, find))


def _mapping(kind: type, node: Any, find: Find) -> Any:
    return kind({decode(key, find): decode(item, find) for key, item in node})


_DECODERS: dict[str, Callable[[Any, Find], Any]] = {
    "$float": lambda node, find: _NUMBERS[node],
    "$tensor": lambda node, find: find(node),
    "$array": lambda node, find: replace(find(node), is_array=True),
    "$number": _number,
    "$complex": lambda node, find: complex(*decode(node, find)),
    "$bytes": lambda node, find: base64.b64decode(node, validate=True),
    "$dtype": lambda node, find: dtype_named(node),
    "$device": lambda node, find: torch.device(node),
    **{tag: partial(_sequence, kind) for kind, tag in _SEQUENCES.items()},
    **{tag: partial(_mapping, kind) for kind, tag in _MAPPINGS.items()},
}
