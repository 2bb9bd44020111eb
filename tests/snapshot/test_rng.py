"""The global generators are read and written by their own functions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from moments import random_bytes

from stayfinite.snapshot.rng import global_cells


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    python, bits, numpy = random.getstate(), np.random.get_bit_generator(), np.random.get_state()
    yield
    np.random.set_bit_generator(bits)
    random.setstate(python)
    np.random.set_state(numpy)


def draws() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return [*map(float, numbers), torch.rand(()).item()]


@pytest.mark.parametrize("count", [0, 1, 2, 700])
def test_numbers_come_again(count: int) -> None:
    for _ in range(count):
        draws()
    before = random_bytes()
    kept = [(cell, cell.content()) for cell in global_cells()]
    first = draws()
    for cell, content in kept:
        cell.put_back(content)
    assert random_bytes() == before
    assert draws() == first


def test_another_bit_generator_of_numpy_goes_back_too() -> None:
    np.random.set_bit_generator(np.random.PCG64(5))
    kept = [(cell, cell.content()) for cell in global_cells()]
    first = draws()
    for cell, content in kept:
        cell.put_back(content)
    assert draws() == first
