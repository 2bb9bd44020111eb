"""Our own work inside a framework's training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from stayfinite.detect.entrypoints import Wrap, wrapped
from stayfinite.detect.hooks import Attachment
from stayfinite.errors import TrainingAbortedError
from stayfinite.guard.guard import Guard

logger = logging.getLogger("stayfinite")
_said: set[str] = set()


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
    """A block whose failure is logged, once for each `what`, and goes no further.

    Only TrainingAbortedError leaves it.
    """
    try:
        yield
    except TrainingAbortedError:
        raise
    except Exception:
        if what not in _said:
            _said.add(what)
            logger.exception("stayfinite failed in %s; training goes on", what)


def careful_step(
    guard: Guard, fn: Callable[[Any], Any], batch: Any, *, gives_up: Callable[[], None]
) -> Any:
    """`guard.step(fn, batch)`; should that fail by itself, what `fn` gives without a guard.

    Errors of `fn` and TrainingAbortedError leave it; `gives_up` is called before we go on alone.
    """
    results: list[Any] = []
    theirs: list[BaseException] = []

    def noted(given: Any) -> Any:
        try:
            results.append(fn(given))
        except BaseException as error:
            theirs.append(error)
            raise
        return results[-1]

    try:
        return guard.step(noted, batch)
    except TrainingAbortedError:
        raise
    except Exception as error:
        if any(error is each for each in theirs):
            raise
        logger.exception("stayfinite failed in a step; training goes on without it")
        gives_up()
        return results[-1] if results else fn(batch)


def wrapped_method(owner: Any, name: str, wrap: Wrap) -> Attachment:
    """Put `wrap(method)` before a method of this one object; removal leaves no trace of it."""
    original: Callable[..., Any] = getattr(owner, name)
    was_own = name in vars(owner)
    attachment = wrapped(owner, name, wrap)

    def remove() -> None:
        attachment.remove()
        if not was_own and vars(owner).get(name) == original:
            delattr(owner, name)

    return Attachment(remove)
