"""Our own work inside the user's step."""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType

from stayfinite.errors import TrainingAbortedError
from stayfinite.locate.arming import Tracing

logger = logging.getLogger("stayfinite")


class Aside:
    """A `with` block that is not traced, and whose failure is logged once and goes no further.

    Only TrainingAbortedError and what is no Exception leave it. Blocks may be inside one another.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._pauses: list[contextlib.AbstractContextManager[None]] = []
        self._has_failed = False

    def __enter__(self) -> None:
        pause = self._tracing.paused()
        pause.__enter__()
        self._pauses.append(pause)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._pauses.pop().__exit__(None, None, None)
        if not isinstance(error, Exception) or isinstance(error, TrainingAbortedError):
            return False
        if not self._has_failed:
            self._has_failed = True
            logger.error(
                "stayfinite failed inside a step; training goes on without it", exc_info=error
            )
        return True
