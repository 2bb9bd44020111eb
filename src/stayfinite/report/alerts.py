"""Who is told of what, and how often: a rule for each receiver."""

from __future__ import annotations

import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from stayfinite.errors import ConfigError
from stayfinite.records import Forecast, Incident, Severity
from stayfinite.report.sinks import is_of_this_rank, rank_here
from stayfinite.text import count, forecast_line, headline, is_mended, what_was_done

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
_DAY = 24 * 3600.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One message to a receiver: of an incident or of a forecast, never of both.

    `source` says which training it is. `held_back` is how many messages the rule has kept from this
    receiver since the last one.

    >>> Alert(severity="critical", incident=Incident(step=37), held_back=2).title
    'NaN at step 37; nothing was done (2 messages were held back before)'
    """

    severity: Severity
    incident: Incident | None = None
    forecast: Forecast | None = None
    held_back: int = 0
    source: str = ""

    @property
    def step(self) -> int:
        return (self.forecast or self.incident or Incident(step=0)).step

    @property
    def title(self) -> str:
        """All that matters, in one line."""
        source = f"{self.source}: " if self.source else ""
        held = count(self.held_back, "message")
        were = "was" if self.held_back == 1 else "were"
        more = f" ({held} {were} held back before)" if self.held_back else ""
        return f"{source}{self._what}{more}"

    @property
    def _what(self) -> str:
        if self.forecast is not None:
            return forecast_line(self.forecast)
        incident = self.incident or Incident(step=0)
        return f"{headline(incident)}; {what_was_done(incident)}"

    @property
    def text(self) -> str:
        """The title, and the report or the evidence below it."""
        below: tuple[str, ...] = ()
        if self.incident is not None:
            from stayfinite.report.terminal import as_text  # late: rich takes long to import

            below = ("```", as_text(self.incident).rstrip("\n"), "```")
        elif self.forecast is not None:
            below = self.forecast.evidence
        return "\n".join((self.title, *below))


class AlertRule:
    """Tells one receiver, and not too often; goes into `alerts=` of `stayfinite.watch`.

    The receiver is a WebhookSink, a LoggingSink, a WandbSink, or any callable that takes an Alert.
    What is less severe than `min_severity` is not for it: an incident after which training went on
    is a "warning", any other "critical"; a forecast has its own severity. After a message nothing
    follows for `cooldown` seconds, unless it is more severe. In any 24 hours there are at most
    `max_per_day`, of which the last is kept for something critical. What is held back is counted,
    and the next message says how many.

    `name` says which training it is, by default script and machine. Of ranks that train together,
    the one where an incident began reports it; forecasts are reported by the first.

    >>> sent = []
    >>> rule = AlertRule(sent.append, min_severity="critical", name="mine")
    >>> rule(Incident(step=37))
    >>> sent[0].title
    'mine: NaN at step 37; nothing was done'
    """

    def __init__(
        self,
        receiver: Callable[..., Any],
        *,
        min_severity: Severity = "warning",
        cooldown: float = 600.0,
        max_per_day: int = 20,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        tell = getattr(receiver, "on_alert", receiver)
        if not callable(tell):
            kind = type(receiver).__name__
            raise ConfigError(
                f"the receiver is a {kind}; it must be a callable that takes an Alert."
            )
        if tell is receiver and hasattr(receiver, "on_forecast"):
            kind = type(receiver).__name__
            raise ConfigError(f"a {kind} sends no messages; give it to `sinks` instead.")
        if min_severity not in SEVERITIES:
            known = ", ".join(map(repr, SEVERITIES))
            raise ConfigError(f"min_severity is {min_severity!r}; it must be one of {known}.")
        if not cooldown >= 0:
            raise ConfigError(f"cooldown is {cooldown}; it must be >= 0 seconds.")
        if max_per_day < 1:
            raise ConfigError(f"max_per_day is {max_per_day}; it must be >= 1.")
        self._tell, self._clock = tell, clock
        self._least, self._cooldown, self._most = min_severity, cooldown, max_per_day
        self._source = _this_training() if name is None else name
        self._sent: deque[float] = deque()  # when, in the last 24 hours
        self._last: tuple[float, Severity] | None = None
        self.held_back = 0
        """Messages that were kept from the receiver since its last one."""

    def __call__(self, incident: Incident) -> None:
        if not is_of_this_rank(incident):
            return
        severity: Severity = "warning" if is_mended(incident.outcome) else "critical"
        self._consider(severity, incident=incident)

    def on_forecast(self, forecast: Forecast) -> None:
        if rank_here() == 0:
            self._consider(forecast.severity, forecast=forecast)

    def _consider(self, severity: Severity, **news: Any) -> None:
        if _is_less(severity, self._least):
            return
        now = self._clock()
        if not self._is_due(severity, now):
            self.held_back += 1
            return
        alert = Alert(severity=severity, held_back=self.held_back, source=self._source, **news)
        self.held_back += 1  # it stays counted if the receiver raises
        self._tell(alert)
        self.held_back = 0
        self._sent.append(now)
        self._last = now, severity

    def _is_due(self, severity: Severity, now: float) -> bool:
        while self._sent and now - self._sent[0] >= _DAY:
            self._sent.popleft()
        room = self._most if severity == "critical" else max(self._most - 1, 1)
        if len(self._sent) >= room:
            return False
        if self._last is None or now - self._last[0] >= self._cooldown:
            return True
        return _is_less(self._last[1], severity)


def _is_less(one: Severity, other: Severity) -> bool:
    return SEVERITIES.index(one) < SEVERITIES.index(other)


def _this_training() -> str:
    """Script and machine, as "train.py on node7"."""
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "training"
    return f"{script} on {socket.gethostname()}"
