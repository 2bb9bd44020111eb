"""Which python values are plain state, to be kept, and which are someone's machinery."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import random
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Kind(enum.Enum):
    """How a value of some type changes."""

    CONSTANT = enum.auto()
    """Never: who keeps the reference keeps the state."""
    TUPLE = enum.auto()
    """Only inside."""
    BOX = enum.auto()
    """A dict, list, deque or set."""
    RECORD = enum.auto()
    """A dataclass instance."""
    TENSOR = enum.auto()
    ARRAY = enum.auto()
    GENERATOR = enum.auto()
    OTHER = enum.auto()
    """Someone's machinery."""


_TYPES: tuple[tuple[Kind, tuple[type, ...]], ...] = (
    (Kind.CONSTANT, (int, float, bool, complex, str, bytes, type(None), range, slice, frozenset)),
    (Kind.CONSTANT, (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)),
    (Kind.CONSTANT, (np.generic, np.dtype, enum.Enum, decimal.Decimal, fractions.Fraction)),
    (Kind.CONSTANT, (datetime.date, datetime.time, datetime.timedelta)),
    (Kind.TENSOR, (Tensor,)),
    (Kind.TUPLE, (tuple,)),
    (Kind.BOX, (dict, list, deque, set)),
    (Kind.ARRAY, (np.ndarray,)),
    (Kind.GENERATOR, (torch.Generator, np.random.Generator, np.random.RandomState)),
    (Kind.GENERATOR, (random.Random,)),
)
_LEAVES = (Kind.CONSTANT, Kind.TENSOR, Kind.ARRAY, Kind.GENERATOR)
_DEEPEST = 16

# Asked for every attribute of every module, so the answer for a type is kept.
_known: dict[type, Kind] = {}
CONSTANTS: set[type] = set()
"""Types known to be constant."""


def kind_of(value: Any) -> Kind:
    kind = _known.get(type(value))
    return kind if kind is not None else _classified(type(value))


def _classified(type_: type) -> Kind:
    found = (kind for kind, types in _TYPES if issubclass(type_, types))
    kind = _known[type_] = next(found, Kind.RECORD if _is_record(type_) else Kind.OTHER)
    if kind is Kind.CONSTANT:
        CONSTANTS.add(type_)
    return kind


def _is_record(type_: type) -> bool:
    """Whether instances are dataclasses that can be changed."""
    if not dataclasses.is_dataclass(type_):
        return False
    is_frozen: bool = type_.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return not is_frozen and type_.__dictoffset__ != 0


def is_constant(value: Any) -> bool:
    """Whether the value never changes."""
    kind = kind_of(value)
    return kind is Kind.CONSTANT or (kind is Kind.TUPLE and all(map(is_constant, value)))


def is_state(value: Any, depth: int = 0) -> bool:
    """Whether the value is plain state: numbers, text, tensors, generators, and boxes of such.

    A box counts when it is empty or anything in it does; a list of modules or hooks does not.
    """
    kind = kind_of(value)
    if kind in _LEAVES:
        return True
    if kind is Kind.OTHER or depth > _DEEPEST:
        return False
    items = values_of(value)
    return not items or any(is_state(item, depth + 1) for item in items)


def values_of(value: Any) -> Collection[Any]:
    """What is inside a tuple, box or record."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, deque, set)) else vars(value).values()


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The same with keys, safe from changes meanwhile."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(values_of(value)))
