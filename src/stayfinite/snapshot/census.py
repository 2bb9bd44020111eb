"""Everything that changes in a training job, found by walking its objects; each thing once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stayfinite.snapshot.cells import AttributesCell, Cell, box_cell
from stayfinite.snapshot.plain import GENERATORS, is_constant, is_record, is_state, items_of
from stayfinite.snapshot.rng import generator_cell

Enter = Callable[["Census", Any, str, str], None]

PARTS = (
    *("parameters", "buffers", "attributes", "gradients", "optimizer", "param_groups"),
    *("scheduler", "scaler", "ema", "random", "loader"),
)
"""What the state of training is made of; the first part that reaches a thing owns it."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that belongs to training."""

    tensor: Tensor
    name: str
    part: str


def enter_record(census: Census, value: Any, name: str, part: str) -> None:
    """Of objects, only dataclass instances are plain state."""
    if is_record(value) and census.is_new(value):
        census.attributes(value, name, part)


class Census:
    """Tensors and cells, in the order in which they were found."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.cells: list[Cell] = []
        self._seen: dict[int, Any] = {}  # holds what it saw, so that no id is used again

    def is_new(self, value: Any) -> bool:
        """True once for each object."""
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def tensor(self, tensor: Tensor, name: str, part: str) -> None:
        if self.is_new(tensor):
            self.items.append(Item(tensor, name, part))

    def value(self, value: Any, name: str, part: str, enter: Enter = enter_record) -> None:
        """Plain state of any kind; `enter` looks into objects that are not plain."""
        if is_constant(value):
            return
        if isinstance(value, Tensor):
            self.tensor(value, name, part)
        elif isinstance(value, GENERATORS):
            if self.is_new(value):
                self.cells.append(generator_cell(value, name, part))
        elif items_of(value) is None or is_record(value):
            enter(self, value, name, part)
        elif self.is_new(value):
            self._box(value, name, part, enter)

    def _box(self, value: Any, name: str, part: str, enter: Enter) -> None:
        cell = box_cell(value, name, part) if is_state(value) else None
        if cell is not None:
            self.cells.append(cell)
        for key, item in items_of(value) or ():
            self.value(item, f"{name}.{key}", part, enter)

    def attributes(
        self,
        owner: Any,
        name: str,
        part: str,
        *,
        skipped: Collection[str] = (),
        enter: Enter = enter_record,
    ) -> None:
        """The plain attributes of an object, and what is inside them."""
        self.cells.append(AttributesCell(owner, name, part, skipped))
        for key, value in list(vars(owner).items()):
            if key not in skipped:
                self.value(value, f"{name}.{key}", part, enter)
