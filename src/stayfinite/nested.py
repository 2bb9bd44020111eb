"""The tensors inside what people pass around: batches, outputs, models, optimizers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Named = tuple[str, Tensor]
_ARRAYS = tuple(np.dtype(kind) for kind in ("f2", "f4", "f8", "c8", "c16"))


def named_tensors(value: Any, path: str) -> Iterator[Named]:
    """Every tensor in a nested value, with its path.

    Goes into mappings and whatever has items(), sequences, sets, named tuples and dataclasses;
    NumPy arrays and Python floats come as tensors.
    """
    yield from _walk(value, path, ())


def _walk(value: Any, path: str, above: tuple[int, ...]) -> Iterator[Named]:
    leaf = _as_tensor(value)
    if leaf is not None:
        yield path, leaf
    elif id(value) not in above:  # else it holds itself
        for key, item in children(value):
            yield from _walk(item, f"{path}.{key}", (*above, id(value)))


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if isinstance(value, np.ndarray) and value.dtype in _ARRAYS:
        # from_numpy warns about memory that cannot be written to.
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return None


def children(value: Any) -> Iterable[tuple[Any, Any]]:
    """The named items of a container; none for anything else."""
    if isinstance(value, Mapping) or _has_items(value):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    return enumerate(value) if isinstance(value, (list, tuple, set, frozenset)) else ()


def is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple, set, frozenset)) or (
        not isinstance(value, type) and (dataclasses.is_dataclass(value) or _has_items(value))
    )


def _has_items(value: Any) -> bool:
    return not isinstance(value, (type, nn.Module)) and callable(getattr(value, "items", None))


def map_leaves(
    value: Any, change: Callable[[Any], Any], *, kinds: tuple[type, ...] = (Tensor,)
) -> Any:
    """The value in new containers, with each leaf of these kinds changed; all else as it is."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, tuple):
        items = [map_leaves(item, change, kinds=kinds) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, list):
        return type(value)(map_leaves(item, change, kinds=kinds) for item in value)
    if isinstance(value, MutableMapping):  # what tokenizers give is no dict
        mapping = copy.copy(value)
        for key, item in value.items():  # a Counter's update() would add
            mapping[key] = map_leaves(item, change, kinds=kinds)
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            object.__setattr__(record, field.name, map_leaves(item, change, kinds=kinds))
        return record
    return value


def named_gradients(model: nn.Module) -> Iterator[Named]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"gradients.{name}", parameter.grad


def named_weights(model: nn.Module) -> Iterator[Named]:
    """Parameters, then buffers."""
    for name, parameter in model.named_parameters():
        yield f"parameters.{name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffers.{name}", buffer


def named_states(optimizer: Optimizer) -> Iterator[Named]:
    """Learning rates, then the state of each parameter.

    A parameter goes by its name if the optimizer was given names, else by its number.
    """
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        yield from named_tensors(group.get("lr"), f"optimizer.param_groups.{index}.lr")
        names = group.get("param_names", range(number, number + len(group["params"])))
        for name, parameter in zip(names, group["params"], strict=True):
            # .get: the state is a defaultdict, and looking must not add to it.
            yield from named_tensors(optimizer.state.get(parameter), f"optimizer.{name}")
        number += len(group["params"])


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One, several in a list or tuple, or None, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def own_loss(output: Any) -> Tensor | None:
    """The loss that a model gives out itself, as a key or an attribute."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return own if isinstance(own, Tensor) else None
