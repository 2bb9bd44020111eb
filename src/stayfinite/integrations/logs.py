"""Python's logging: one record for each incident and each forecast, which carries it."""

from __future__ import annotations

import logging

from stayfinite.records import Forecast, Incident
from stayfinite.report.alerts import Alert
from stayfinite.report.terminal import as_text
from stayfinite.text import forecast_line

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


class LoggingSink:
    """Logs the report; handlers find the Incident as `record.incident`.

    A forecast is one line at the level of its severity, with the Forecast as `record.forecast`.
    """

    def __init__(
        self, logger: logging.Logger | str = "stayfinite", level: int = logging.ERROR
    ) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level

    def __call__(self, incident: Incident) -> None:
        self._logger.log(self._level, "%s", as_text(incident), extra={"incident": incident})

    def on_forecast(self, forecast: Forecast) -> None:
        level = min(_LEVELS[forecast.severity], self._level)
        self._logger.log(level, "%s", forecast_line(forecast), extra={"forecast": forecast})

    def on_alert(self, alert: Alert) -> None:
        """Of an AlertRule: the Alert is `record.alert`."""
        level = min(_LEVELS[alert.severity], self._level)
        self._logger.log(level, "%s", alert.text, extra={"alert": alert})
