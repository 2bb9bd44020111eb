"""Whether a step is being run once more: who counts steps leaves that run out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_RUNNING: ContextVar[bool] = ContextVar("stayfinite_run_again", default=False)


@contextlib.contextmanager
def run_again() -> Iterator[None]:
    """A block that repeats a step which was counted already, to look at it or to try it anew."""
    token = _RUNNING.set(True)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def is_run_again() -> bool:
    """Whether the step that runs now was counted before."""
    return _RUNNING.get()
