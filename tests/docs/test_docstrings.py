"""Every public name has a docstring with an example, and the example does what it shows."""

from __future__ import annotations

import doctest
import inspect
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stayfinite

NAMES = [name for name in stayfinite.__all__ if name != "__version__"]


@pytest.fixture(autouse=True)
def as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)


@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name: str) -> None:
    thing = getattr(stayfinite, name)
    text = inspect.getdoc(thing) or ""
    assert not text.startswith(f"{name}("), "a dataclass wrote this docstring itself"
    names = {**vars(sys.modules[thing.__module__])}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert test.examples, f"{name} has no example"
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert not runner.run(test, out=told.append).failed, "".join(told)
