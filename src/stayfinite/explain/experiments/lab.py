"""Where experiments are run: within a budget, each replay once, and counted."""

from __future__ import annotations

import time
from collections.abc import Callable

from stayfinite.explain.experiments.replays import (
    AS_IT_WAS,
    CannotReplayError,
    Change,
    Replays,
    Seen,
)

Progress = Callable[[str, int], None]


class OutOfTimeError(Exception):
    """The budget does not allow another replay."""


class Lab:
    """Runs replays until `seconds` are over; one that is known is not run again.

    `progress(experiment, replays so far)` is called before each replay. A replay that is
    expected to end after the budget is not begun.
    """

    def __init__(
        self,
        replays: Replays,
        *,
        seconds: float,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replays = replays
        self.count = 0
        self.doing = ""
        self._progress, self._clock = progress, clock
        self._end = clock() + seconds
        self._longest = 0.0
        self._known: dict[Change, Seen | Exception] = {}

    def run(self, change: Change, *, anew: bool = False) -> Seen:
        """What the replay showed.

        Raises OutOfTimeError without running it, CannotReplayError if it cannot be done or the
        step itself raised.
        """
        if anew or change not in self._known:
            self._known[change] = self._run(change)
        seen = self._known[change]
        if isinstance(seen, Exception):
            raise seen
        return seen

    def fails(self, change: Change, *, anew: bool = False) -> bool:
        """Whether the step goes bad at the same place as when nothing is changed.

        False too where it raises, cannot be run, or goes bad elsewhere.
        """
        try:
            return self.run(change, anew=anew).is_like(self.run(AS_IT_WAS))
        except CannotReplayError:
            return False

    def is_finite(self, change: Change, *, anew: bool = False) -> bool:
        """Whether the step is finite with the change; False where that cannot be said."""
        try:
            return self.run(change, anew=anew).is_finite
        except CannotReplayError:
            return False

    def _run(self, change: Change) -> Seen | Exception:
        begun = self._clock()
        if begun + self._longest > self._end:
            raise OutOfTimeError
        if self._progress is not None:
            self._progress(self.doing, self.count)
        self.count += 1
        try:
            return self.replays.run(change)
        except CannotReplayError as error:
            return error
        except Exception as error:  # the user's own: a batch of one that a layer refuses, say
            return CannotReplayError(f"the step raised {type(error).__name__}")
        finally:
            self._longest = max(self._longest, self._clock() - begun)
