"""Prometheus: incidents by cause and by what was done, under /metrics."""

from __future__ import annotations

from stayfinite.integrations import check_package
from stayfinite.records import Incident

check_package("prometheus-client", extra="prometheus")

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, start_http_server  # noqa: E402


class PrometheusSink:
    """Counts incidents in a registry; with a port it also serves /metrics there.

    Metrics: stayfinite_incidents_total by cause and strategy, stayfinite_last_incident_step and
    stayfinite_last_incident_time_seconds.
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
        if port is not None:
            start_http_server(port, registry=registry)

    def __call__(self, incident: Incident) -> None:
        cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
        strategy = incident.outcome.strategy if incident.outcome is not None else "none"
        self._incidents.labels(cause=cause, strategy=strategy).inc()
        self._step.set(incident.step)
        self._time.set(incident.time)


_sink: PrometheusSink | None = None


def running() -> PrometheusSink:
    """The sink of the default registry, which whoever imported the package serves or pushes."""
    global _sink
    if _sink is None:
        _sink = PrometheusSink()
    return _sink
