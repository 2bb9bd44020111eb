"""Everything that changes in a training job, found by walking its objects; each thing once."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stayfinite.snapshot.cells import AttributesCell, Cell, box_cell
from stayfinite.snapshot.plain import CONSTANTS, Kind, is_state, items_of, kind_of
from stayfinite.snapshot.rng import generator_cell

Enter = Callable[["Census", Any, str, str], None]

PARTS = (
    *("parameters", "buffers", "attributes", "gradients", "optimizer", "param_groups"),
    *("scheduler", "scaler", "ema", "random", "loader"),
)
"""What the state of training is made of; the first part that reaches a thing owns it."""
STRUCTURE = "structure"
"""The part of what is never put back, only watched."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that belongs to training."""

    tensor: Tensor
    name: str
    part: str


def enter_nothing(census: Census, value: Any, name: str, part: str) -> None:
    """Objects that are not plain state are left alone."""


class Census:
    """Tensors and cells, in the order in which they were found.

    Objects whose id is in `owned` belong to someone else.
    """

    def __init__(self, owned: Container[int] = ()) -> None:
        self.items: list[Item] = []
        self.cells: list[Cell] = []
        self._owned = owned
        self._names: set[str] = set()
        self._seen: dict[int, Any] = {}  # holds what it saw, so that no id is used again

    def is_new(self, value: Any) -> bool:
        """True once for each object."""
        key = id(value)
        if key in self._seen or key in self._owned:
            return False
        self._seen[key] = value
        return True

    def tensor(self, tensor: Tensor, name: str, part: str) -> None:
        if self.is_new(tensor):
            self._add(tensor, name, part)

    def _add(self, tensor: Tensor, name: str, part: str) -> None:
        """Memory is found by name, so no two may share one."""
        if name in self._names:
            name = f"{name} ({len(self.items)})"
        self._names.add(name)
        self.items.append(Item(tensor, name, part))

    def value(self, value: Any, name: str, part: str, enter: Enter = enter_nothing) -> None:
        """Plain state of any kind; `enter` looks into objects that are not."""
        kind = kind_of(value)
        if kind is Kind.CONSTANT:
            return
        if kind is Kind.OTHER:
            enter(self, value, name, part)
        elif self.is_new(value):
            if kind is Kind.TENSOR:
                self._add(value, name, part)
            elif kind is Kind.RECORD:
                self.attributes(value, name, part, enter=enter)
            elif kind is Kind.GENERATOR:
                self.cells.append(generator_cell(value, name, part))
            else:
                self._box(value, name, part, enter)

    def _box(self, value: Any, name: str, part: str, enter: Enter) -> None:
        cell = box_cell(value, name, part) if is_state(value) else None
        if cell is not None:
            self.cells.append(cell)
        if kind_of(value) is not Kind.ARRAY:
            for key, item in items_of(value):
                if type(item) not in CONSTANTS:
                    self.value(item, f"{name}.{key}", part, enter)

    def attributes(
        self,
        owner: Any,
        name: str,
        part: str,
        *,
        skipped: Container[str] = (),
        enter: Enter = enter_nothing,
    ) -> None:
        """The plain attributes of an object, and what is inside them."""
        self.cells.append(AttributesCell(owner, name, part, skipped))
        for key, value in list(vars(owner).items()):
            if type(value) not in CONSTANTS and key not in skipped:
                self.value(value, f"{name}.{key}", part, enter)
