"""Random number generators: python's, numpy's, torch's, each device's, and given ones."""

from __future__ import annotations

import functools
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.snapshot.copies import Cell, FunctionsCell

PART = "random"


def global_cells() -> tuple[Cell, ...]:
    """The host's generators, and those of accelerators that are in use."""
    return _global_cells("numpy.random" in sys.modules, torch.cuda.is_initialized())


@functools.cache
def _global_cells(is_numpy_there: bool, is_cuda_awake: bool) -> tuple[Cell, ...]:
    """They are the same objects for the whole life of the process, until CUDA is woken up.

    numpy imports its generators when they are first asked for; before that nobody has drawn.
    """
    cells: list[Cell] = [FunctionsCell("random.python", PART, random.getstate, random.setstate)]
    if is_numpy_there:
        cells.append(numpy_cell())
    cells.append(generator_cell(torch.default_generator, "random.torch"))
    if is_cuda_awake:  # waking it up is not ours
        for number, generator in enumerate(torch.cuda.default_generators):
            cells.append(generator_cell(generator, f"random.cuda:{number}"))
    for kind in ("mps", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            name = f"random.{kind}"
            cells.append(FunctionsCell(name, PART, module.get_rng_state, module.set_rng_state))
    return tuple(cells)


def numpy_cell() -> Cell:
    """The cell of numpy's global generator."""
    # The legacy form would warn about another bit generator than the usual one.
    return FunctionsCell(
        "random.numpy", PART, lambda: np.random.get_state(legacy=False), np.random.set_state
    )


def generator_cell(generator: Any, name: str, part: str = PART) -> Cell:
    """The cell of one generator of torch, numpy or python."""
    if isinstance(generator, torch.Generator):
        return FunctionsCell(name, part, generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return FunctionsCell(name, part, generator.getstate, generator.setstate)
    if type(generator).__name__ == "RandomState":  # numpy's; naming the class would import it
        return FunctionsCell(
            name, part, lambda: generator.get_state(legacy=False), generator.set_state
        )
    bits = getattr(generator, "bit_generator", generator)
    return FunctionsCell(name, part, lambda: bits.state, functools.partial(setattr, bits, "state"))


class SeldomReadCells:
    """The global generators, of which the host's large ones are read only if steps use them."""

    def __init__(self) -> None:
        self._seldom: dict[str, SeldomReadCell] = {}
        self._all: tuple[Cell, ...] = ()
        self._cells: tuple[Cell, ...] = ()

    def cells(self) -> tuple[Cell, ...]:
        cells = global_cells()
        if cells is not self._all:  # it is the same tuple until there are others
            self._all, self._cells = cells, tuple(map(self._cell, cells))
        return self._cells

    def _cell(self, cell: Cell) -> Cell:
        if cell.name not in _LARGE:
            return cell
        if cell.name not in self._seldom:
            self._seldom[cell.name] = SeldomReadCell(cell)
        return self._seldom[cell.name]


_LARGE = ("random.python", "random.numpy")


class SeldomReadCell:
    """A generator of the host whose state takes long to read, and which most steps never use.

    It is read every time once it was seen to change; before that in the first steps, and in
    some.
    """

    _SURE, EVERY = 8, 32

    def __init__(self, cell: Cell) -> None:
        self.cell, self.name, self.part = cell, cell.name, cell.part
        self._last: Any = None
        self._looks = 0
        self._is_used = False

    @property
    def is_unused(self) -> bool:
        """Whether it was read often enough to say that steps do not use it."""
        return self._looks >= self._SURE and not self._is_used

    def content(self) -> tuple[Any, bool]:
        """Its state, and whether that was read just now."""
        if self.is_unused and (self._looks + 1) % self.EVERY:
            self._looks += 1
            return self._last, False
        return self.read(), True

    def read(self) -> Any:
        """Its state now."""
        self._looks += 1
        now = self.cell.content()
        self._is_used = self._is_used or (self._looks > 1 and not _are_equal(now, self._last))
        self._last = now
        return now

    def put_back(self, content: tuple[Any, bool]) -> None:
        """Put the state back; one that was not read may be older than the step, and is not."""
        state, was_read = content
        if was_read:
            self.cell.put_back(state)
        else:
            self._is_used = not _are_equal(self.cell.content(), state)


def _are_equal(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_are_equal(one[key], two[key]) for key in one)
    if isinstance(one, (np.ndarray, Tensor)):
        return bool(np.array_equal(one, two))
    return bool(one == two)


@dataclass(frozen=True)
class RandomState:
    """All global random number generators: python, numpy, torch, and each accelerator's."""

    python: Any
    numpy: Any
    torch: Tensor
    devices: tuple[Tensor, ...]

    @classmethod
    def capture(cls) -> RandomState:
        devices = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), devices)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
