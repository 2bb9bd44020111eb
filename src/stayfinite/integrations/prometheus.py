"""Prometheus: incidents by cause and by what was done, and forecasts, under /metrics."""

from __future__ import annotations

import contextlib

from stayfinite.integrations import check_package
from stayfinite.records import Forecast, Incident

check_package("prometheus-client", extra="prometheus")

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, start_http_server  # noqa: E402

_FORETOLD = {
    "step": "The step in which a forecast was made",
    "time_seconds": "When it was made",
    "steps_left": "After so many steps the first non-finite value is expected",
    "steps_low": "After so many at the earliest",
    "steps_high": "After so many at the latest",
}


class PrometheusSink:
    """Counts incidents and forecasts in a registry; with a port it also serves /metrics there.

    Metrics: stayfinite_incidents_total by cause and strategy, stayfinite_last_incident_step and
    stayfinite_last_incident_time_seconds; stayfinite_forecasts_total by signal and severity; and
    for each place and signal that a forecast says a time for stayfinite_forecast_step,
    stayfinite_forecast_time_seconds, stayfinite_forecast_steps_left, stayfinite_forecast_steps_low
    and stayfinite_forecast_steps_high. They stay as they were then: until the next forecast of the
    same place and signal, or until what was done about it is undone. Ask for the time.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, port: int | None = None
    ) -> None:
        registry = REGISTRY if registry is None else registry
        self._incidents = Counter(
            "stayfinite_incidents",
            "Steps in which something was not finite",
            ["cause", "strategy"],
            registry=registry,
        )
        self._step = Gauge(
            "stayfinite_last_incident_step", "The step of the last one", registry=registry
        )
        self._time = Gauge(
            "stayfinite_last_incident_time_seconds", "When it was", registry=registry
        )
        self._forecasts = Counter(
            "stayfinite_forecasts",
            "Forecasts of an overflow or a divergence, and spikes",
            ["signal", "severity"],
            registry=registry,
        )
        self._foretold = {
            name: Gauge(f"stayfinite_forecast_{name}", what, ["where", "signal"], registry=registry)
            for name, what in _FORETOLD.items()
        }
        if port is not None:
            start_http_server(port, registry=registry)

    def __call__(self, incident: Incident) -> None:
        cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
        strategy = incident.outcome.strategy if incident.outcome is not None else "none"
        self._incidents.labels(cause=cause, strategy=strategy).inc()
        self._step.set(incident.step)
        self._time.set(incident.time)

    def on_forecast(self, forecast: Forecast) -> None:
        if not forecast.is_undone:
            self._forecasts.labels(signal=forecast.signal, severity=forecast.severity).inc()
        if forecast.steps_left is None and not forecast.is_undone:
            return  # a spike, or that a trend goes on: it says no time
        place = forecast.where or "model", forecast.signal
        for gauge in self._foretold.values():
            with contextlib.suppress(KeyError):
                gauge.remove(*place)
        if forecast.is_undone:
            return
        values = {"time_seconds": forecast.time, **vars(forecast)}
        for name, gauge in self._foretold.items():
            if values[name] is not None:
                gauge.labels(*place).set(values[name])


_sink: PrometheusSink | None = None


def running() -> PrometheusSink:
    """The sink of the default registry, which whoever imported the package serves or pushes."""
    global _sink
    if _sink is None:
        _sink = PrometheusSink()
    return _sink
