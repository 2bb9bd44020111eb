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


def global_cells() -> list[Cell]:
    """The host's generators, and those of accelerators that are in use."""
    return list(_global_cells("numpy.random" in sys.modules, torch.cuda.is_initialized()))


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
