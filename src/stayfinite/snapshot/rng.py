"""Random number generators: python's, numpy's, torch's, each device's, and given ones."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.snapshot.cells import Cell, FunctionsCell
from stayfinite.snapshot.peek import NumpyPeek, PythonPeek

PART = "random"


@functools.cache
def host_cells() -> tuple[Cell, ...]:
    """The global generators of the host."""
    python, numpy, cpu = PythonPeek(), NumpyPeek(), torch.default_generator
    return (
        FunctionsCell("random.python", PART, python.read, python.write),
        FunctionsCell("random.numpy", PART, numpy.read, numpy.write),
        FunctionsCell("random.torch", PART, cpu.get_state, cpu.set_state),
    )


def device_cells() -> Iterator[Cell]:
    """The global generators of accelerators that are in use; waking up the others is not ours."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number, generator in enumerate(torch.cuda.default_generators):
            yield generator_cell(generator, f"random.cuda:{number}")
    for kind in ("mps", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            yield FunctionsCell(f"random.{kind}", PART, module.get_rng_state, module.set_rng_state)


def global_cells() -> list[Cell]:
    return [*host_cells(), *device_cells()]


def generator_cell(generator: Any, name: str, part: str = PART) -> Cell:
    """The cell of one generator of torch, numpy or python."""
    if isinstance(generator, torch.Generator):
        return FunctionsCell(name, part, generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return FunctionsCell(name, part, generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
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
