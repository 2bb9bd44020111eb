"""Our bug is never their crash: an error of ours becomes one line, once, and the script goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stayfinite.errors import TrainingAbortedError

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


def say(line: str) -> None:
    """Print one line of ours on stderr; a closed or broken stderr is no reason to fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError), beside_bars():
        sys.stderr.write(f"stayfinite: {line}\n")
        sys.stderr.flush()


def beside_bars() -> contextlib.AbstractContextManager[None]:
    """A block whose output does not begin in the middle of a progress bar of tqdm."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        return contextlib.nullcontext()
    # Its lock may be held in a process that was forked just then.
    beside: contextlib.AbstractContextManager[None]
    beside = bars.external_write_mode(file=sys.stderr, nolock=True)
    return beside
