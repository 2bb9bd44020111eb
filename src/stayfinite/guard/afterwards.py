"""What is traced after an incident: most bugs come back at once."""

from __future__ import annotations

from stayfinite.locate.arming import Tracing
from stayfinite.records import Incident

_STEPS = 3
_MOST_TIMES = 3


class Afterwards:
    """Switches the tracer on for some steps after an incident whose operation is not known."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._steps_left = 0
        self._times_left = _MOST_TIMES

    def begin(self, incident: Incident) -> None:
        known = incident.origin is not None and incident.origin.exact
        if not known and not self._tracing.is_on and self._times_left:
            self._times_left -= 1
            self._steps_left = _STEPS + 1  # this one is still to be counted
            self._tracing.switch_on()

    def stepped(self) -> None:
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._tracing.switch_off()
