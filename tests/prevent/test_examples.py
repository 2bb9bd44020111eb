"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ("losses", "clamp", "clipping", "init", "ops", "risks", "data.check")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    done = doctest.testmod(importlib.import_module(f"stayfinite.prevent.{name}"))
    assert done.attempted
    assert not done.failed
