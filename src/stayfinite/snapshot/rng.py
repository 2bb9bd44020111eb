"""Random number generators: python's, numpy's, torch's, each device's, and given ones."""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.snapshot.copies import Cell, FunctionsCell

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


# The state of python's and numpy's global generators, read in a microsecond.
#
# Their own functions take 10 and 50 microseconds, too much for every training step. The memory is
# only read, never written; where it does not look as expected the public functions are used.

_WORDS = 624
_PYTHON = struct.Struct(f"=i{_WORDS}I")
_NUMPY = struct.Struct(f"={_WORDS}Ii")
_GAUSS = struct.Struct("=i4xd")


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address))


class PythonPeek:
    """The state of the generator behind random.random()."""

    def __init__(self) -> None:
        self._generator: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
        self._memory = _memory(id(self._generator) + object.__basicsize__, _PYTHON.size)
        self._is_readable = self._reads_right()

    def _reads_right(self) -> bool:
        if _random_size() < object.__basicsize__ + _PYTHON.size:
            return False
        return self._full(self.content()) == self._generator.getstate()

    def content(self) -> tuple[bytes, float | None]:
        return self._memory.tobytes(), self._generator.gauss_next  # type: ignore[attr-defined]

    def read(self) -> Any:
        return self.content() if self._is_readable else self._generator.getstate()

    def write(self, state: Any) -> None:
        self._generator.setstate(self._full(state) if self._is_readable else state)

    @staticmethod
    def _full(content: tuple[bytes, float | None]) -> tuple[Any, ...]:
        index, *words = _PYTHON.unpack(content[0])
        return random.Random.VERSION, (*words, index), content[1]


def _random_size() -> int:
    return random.Random.__mro__[1].__basicsize__


class NumpyPeek:
    """The state of the generator behind np.random.rand()."""

    def __init__(self) -> None:
        self._generator: np.random.RandomState = np.random.get_state.__self__  # type: ignore[attr-defined]
        self._get_bits = np.random.mtrand.get_bit_generator
        self._bits: Any = None
        self._offset = _gauss_offset()
        self._memories: tuple[memoryview, memoryview] | None = None

    def read(self) -> Any:
        bits = self._get_bits()
        if bits is not self._bits:
            self._look_at(bits)
        if self._memories is None:
            return self._generator.get_state(legacy=False)
        words, gauss = self._memories
        return words.tobytes() + gauss.tobytes()

    def _look_at(self, bits: Any) -> None:
        """Someone may have put another bit generator in; only the usual one is read directly."""
        self._bits, self._memories = bits, None
        if type(bits) is np.random.MT19937 and self._offset:
            words = _memory(bits.ctypes.state_address, _NUMPY.size)
            self._memories = words, _memory(id(self._generator) + self._offset, _GAUSS.size)
            if not _same(self._full(self.read()), self._generator.get_state(legacy=False)):
                self._memories = None

    def write(self, state: Any) -> None:
        full = self._full(state) if isinstance(state, bytes) else state
        self._generator.set_state(full)

    @staticmethod
    def _full(raw: bytes) -> dict[str, Any]:
        *words, position = _NUMPY.unpack(raw[: _NUMPY.size])
        has_gauss, gauss = _GAUSS.unpack(raw[_NUMPY.size :])
        state = {"key": np.array(words, dtype=np.uint32), "pos": position}
        return {"bit_generator": "MT19937", "state": state, "has_gauss": has_gauss, "gauss": gauss}


def _same(ours: dict[str, Any], theirs: Any) -> bool:
    mine, its = ours["state"], theirs["state"]
    is_gauss_right = ours["has_gauss"] == theirs["has_gauss"] and ours["gauss"] == theirs["gauss"]
    return is_gauss_right and mine["pos"] == its["pos"] and bool((mine["key"] == its["key"]).all())


def _gauss_offset() -> int:
    """Where a RandomState keeps the second half of a pair of normal numbers; 0 if not found."""
    offsets = set()
    for seed in (1, 2):
        generator = np.random.RandomState(seed)
        generator.standard_normal()
        gauss = generator.get_state(legacy=False)["gauss"]
        memory = ctypes.string_at(id(generator), np.random.RandomState.__basicsize__)
        offsets.add(memory.find(_GAUSS.pack(1, gauss)[8:]) - 8)
    offset = offsets.pop()
    return offset if not offsets and offset > 0 else 0
