"""Our own work inside a framework's training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from stayfinite.detect.entrypoints import Wrap, wrapped
from stayfinite.detect.hooks import Attachment
from stayfinite.errors import TrainingAbortedError

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
