"""Trackers get every incident, found or configured, and never disturb training."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import stayfinite
from stayfinite import AlertRule, Forecast, Incident, Outcome
from stayfinite.errors import ConfigError
from stayfinite.files import Background
from stayfinite.integrations.logs import LoggingSink
from stayfinite.integrations.webhook import WebhookSink
from stayfinite.records import Signal, from_data, from_json
from stayfinite.report import sinks as report_sinks
from stayfinite.report.sinks import forecasts_told_to

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages


def train(
    sinks: list[Any] | None, *, bad: int | None = 3, steps: int = 6, alerts: Any = ()
) -> list[Incident]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(torch.log(batch)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    with stayfinite.watch(model, optimizer, sinks=sinks, alerts=alerts) as guard:
        for number in range(steps):
            batch = torch.rand(8, 4) + 0.5
            guard.step(step, -batch if number == bad else batch)
    return guard.incidents


@pytest.fixture(autouse=True)
def nobody_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_sinks, "_failed", set())


def tensorboard_writer(folder: Path) -> Any:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return events


@pytest.mark.parametrize("is_found", [True, False])
def test_tensorboard(tmp_path: Path, is_found: bool, capsys: pytest.CaptureFixture[str]) -> None:
    writer = tensorboard_writer(tmp_path)
    from stayfinite.integrations.tensorboard import TensorBoardSink

    (incident,) = train(None if is_found else [TensorBoardSink(writer)])
    writer.close()
    events = read_events(tmp_path)
    (count,) = events.Scalars("stayfinite/incidents")
    assert (count.step, count.value) == (3, 1)
    (text,) = events.Tensors("stayfinite/incident/text_summary")
    assert b"torch.log" in text.tensor_proto.string_val[0]
    assert incident.step == 3


def test_tensorboard_histogram_has_the_finite_values(tmp_path: Path) -> None:
    writer = tensorboard_writer(tmp_path)
    from stayfinite.integrations.tensorboard import TensorBoardSink

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Run again, it would be the one value that is set here which is guilty.
    with stayfinite.watch(model, optimizer, sinks=[TensorBoardSink(writer)], again="never"):
        model(torch.ones(1, 4)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad[0, 0] = torch.nan
        optimizer.step()
    writer.close()
    (found,) = read_events(tmp_path).Histograms("stayfinite/guilty tensor")
    value = found.histogram_value
    assert (value.num, value.min, value.max, value.sum) == (7, 1, 1, 7)
    assert list(value.bucket)[-1] == 7


def test_closed_tensorboard_writer_is_not_told(tmp_path: Path) -> None:
    writer = tensorboard_writer(tmp_path)
    writer.close()
    assert len(train(None)) == 1


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="p")
    try:
        from stayfinite.integrations.wandb import WandbSink, running

        run.log({"loss": 1.0})
        before = run.step
        alerts: list[str] = []
        monkeypatch.setattr(run, "alert", lambda *, title, text: alerts.append(title))
        train([sink := WandbSink()])
        sink.flush()
        assert run.step == before
        assert run.summary["stayfinite/incidents"] == 1
        assert "step 3" in run.summary["stayfinite/last_incident"]
        assert alerts == [f"stayfinite: {run.summary['stayfinite/last_incident']}"]
        monkeypatch.undo()
        assert running() is not None
        train(None)
    finally:
        run.finish()
    assert running() is None
    assert len(train(None)) == 1


def test_mlflow_in_sqlite(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from stayfinite.integrations import mlflow as ours

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'store.db'}")
    experiment = mlflow.create_experiment("e", artifact_location=(tmp_path / "files").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        train(None)
        sink = ours.running()
        assert sink is not None
        sink.flush()
    data = mlflow.get_run(run.info.run_id).data
    assert data.metrics["stayfinite.incidents"] >= 1
    assert "step 3" in data.tags["stayfinite.last_incident"]
    texts = list((tmp_path / "files").rglob("incident-*.txt"))
    assert "torch.log" in texts[0].read_text()
    assert ours.running() is None


def test_mlflow_server_that_is_gone_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    from stayfinite.integrations.mlflow import MLflowSink

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"http://127.0.0.1:{free_port()}")
    try:
        sink = MLflowSink(run_id="0" * 32)
        assert len(train([sink])) == 1
        sink.flush()
    finally:
        mlflow.set_tracking_uri(before)
    assert "MLflow could not be notified" in caplog.text


def test_prometheus() -> None:
    client = pytest.importorskip("prometheus_client")
    from stayfinite.integrations.prometheus import PrometheusSink

    port = free_port()
    registry = client.CollectorRegistry()
    (incident,) = train([PrometheusSink(registry, port=port)])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'stayfinite_incidents_total{cause="log_of_negative",strategy="skip"} 1.0' in text
    assert "stayfinite_last_incident_step 3.0" in text
    assert incident.step == 3


def test_prometheus_default_registry_is_found() -> None:
    client = pytest.importorskip("prometheus_client")
    train(None)
    before = total(client)
    train(None)
    assert total(client) == before + 1


def total(client: Any) -> float:
    labels = {"cause": "log_of_negative", "strategy": "skip"}
    return float(client.REGISTRY.get_sample_value("stayfinite_incidents_total", labels))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Receiver:
    """A web server that answers with the given codes, then with 200."""

    def __init__(self, *codes: int) -> None:
        self.bodies: list[Any] = []
        left = list(codes)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.bodies.append(json.loads(body))
                self.send_response(left.pop(0) if left else 200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def make(*codes: int) -> Receiver:
        made.append(Receiver(*codes))
        return made[-1]

    yield make
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def test_webhook_posts_json_and_tries_again(receiver: Callable[..., Receiver]) -> None:
    server = receiver(500, 503)
    sink = WebhookSink(server.url, pauses=(0.0, 0.0, 0.0))
    (incident,) = train([sink])
    assert sink.flush(20)
    assert len(server.bodies) == 3
    body = server.bodies[-1]
    assert body["incident"]["step"] == incident.step
    assert "torch.log" in body["text"]


def test_webhook_with_a_body_of_ones_own(receiver: Callable[..., Receiver]) -> None:
    server = receiver()
    sink = WebhookSink(server.url, body=lambda incident: {"summary": f"step {incident.step}"})
    train([sink])
    assert sink.flush(20)
    assert server.bodies == [{"summary": "step 3"}]


def test_webhook_that_nobody_hears_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = WebhookSink(f"http://127.0.0.1:{free_port()}/", pauses=())
    assert len(train([sink])) == 1
    assert len(train([sink])) == 1
    assert sink.flush(20)
    assert caplog.text.count("the webhook could not be notified") == 1


def test_webhook_needs_a_url() -> None:
    with pytest.raises(ConfigError, match="http"):
        WebhookSink("hooks.example")


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mine"):
        (incident,) = train([LoggingSink("mine", logging.WARNING)])
    (record,) = [record for record in caplog.records if record.name == "mine"]
    assert record.incident == incident  # type: ignore[attr-defined]
    assert "torch.log" in record.getMessage()


def test_background_drops_what_it_cannot_keep(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    background = Background("nobody")
    for _ in range(150):
        background.run(lambda: gate.wait(20) and None)
    assert "too many messages are waiting" in caplog.text
    assert not background.flush(0.0)
    gate.set()
    assert background.flush(20)


def test_found_tracker_that_fails_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise OSError("the disk is full")

    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("stayfinite.integrations.prometheus.running", broken)
    assert len(train(None)) == 1
    assert len(train(None)) == 1
    assert caplog.text.count("prometheus_client could not be notified") == 1


SOON = Forecast(
    step=210,
    signal="activation",
    where="encoder.3.ffn",
    dtype="float16",
    steps_left=40,
    steps_low=25,
    steps_high=70,
    time=1_700_000_000.0,
    evidence=("the largest value doubles every 8 steps",),
    outcome=Outcome(strategy="lower_lr", detail="the learning rate went from 0.1 to 0.02"),
)
GONE = dataclasses.replace(SOON, step=260, severity="info", outcome=Outcome(strategy="undo"))
WORDS = (
    "encoder.3.ffn overflows float16 in about 40 steps (25-70); "
    "lower_lr: the learning rate went from 0.1 to 0.02"
)


def test_tensorboard_has_forecasts(tmp_path: Path) -> None:
    writer = tensorboard_writer(tmp_path)
    forecasts_told_to(None)(SOON)
    writer.close()
    events = read_events(tmp_path)
    (left,) = events.Scalars("stayfinite/steps_left")
    assert (left.step, left.value) == (210, 40)
    (text,) = events.Tensors("stayfinite/forecast/text_summary")
    assert text.tensor_proto.string_val[0].decode() == WORDS


def test_wandb_has_forecasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="p")
    try:
        from stayfinite.integrations.wandb import WandbSink

        alerts: list[str] = []
        monkeypatch.setattr(run, "alert", lambda *, title, text: alerts.append(title))
        sink = WandbSink()
        sink.on_forecast(SOON)
        AlertRule(sink, name="")(Incident(step=3))
        sink.flush()
        assert run.summary["stayfinite/forecasts"] == 1
        assert run.summary["stayfinite/last_forecast"] == f"step 210: {WORDS}"
        assert alerts[0] == f"stayfinite: step 210: {WORDS}"
        assert alerts[1] == "stayfinite: NaN at step 3; nothing was done"
    finally:
        monkeypatch.undo()
        run.finish()


def test_mlflow_has_forecasts(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from stayfinite.integrations.mlflow import MLflowSink

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'store.db'}")
    experiment = mlflow.create_experiment("e", artifact_location=(tmp_path / "files").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        sink = MLflowSink()
        sink.on_forecast(SOON)
        sink.flush()
    data = mlflow.get_run(run.info.run_id).data
    assert data.metrics["stayfinite.steps_left"] == 40
    assert data.tags["stayfinite.last_forecast"] == f"step 210: {WORDS}"
    (file,) = (tmp_path / "files").rglob("forecast-1.json")
    assert from_json(Forecast, file.read_text()) == SOON


def test_prometheus_has_forecasts_until_what_was_done_is_undone() -> None:
    client = pytest.importorskip("prometheus_client")
    from stayfinite.integrations.prometheus import PrometheusSink

    registry = client.CollectorRegistry()
    sink = PrometheusSink(registry)
    sink.on_forecast(SOON)
    place = {"where": "encoder.3.ffn", "signal": "activation"}
    names = ("step", "time_seconds", "steps_left", "steps_low", "steps_high")
    metrics = [f"stayfinite_forecast_{name}" for name in names]
    values = [registry.get_sample_value(name, place) for name in metrics]
    assert values == [210, 1_700_000_000.0, 40, 25, 70]
    sink.on_forecast(GONE)
    assert {registry.get_sample_value(name, place) for name in metrics} == {None}
    kind = {"signal": "activation", "severity": "warning"}
    assert registry.get_sample_value("stayfinite_forecasts_total", kind) == 1


@pytest.mark.parametrize("signal", ["loss_spike", "divergence"])
def test_prometheus_counts_what_says_no_time_and_has_no_gauges_of_it(signal: Signal) -> None:
    client = pytest.importorskip("prometheus_client")
    from stayfinite.integrations.prometheus import PrometheusSink

    registry = client.CollectorRegistry()
    PrometheusSink(registry).on_forecast(
        Forecast(step=5, signal=signal, where="loss", time=7.0, severity="info")
    )
    found = {
        sample.name: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if "signal" in sample.labels and not sample.name.endswith("_created")
    }
    assert found == {"stayfinite_forecasts_total": 1.0}


def test_webhook_posts_forecasts(receiver: Callable[..., Receiver]) -> None:
    server = receiver()
    sink = WebhookSink(server.url)
    sink.on_forecast(SOON)
    assert sink.flush(20)
    (body,) = server.bodies
    assert body["text"] == f"stayfinite: step 210: {WORDS}"
    assert from_data(Forecast, body["forecast"]) == SOON


def test_alerts_go_to_a_webhook_beside_the_sinks(receiver: Callable[..., Receiver]) -> None:
    server = receiver()
    sink = WebhookSink(server.url)
    rule = AlertRule(sink, cooldown=3600, name="mine")
    seen: list[Incident] = []
    for _ in range(2):
        train([seen.append], alerts=[rule])
    rule.on_forecast(dataclasses.replace(SOON, severity="critical"))
    assert sink.flush(20)
    first, last = server.bodies
    assert len(seen) == 2
    assert first["text"].startswith("stayfinite: mine: NaN at step 3 in ")
    assert "torch.log" in first["text"]
    assert (first["severity"], first["incident"]["step"]) == ("warning", 3)
    assert last["text"].startswith(f"stayfinite: mine: step 210: {WORDS} (1 message was held back")
    assert (last["held_back"], last["forecast"]["step"]) == (1, 210)


def test_alert_has_a_body_of_ones_own(receiver: Callable[..., Receiver]) -> None:
    server = receiver()
    sink = WebhookSink(server.url, body=lambda alert: {"message": alert.title})
    train([], alerts=[AlertRule(sink, name="mine")])
    sink.on_forecast(SOON)  # with a body for incidents
    assert sink.flush(20)
    (body,) = server.bodies
    assert body["message"].startswith("mine: NaN at step 3 in ")


def test_logging_has_forecasts_and_alerts(caplog: pytest.LogCaptureFixture) -> None:
    sink = LoggingSink("mine")
    with caplog.at_level(logging.INFO, "mine"):
        sink.on_forecast(SOON)
        AlertRule(sink, name="")(Incident(step=3))
    soon, lost = (record for record in caplog.records if record.name == "mine")
    assert (soon.levelno, soon.getMessage()) == (logging.WARNING, f"step 210: {WORDS}")
    assert soon.forecast == SOON  # type: ignore[attr-defined]
    assert lost.levelno == logging.ERROR
    assert lost.alert.severity == "critical"  # type: ignore[attr-defined]
