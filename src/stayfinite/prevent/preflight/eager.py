"""Passes of our own over models that may be compiled."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch


def eager() -> contextlib.AbstractContextManager[Any]:
    """A time in which nothing is compiled, since nothing is seen inside compiled code.

    Asking for it loads the compiler, which takes seconds, so it is asked only if that is there.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def quiet_about_hooks() -> Iterator[None]:
    """A time in which torch does not warn a user of hooks that are ours."""
    with warnings.catch_warnings():
        ignore_hooks()
        yield


def ignore_hooks() -> None:
    """No warning about global hooks around a compiled module."""
    warnings.filterwarnings("ignore", message=".*when there are global hooks on")
