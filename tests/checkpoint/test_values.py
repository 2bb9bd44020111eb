"""Python state as JSON: what comes back is what went in, and nothing else is accepted."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stayfinite.checkpoint.values import decode, encode, hold, with_tensors
from stayfinite.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "value", tensors), allow_nan=False)
    return with_tensors(decode(json.loads(text), lambda name: hold(name, tensors[name])))


def is_same(one: Any, other: Any) -> bool:
    """Equal in type and value, deeply, with NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    if isinstance(one, dict):
        return is_same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, (Tensor, np.ndarray)):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3])]),
    st.integers(-100, 100).map(np.int16),
    st.floats(width=32, allow_nan=False).map(np.float32),
    st.lists(st.integers(-9, 9), max_size=3).map(torch.tensor),
    st.lists(st.floats(-9, 9), max_size=3).map(np.array),
)
keys = st.one_of(st.text(max_size=4), st.sampled_from(["$tensor", "$", "a.b"]), st.integers(0, 9))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


@given(values)
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    assert is_same(there_and_back(value), value)


def test_keys_with_dots_do_not_collide() -> None:
    value = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a.b'": torch.tensor([2.0])}
    assert is_same(there_and_back(value), value)


class Color(IntEnum):
    RED = 1


Pair = namedtuple("Pair", "first second")
UNKNOWN = [
    *(object(), Path("x"), Color.RED, Pair(1, 2), defaultdict(int), lambda: 0, range(3)),
    *(np.array(["text"]), np.array([object()]), torch.nn.Linear(1, 1), math, bytearray(b"a")),
]


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: type(value).__name__)
def test_other_objects_are_refused_with_their_path(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^extra\.a\.1 is a .* Store what it is made of"):
        encode({"a": [0, value]}, "extra", {})


def test_value_that_holds_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["inner"] = [value]
    with pytest.raises(CheckpointError, match=r"extra\.inner\.0 holds itself"):
        encode(value, "extra", {})


@pytest.mark.parametrize(
    "node",
    [
        {"$unknown": 1},
        {"$tuple": 3},
        {"$float": "one"},
        {"$bytes": "?"},
        {"$dtype": "load"},
        {"$dtype": "nonsense"},
        {"$tensor": "nowhere"},
        {"$number": ["object", 1]},
        {"$tuple": [], "more": 1},
    ],
)
def test_json_that_means_nothing_is_refused(node: Any) -> None:
    with pytest.raises(CheckpointError, match="the state holds"):
        decode(node, {}.__getitem__)
