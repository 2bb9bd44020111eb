"""Which python values are plain state, to be kept, and which are someone's machinery."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CONSTANT_TYPES = (
    *(int, float, bool, complex, str, bytes, type(None), range, slice, frozenset),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(np.generic, np.dtype, enum.Enum, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta),
)
# Looking up an exact type is several times faster than isinstance.
CONSTANTS = frozenset(_CONSTANT_TYPES)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES = (Tensor, np.ndarray, *GENERATORS)
_DEEPEST = 16


def is_constant(value: Any) -> bool:
    """Whether the value never changes, so that keeping the reference keeps the state."""
    if type(value) in CONSTANTS:
        return True
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return isinstance(value, _CONSTANT_TYPES)


def is_state(value: Any, depth: int = 0) -> bool:
    """Whether the value is plain state: numbers, text, tensors, generators, and boxes of such.

    A box counts when it is empty or anything in it does; a list of modules or hooks does not.
    """
    if type(value) in CONSTANTS or isinstance(value, (*_CONSTANT_TYPES, *_LEAVES)):
        return True
    items = items_of(value)
    if items is None or depth > _DEEPEST:
        return False
    return not items or any(is_state(item, depth + 1) for _, item in items)


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a box with their keys; None when the value is not one."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, deque, set)):
        return list(enumerate(value))
    if is_record(value):
        return list(vars(value).items())
    return None


def is_record(value: Any) -> bool:
    """Whether the value is a dataclass instance that can be changed."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not value.__dataclass_params__.frozen  # type: ignore[attr-defined]
        and hasattr(value, "__dict__")
    )
