"""Our bug is never their crash: an error of ours is told once, and the script goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from types import TracebackType

from stayfinite.errors import TrainingAbortedError

logger = logging.getLogger("stayfinite")


class Safely(ContextDecorator):
    """A `with` block or a function that an error of ours does not leave; the first is logged.

    TrainingAbortedError, `passing` and what is no Exception do leave it. `pause` gives a context
    for the time of a block, in which nothing is traced, say, or None. Blocks may be inside one
    another.
    """

    def __init__(
        self,
        message: str,
        *,
        passing: type[Exception] = TrainingAbortedError,
        pause: Callable[[], AbstractContextManager[None] | None] = lambda: None,
    ) -> None:
        self._message, self._passing, self._pause = message, passing, pause
        self._pauses: list[AbstractContextManager[None] | None] = []
        self.has_failed = False

    def __enter__(self) -> None:
        pause = self._pause()
        if pause is not None:
            pause.__enter__()
        self._pauses.append(pause)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        pause = self._pauses.pop()
        if pause is not None:
            pause.__exit__(None, None, None)
        if error is None or not isinstance(error, Exception) or isinstance(error, self._passing):
            return False
        self.note(error)
        return True

    def note(self, error: Exception) -> None:
        """Log the error if it is the first; for an `except`, where a block would cost too much."""
        if not self.has_failed:
            self.has_failed = True
            logger.error(self._message, exc_info=error)


_harmless: dict[str, Safely] = {}


def harmless(what: str) -> Safely:
    """A block whose failure is logged, once for each `what`, and goes no further."""
    if what not in _harmless:
        _harmless[what] = Safely(f"stayfinite failed in {what}; training goes on")
    return _harmless[what]


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
