"""What a fault does to a tensor: one element becomes NaN, Inf, or has a bit flipped."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stayfinite.errors import ConfigError

Value = Literal["nan", "inf", "-inf", "bitflip"]
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """One time that the fault has struck; `element` is a flat index."""

    step: int
    location: str
    element: int
    before: float
    after: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harm:
    """What is done to one element; without `element`, the seed chooses one.

    A bit flip takes the highest bit of the exponent, unless `bit` says which (0 is the lowest).
    """

    value: Value = "nan"
    element: int | None = None
    bit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.value not in get_args(Value):
            accepted = ", ".join(repr(value) for value in get_args(Value))
            raise ConfigError(f"value is {self.value!r}; it must be one of {accepted}.")
        if self.bit is not None and self.value != "bitflip":
            raise ConfigError(f"bit is {self.bit} but value is {self.value!r}, not 'bitflip'.")
        for name in ("element", "bit"):
            number = getattr(self, name)
            if number is not None and number < 0:
                raise ConfigError(f"{name} is {number}; it must be at least 0.")

    def fits(self, tensor: Any) -> bool:
        """Whether the tensor has an element that can hold the value."""
        if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.numel():
            return False
        return self.value == "bitflip" or tensor.is_floating_point() or tensor.is_complex()

    def write(self, tensor: Tensor, *, location: str, step: int) -> Hit:
        """Spoil the tensor in place, unseen by autograd and by every dispatch mode."""
        with _disable_current_modes(), torch.no_grad():
            dense = tensor.data._values() if tensor.layout is torch.sparse_coo else tensor.data
            element = self._choose(dense, location)
            cell = _cell(dense, element)
            before = float(cell)
            self._spoil(cell, location)
            return Hit(
                step=step, location=location, element=element, before=before, after=float(cell)
            )

    def copy(self, tensor: Tensor, *, location: str, step: int) -> tuple[Tensor, Hit]:
        """A spoiled copy, through which gradients flow as before."""
        with _disable_current_modes():
            copy = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
            copy = copy.clone()
        return copy, self.write(copy, location=location, step=step)

    def _choose(self, tensor: Tensor, location: str) -> int:
        if self.element is None:
            return random.Random(self.seed).randrange(tensor.numel())
        if self.element >= tensor.numel():
            raise ConfigError(
                f"element is {self.element}, but {location} has {tensor.numel()} elements, "
                "counted from 0."
            )
        return self.element

    def _spoil(self, cell: Tensor, location: str) -> None:
        if self.value != "bitflip":
            cell.fill_(float(self.value))
            return
        size = 8 * cell.element_size()
        bit = self.bit
        if bit is None:
            bit = size - 2 if cell.is_floating_point() else size - 1
        if bit >= size:
            raise ConfigError(f"bit is {bit}, but an element of {location} has {size} bits.")
        bits = cell.view(_AS_BITS[cell.element_size()])
        # The highest bit of a signed integer is its sign, which 1 << bit would overflow.
        bits.bitwise_xor_(-(1 << bit) if bits.is_signed() and bit == size - 1 else 1 << bit)


def _cell(tensor: Tensor, element: int) -> Tensor:
    """One element as a view without dimensions; of a complex number, the real part."""
    index = []
    for size in reversed(tensor.shape):
        element, place = divmod(element, size)
        index.append(place)
    cell = tensor[tuple(reversed(index))]
    return torch.view_as_real(cell)[0] if cell.is_complex() else cell
