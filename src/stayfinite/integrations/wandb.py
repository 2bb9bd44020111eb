"""Weights & Biases: an alert for each incident, and counts that leave the run's steps alone."""

from __future__ import annotations

from typing import Any

from stayfinite.files import Background
from stayfinite.integrations import check_package
from stayfinite.records import Incident
from stayfinite.report.terminal import as_text
from stayfinite.text import headline

check_package("wandb", extra="wandb")

import wandb  # noqa: E402


class WandbSink:
    """Tells a run, by default the one that is active when an incident comes.

    The summary has the count and the last headline; what is logged goes with the script's next
    `log`, so the run's own step count stays as it is.
    """

    def __init__(self, run: Any = None) -> None:
        self.run = run
        self._count = 0
        self._background = Background("Weights & Biases")

    def __call__(self, incident: Incident) -> None:
        run = self.run if self.run is not None else wandb.run
        if run is None:
            return
        self._count += 1
        count, title, text = self._count, headline(incident), as_text(incident)
        run.log({"stayfinite/incidents": count, "stayfinite/step": incident.step}, commit=False)
        run.summary["stayfinite/incidents"] = count
        run.summary["stayfinite/last_incident"] = title
        self._background.run(lambda: run.alert(title=f"stayfinite: {title}", text=text))

    def flush(self) -> None:
        """Wait until the alerts are handed over; a few seconds at most."""
        self._background.flush()


_sink = WandbSink()


def running() -> WandbSink | None:
    """A sink for the active run, if there is one."""
    return _sink if wandb.run is not None else None
