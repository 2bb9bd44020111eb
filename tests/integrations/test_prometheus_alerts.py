"""Our metrics and sample rules under a real Prometheus, with a real Alertmanager behind it."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from free_port import free_port

import stayfinite
from stayfinite import Forecast
from stayfinite.records import Signal

SAMPLES = Path(__file__).parents[2] / "examples" / "prometheus"
PATIENCE = 60.0  # seconds; a few are enough unless it is broken
SUMMARIES = {
    "TrainingWillOverflow": "encoder.3.ffn (activation) overflows in about 40 steps",
    "TrainingWillDiverge": "training will probably diverge in about 84 steps, at most 277",
}
OVERFLOW = Forecast(
    step=1, signal="activation", where="encoder.3.ffn", dtype="float16", steps_left=40
)
DIVERGENCE = Forecast(step=1, signal="divergence", steps_left=84, steps_low=3, steps_high=277)
SPIKE = Forecast(step=1, signal="loss_spike", where="loss", value=41.0, limit=6.2)


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} on this machine: apt-get install {name.split('-')[0]}")
    return found


@contextmanager
def running(*words: str) -> Iterator[None]:
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@dataclass
class Phone:
    """Stands for one: what Alertmanager posts to it."""

    alerts: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    @property
    def told(self) -> set[str]:
        return {each["labels"]["alertname"] for each in self.alerts}

    @contextmanager
    def ringing(self) -> Iterator[None]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.alerts += body["alerts"]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()


def sample(name: str, folder: Path, **changes: str) -> Path:
    """A sample file, with these words in the place of others."""
    text = (SAMPLES / name).read_text()
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return folder / name


def until(holds: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"{what}: never seen"
        time.sleep(0.1)


def firing(address: str) -> dict[str, dict[str, Any]]:
    """The alerts that fire, by their names."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/alerts", timeout=5) as answer:
            alerts = json.load(answer)["data"]["alerts"]
    except OSError:
        return {}  # it is starting
    return {each["labels"]["alertname"]: each for each in alerts if each["state"] == "firing"}


def train(port: int) -> None:
    """A training with forecasts and a bad step, whose metrics are served on this port."""
    client = pytest.importorskip("prometheus_client")
    from stayfinite.integrations.prometheus import PrometheusSink

    sink = PrometheusSink(client.CollectorRegistry(), port=port)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stayfinite.watch(model, optimizer, sinks=[sink]) as guard:
        for number in range(6):
            batch = torch.rand(8, 4) + 0.5
            optimizer.zero_grad()
            model(torch.log(-batch if number == 3 else batch)).square().mean().backward()
            optimizer.step()
            for forecast in (OVERFLOW, DIVERGENCE, SPIKE) if number == 1 else ():
                guard.foretell(replace(forecast, time=time.time()))
    assert len(guard.incidents) == 1


def test_sample_alerts_fire_in_prometheus_and_reach_a_receiver(tmp_path: Path) -> None:
    prometheus, manager = program("prometheus"), program("prometheus-alertmanager")
    metrics, served, managed = free_port(), free_port(), free_port()
    phone = Phone()
    sample("rules.yml", tmp_path)
    config = sample(
        "prometheus.yml",
        tmp_path,
        target=("127.0.0.1:9108", f"127.0.0.1:{metrics}"),
        manager=("127.0.0.1:9093", f"127.0.0.1:{managed}"),
        every=("_interval: 5s", "_interval: 1s"),
    )
    address = f"http://127.0.0.1:{served}"
    with ExitStack() as stack:
        stack.enter_context(phone.ringing())
        route = sample(
            "alertmanager.yml",
            tmp_path,
            url=("http://127.0.0.1:9095/", phone.url),
            wait=("group_wait: 10s", "group_wait: 1s"),
            again=("group_interval: 5m", "group_interval: 1s"),
        )
        stack.enter_context(
            running(
                manager,
                f"--config.file={route}",
                f"--storage.path={tmp_path / 'manager'}",
                f"--web.listen-address=127.0.0.1:{managed}",
                "--cluster.listen-address=",
            )
        )
        stack.enter_context(
            running(
                prometheus,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{served}",
                # It hears of its Alertmanager after some seconds, when the alerts fire already.
                "--rules.alert.resend-delay=1s",
            )
        )
        train(metrics)
        wanted = {"TrainingNotFinite", *SUMMARIES}
        until(lambda: wanted <= firing(address).keys(), "the alerts")
        alerts = firing(address)
        until(lambda: wanted <= phone.told, "the messages")
    assert alerts.keys() == wanted
    source = f"127.0.0.1:{metrics}"
    for name, summary in SUMMARIES.items():
        assert alerts[name]["annotations"]["summary"] == f"{source}: {summary}"
    assert alerts["TrainingWillOverflow"]["labels"]["where"] == "encoder.3.ffn"
    said = alerts["TrainingNotFinite"]["annotations"]["summary"]
    assert said.startswith(f"{source}: NaN or Inf in training, ")
    assert said.endswith(" s ago, at step 3")
    assert phone.told == wanted


def test_sample_files_are_what_prometheus_takes(tmp_path: Path) -> None:
    checker = program("promtool")
    done = subprocess.run(
        [checker, "check", "config", str(SAMPLES / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "5 rules found" in done.stdout


SIGNALS: tuple[Signal, ...] = get_args(Signal)


@pytest.mark.parametrize("signal", [each for each in SIGNALS if not each.endswith("_spike")])
def test_the_words_of_an_alert_are_true_for_each_signal(signal: Signal, tmp_path: Path) -> None:
    checker = program("promtool")
    client = pytest.importorskip("prometheus_client")
    from stayfinite.integrations.prometheus import PrometheusSink

    registry = client.CollectorRegistry()
    PrometheusSink(registry).on_forecast(replace(DIVERGENCE, signal=signal, where="a", time=60.0))
    place = {"where": "a", "signal": signal}
    names = [f"stayfinite_forecast_{each}" for each in ("steps_left", "steps_high", "time_seconds")]
    series = [
        {
            "series": f"{name}{{instance='n',where='a',signal='{signal}'}}",
            "values": f"{registry.get_sample_value(name, place)}x9",
        }
        for name in names
    ]
    words = {
        "divergence": SUMMARIES["TrainingWillDiverge"],
        "loss_scale": "the loss scale falls to 1 in about 84 steps",
    }
    name = "TrainingWillDiverge" if signal == "divergence" else "TrainingWillOverflow"
    said = words.get(signal, f"a ({signal}) overflows in about 84 steps")
    labels = {"severity": "warning", "instance": "n", **place}
    alerts = [{"exp_labels": labels, "exp_annotations": {"summary": f"n: {said}"}}]
    never = next(each for each in SUMMARIES if each != name)
    checks = [
        {"eval_time": "2m", "alertname": name, "exp_alerts": alerts},
        {"eval_time": "2m", "alertname": never, "exp_alerts": []},
        {"eval_time": "7m", "alertname": name, "exp_alerts": []},  # the gauges are still there
    ]
    tests = [{"interval": "1m", "input_series": series, "alert_rule_test": checks}]
    file = tmp_path / "tests.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(SAMPLES / "rules.yml")], "tests": tests}))
    done = subprocess.run([checker, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
