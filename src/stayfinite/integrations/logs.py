"""Python's logging: one record for each incident, which carries it."""

from __future__ import annotations

import logging

from stayfinite.records import Incident
from stayfinite.report.terminal import as_text


class LoggingSink:
    """Logs the report; handlers find the Incident as `record.incident`."""

    def __init__(
        self, logger: logging.Logger | str = "stayfinite", level: int = logging.ERROR
    ) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level

    def __call__(self, incident: Incident) -> None:
        self._logger.log(self._level, "%s", as_text(incident), extra={"incident": incident})
