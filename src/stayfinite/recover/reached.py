"""How far training had come before it went back."""

from __future__ import annotations

import logging

from stayfinite.errors import NonFiniteError
from stayfinite.recover.situation import Done, Situation
from stayfinite.recover.state import drop_gradients
from stayfinite.snapshot import Snapshot
from stayfinite.snapshot.census import PARTS

logger = logging.getLogger("stayfinite")
_ALL_BUT_LOADER = tuple(part for part in PARTS if part != "loader")
_PUT_BACK = "training stops here, with the weights from before it went back"


class Reached:
    """The good state that training left to go back, until it has come as far again.

    It is kept in the host's memory. Who gives up on the way gets it back: going back did not
    help, and the steps that it cost were good ones.
    """

    def __init__(self) -> None:
        self._kept: Snapshot | None = None
        self._returned: tuple[int, int] | None = None  # to which step, after how many good ones

    def leave(self, situation: Situation, *, step: int, good: int) -> None:
        """Before going back at `step`; `good` counts all good steps, also those of detours."""
        here = self._position(situation, step=step, good=good)
        if situation.snapshots is None or (self._kept is not None and here < self._kept.step):
            return
        self._kept = None
        try:
            self._kept = situation.snapshots.apart(step=here)
        except NonFiniteError:
            pass
        except Exception:
            logger.warning("the state before going back could not be kept", exc_info=True)

    def returned(self, step: int, *, good: int) -> None:
        """A snapshot of `step` was restored."""
        self._returned = step, good

    def given_up(self, done: Done, situation: Situation, *, step: int, good: int) -> Done:
        """What giving up has come to: with the weights that were left, if those are farther."""
        if self._returned is None:
            return done
        here = self._position(situation, step=step, good=good)
        if self._kept is not None and here < self._kept.step:
            try:
                self._kept.restore(parts=_ALL_BUT_LOADER)
            except Exception:
                logger.warning("the state before going back could not be restored", exc_info=True)
            else:
                drop_gradients(situation)
                return Done(_PUT_BACK, went_back_to=self._kept.step)
        back_at, before = self._returned
        if self._kept is not None or done.went_back_to is not None or good > before:
            return done
        return Done(f"training stops here; the weights are those of the snapshot of step {back_at}")

    def _position(self, situation: Situation, *, step: int, good: int) -> int:
        """How many steps the weights have come, in the count of the snapshots."""
        if situation.good_steps is not None:
            return situation.good_steps
        if self._returned is None:
            return step
        return self._returned[0] + good - self._returned[1]
