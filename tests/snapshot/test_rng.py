"""The global generators are read and written by their own functions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from moments import random_bytes

from stayfinite.snapshot.copies import FunctionsCell
from stayfinite.snapshot.rng import SeldomReadCell, global_cells


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


def test_a_generator_that_nobody_uses_is_read_seldom_and_never_put_back_wrongly() -> None:
    reads: list[int] = []
    state = [0]

    def read() -> int:
        reads.append(state[0])
        return state[0]

    cell = SeldomReadCell(
        FunctionsCell("x", "random", read, lambda value: state.__setitem__(0, value))
    )
    kept = [cell.content() for _ in range(20)]
    assert len(reads) == 8
    state[0] = 5  # drawn from for the first time
    cell.put_back(kept[-1])
    assert state == [5]  # when that was is not known, so it stays
    assert cell.content() == (5, True)  # from now on it is read each time
    state[0] = 9
    cell.put_back((5, True))
    assert state == [5]
