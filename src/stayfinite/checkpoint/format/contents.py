"""What a checkpoint holds, in one form for all layouts; tensors are leaves (see held.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stayfinite.checkpoint.format.held import Held

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


@dataclass(frozen=True, kw_only=True)
class Contents:
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


def part_name(part: str, number: int, count: int) -> str:
    """ "model" when there is one of them, else "model.0", ..."""
    return part if count == 1 else f"{part}.{number}"
