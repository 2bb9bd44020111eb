"""Weights & Biases: an alert for each incident and forecast; the run's steps are left alone."""

from __future__ import annotations

from typing import Any

from stayfinite.files import Background
from stayfinite.integrations import check_package
from stayfinite.records import Forecast, Incident
from stayfinite.report.alerts import Alert
from stayfinite.report.terminal import as_text
from stayfinite.text import forecast_line, headline

check_package("wandb", extra="wandb")

import wandb  # noqa: E402


class WandbSink:
    """Tells a run, by default the one that is active when an incident comes.

    The summary has the counts and the last headline; what is logged goes with the script's next
    `log`, so the run's own step count stays as it is. As the receiver of an AlertRule it sends
    alerts only.
    """

    def __init__(self, run: Any = None) -> None:
        self.run = run
        self._count = self._forecasts = 0
        self._background = Background("Weights & Biases")

    def __call__(self, incident: Incident) -> None:
        run = self._active()
        if run is None:
            return
        self._count += 1
        count, title, text = self._count, headline(incident), as_text(incident)
        run.log({"stayfinite/incidents": count, "stayfinite/step": incident.step}, commit=False)
        run.summary["stayfinite/incidents"] = count
        run.summary["stayfinite/last_incident"] = title
        self._alert(run, title, text)

    def on_forecast(self, forecast: Forecast) -> None:
        run = self._active()
        if run is None:
            return
        self._forecasts += 1
        count, title = self._forecasts, forecast_line(forecast)
        known = {
            name: getattr(forecast, name) for name in ("steps_left", "steps_low", "steps_high")
        }
        left = {f"stayfinite/{name}": value for name, value in known.items() if value is not None}
        run.log({"stayfinite/forecasts": count, **left}, commit=False)
        run.summary["stayfinite/forecasts"] = count
        run.summary["stayfinite/last_forecast"] = title
        self._alert(run, title, "\n".join((title, *forecast.evidence)))

    def on_alert(self, alert: Alert) -> None:
        """Of an AlertRule."""
        run = self._active()
        if run is not None:
            self._alert(run, alert.title, alert.text)

    def _active(self) -> Any:
        return self.run if self.run is not None else wandb.run

    def _alert(self, run: Any, title: str, text: str) -> None:
        self._background.run(lambda: run.alert(title=f"stayfinite: {title}", text=text))

    def flush(self) -> None:
        """Wait until the alerts are handed over; a few seconds at most."""
        self._background.flush()


_sink = WandbSink()


def running() -> WandbSink | None:
    """A sink for the active run, if there is one."""
    return _sink if wandb.run is not None else None
