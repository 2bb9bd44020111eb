"""Incidents through Python's logging, with the record at hand for a handler.

python examples/logging_example.py
"""

from __future__ import annotations

import logging

from training import train

from stayfinite.integrations.logs import LoggingSink


class OneLine(logging.Formatter):
    """What a log file has room for."""

    def format(self, record: logging.LogRecord) -> str:
        incident = getattr(record, "incident", None)
        if incident is None:
            return super().format(record)
        return f"{record.levelname} step {incident.step}: {incident.diagnosis.why}"


def main() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.getLogger("train").addHandler(handler)
    train(sinks=[LoggingSink("train", logging.WARNING)])


if __name__ == "__main__":
    main()
