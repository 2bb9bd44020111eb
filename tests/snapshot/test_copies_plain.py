"""What is plain state, and what is machinery."""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stayfinite.snapshot.copies import BoxCell, Kind, is_constant, is_state, kind_of


class Color(enum.Enum):
    RED = 1


@dataclass
class Counts:
    seen: int = 0


@dataclass(frozen=True)
class Fixed:
    seen: int = 0


@dataclass
class OnlyMachinery:
    net: Any


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((constant, Kind.CONSTANT) for constant in (1, 1.5, True, None, "a", b"a", 1j, range(3))),
        *(
            (constant, Kind.CONSTANT)
            for constant in (torch.float16, torch.device("cpu"), Color.RED)
        ),
        *((constant, Kind.CONSTANT) for constant in (torch.Size([1]), np.float32(1), frozenset())),
        *((box, Kind.BOX) for box in ([], {}, set(), deque(), OrderedDict(), defaultdict(int))),
        ((1, 2), Kind.TUPLE),
        (torch.ones(1), Kind.TENSOR),
        (nn.Parameter(torch.ones(1)), Kind.TENSOR),
        (np.ones(1), Kind.ARRAY),
        (torch.Generator(), Kind.GENERATOR),
        (np.random.default_rng(), Kind.GENERATOR),
        (random.Random(), Kind.GENERATOR),
        (Counts(), Kind.RECORD),
        (Fixed(), Kind.OTHER),
        (Thing(), Kind.OTHER),
        (nn.Linear(1, 1), Kind.OTHER),
        (len, Kind.OTHER),
        (int, Kind.OTHER),
    ],
)
def test_kinds(value: Any, kind: Kind) -> None:
    assert kind_of(value) is kind


def endless() -> list[Any]:
    box: list[Any] = [Thing()]
    box.append(box)
    return box


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, True),
        ([], True),
        ([Thing()], False),
        ([Thing(), 1], True),
        ({"a": [Thing()]}, False),
        ({"a": [torch.ones(1)]}, True),
        ((Thing(),), False),
        (Counts(), True),
        (OnlyMachinery(nn.Linear(1, 1)), False),
        (nn.Linear(1, 1), False),
        (endless(), False),
    ],
)
def test_a_box_is_state_when_anything_in_it_is(value: Any, expected: bool) -> None:
    assert is_state(value) is expected


def test_tuples_are_constant_when_all_in_them_is() -> None:
    assert is_constant((1, (2, "a")))
    assert not is_constant((1, [2]))
    assert not is_constant([1])


class Frozen(dict[str, Any]):
    """Refuses changes, but not `clear`: so is the configuration of a model of diffusers."""

    def update(self, *args: Any, **values: Any) -> None:
        raise TypeError("You cannot change this.")


def test_a_box_that_refuses_changes_keeps_what_is_in_it() -> None:
    box = Frozen(width=8)
    cell = BoxCell(box, "config", "model")
    cell.put_back(cell.content())
    assert box == {"width": 8}


@pytest.mark.parametrize("box", [{"a": 1}, OrderedDict(a=1), [1], deque([1]), {1}])
def test_a_box_that_has_changed_is_put_back(box: Any) -> None:
    cell = BoxCell(box, "box", "model")
    before = cell.content()
    box.clear()
    cell.put_back(before)
    assert cell.content() == before != cell.content_type()


def test_a_name_that_has_become_another_one_is_put_back() -> None:
    value = [1]
    box = {"before": value}
    cell = BoxCell(box, "box", "model")
    content = cell.content()
    box["after"] = box.pop("before")
    cell.put_back(content)
    assert box == {"before": value}
