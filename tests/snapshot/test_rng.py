"""The states of generators that are read directly are those that their owners would tell."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from stayfinite.snapshot.rng import NumpyPeek, PythonPeek


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    python, bits, numpy = random.getstate(), np.random.get_bit_generator(), np.random.get_state()
    yield
    np.random.set_bit_generator(bits)
    random.setstate(python)
    np.random.set_state(numpy)


def draws() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return list(map(float, numbers))


def test_both_are_read_directly_here() -> None:
    assert isinstance(PythonPeek().read()[0], bytes)
    assert isinstance(NumpyPeek().read(), bytes)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 700])
def test_numbers_come_again(count: int) -> None:
    random.seed(count)
    np.random.seed(count)
    peeks = (PythonPeek(), NumpyPeek())
    for _ in range(count):
        random.gauss(0, 1)
        np.random.randn()
    states = [peek.read() for peek in peeks]
    told = (random.getstate(), repr(np.random.get_state(legacy=False)))
    first = draws()
    for peek, state in zip(peeks, states, strict=True):
        peek.write(state)
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == told
    assert draws() == first


def test_state_is_safe_from_later_draws() -> None:
    python, numpy = PythonPeek(), NumpyPeek()
    before = python.read(), numpy.read()
    kept = bytes(before[0][0]), bytes(before[1])
    draws()
    assert (before[0][0], before[1]) == kept
    assert (python.read(), numpy.read()) != before


def test_memory_that_looks_different_is_not_read() -> None:
    python, numpy = PythonPeek(), NumpyPeek()
    python._is_readable = False
    numpy._offset = 0
    states = python.read(), numpy.read()
    assert states[0] == random.getstate()
    assert isinstance(states[1], dict)
    first = draws()
    python.write(states[0])
    numpy.write(states[1])
    assert draws() == first


def test_another_bit_generator_is_asked_instead() -> None:
    peek = NumpyPeek()
    usual = peek.read()
    np.random.set_bit_generator(np.random.PCG64(5))
    state = peek.read()
    assert state["bit_generator"] == "PCG64"
    first = np.random.rand()
    peek.write(state)
    assert np.random.rand() == first
    np.random.set_bit_generator(np.random.MT19937(6))
    peek.write(usual)
    assert peek.read() == usual
