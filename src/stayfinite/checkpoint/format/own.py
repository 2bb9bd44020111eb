"""Our own files: from a verified safetensors file to its contents."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from stayfinite.checkpoint.format.contents import Contents, ModuleRecord, OptimizerRecord
from stayfinite.checkpoint.format.held import Held
from stayfinite.checkpoint.format.values import Find, decode, dtype_named
from stayfinite.errors import CheckpointError

STATE = "state"
"""The key of the JSON tree in the metadata."""


def own_contents(tree: Any, held: Mapping[str, Held]) -> Contents:
    """The contents that a JSON tree of ours describes."""
    try:
        return _contents(tree, held)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "its state is not as this version of stayfinite writes it."
        ) from error


def _contents(tree: Any, held: Mapping[str, Held]) -> Contents:
    find = {**held, **viewed(tree["views"], held)}.__getitem__
    return Contents(
        layout="stayfinite",
        models=tuple(_module(each, find) for each in tree["models"]),
        optimizers=tuple(_optimizer(each, find) for each in tree["optimizers"]),
        schedulers=tuple(decode(each, find) for each in tree["schedulers"]),
        scaler=decode(tree["scaler"], find),
        averages=tuple(_average(each, find) for each in tree["averages"]),
        random=decode(tree["random"], find),
        extra=decode(tree["extra"], find),
        step=tree["step"],
        saved_at=tree["saved_at"],
        nonfinite_ok=tuple(tree["nonfinite_ok"]),
    )


def tree_of(metadata: Mapping[str, str]) -> Any:
    """The JSON tree in a header."""
    try:
        return json.loads(metadata[STATE])
    except (KeyError, ValueError) as error:
        raise CheckpointError("its header has no state.") from error


def viewed(views: Mapping[str, Any], held: Mapping[str, Held]) -> dict[str, Held]:
    """Tensors of dtypes that safetensors does not have, which are stored as bytes."""
    viewed = {}
    for name, (dtype_name, shape) in views.items():
        dtype, data = dtype_named(dtype_name), held[name].tensor
        tensor = None if data is None else data.view(dtype).reshape(shape)
        viewed[name] = dataclasses.replace(
            held[name], dtype=dtype, shape=tuple(shape), tensor=tensor
        )
    return viewed


def _module(tree: Any, find: Find) -> ModuleRecord:
    return ModuleRecord(
        tensors={name: find(each["key"]) for name, each in tree["tensors"].items()},
        kinds={name: each["kind"] for name, each in tree["tensors"].items()},
        ties=tree["ties"],
        extra_states={name: decode(each, find) for name, each in tree["extra_states"].items()},
        is_complete=True,
    )


def _optimizer(tree: Any, find: Find) -> OptimizerRecord:
    return OptimizerRecord(
        state_dict=decode(tree["state_dict"], find),
        class_name=tree["class"],
        names=tuple(tree["names"]),
    )


def _average(tree: Any, find: Find) -> Any:
    return _module(tree["module"], find) if "module" in tree else decode(tree["state"], find)
