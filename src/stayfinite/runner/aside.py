"""Our bug is never their crash: an error of ours becomes one line, once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from stayfinite.errors import TrainingAbortedError
from stayfinite.runner.words import say

_said: set[str] = set()


@contextmanager
def step_aside(what: str) -> Iterator[None]:
    """Turn an error inside the block into one line that names `what`; the script goes on.

    With STAYFINITE_DEBUG set, the error is raised instead.
    """
    try:
        yield
    except TrainingAbortedError:
        raise
    except Exception as error:
        if os.environ.get("STAYFINITE_DEBUG"):
            raise
        if what not in _said:
            _said.add(what)
            say(f"{what} failed ({type(error).__name__}: {error}); the script goes on without it.")
