"""MLflow: metrics, tags, and each report and forecast as a file of the run."""

from __future__ import annotations

from stayfinite.files import Background
from stayfinite.integrations import check_package
from stayfinite.records import Forecast, Incident, to_json
from stayfinite.report.terminal import as_text
from stayfinite.text import forecast_line, headline

check_package("mlflow", extra="mlflow")

import mlflow  # noqa: E402


class MLflowSink:
    """Tells a run, by default the one that is active when an incident comes.

    A server that does not answer keeps nobody waiting.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._run_id = run_id
        self._count = self._forecasts = 0
        self._background = Background("MLflow")

    def __call__(self, incident: Incident) -> None:
        run_id = self._run_id or active_run_id()
        if run_id is None:
            return
        self._count += 1
        count, client = self._count, mlflow.MlflowClient()

        def tell() -> None:
            client.log_metric(run_id, "stayfinite.incidents", count, step=incident.step)
            client.set_tag(run_id, "stayfinite.last_incident", headline(incident))
            name = f"stayfinite/incident-{count}"
            client.log_text(run_id, as_text(incident), f"{name}.txt")
            client.log_text(run_id, to_json(incident, indent=1), f"{name}.json")

        self._background.run(tell)

    def on_forecast(self, forecast: Forecast) -> None:
        run_id = self._run_id or active_run_id()
        if run_id is None:
            return
        self._forecasts += 1
        count, client, line = self._forecasts, mlflow.MlflowClient(), forecast_line(forecast)

        def tell() -> None:
            client.log_metric(run_id, "stayfinite.forecasts", count, step=forecast.step)
            for name in ("steps_left", "steps_low", "steps_high"):
                if (value := getattr(forecast, name)) is not None:
                    client.log_metric(run_id, f"stayfinite.{name}", value, step=forecast.step)
            client.set_tag(run_id, "stayfinite.last_forecast", line)
            client.log_text(
                run_id, to_json(forecast, indent=1), f"stayfinite/forecast-{count}.json"
            )

        self._background.run(tell)

    def flush(self) -> None:
        """Wait until all is told; a few seconds at most."""
        self._background.flush()


def active_run_id() -> str | None:
    run = mlflow.active_run()
    return run.info.run_id if run is not None else None


_sink = MLflowSink()


def running() -> MLflowSink | None:
    """A sink for the active run, if there is one."""
    return _sink if active_run_id() is not None else None
