"""A real dashboard server in a process of its own, and a page that keeps what goes wrong in it."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import stayfinite

PATIENCE = 60.0  # seconds; nothing waits so long unless it is broken


@dataclass
class Dashboard:
    """The server; `url` has the token."""

    folder: Path
    state: Path
    port: int
    url: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        source = str(Path(stayfinite.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source, "XDG_STATE_HOME": str(self.state)}
        words = ["ui", str(self.folder), "--no-open", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stayfinite", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
        """Status, headers and body; the path is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def cookie(self) -> str:
        """What the token is exchanged for."""
        _, headers, _ = self.get(f"/?{urlsplit(self.url).query}")
        return str(headers["set-cookie"]).partition(";")[0]


@contextmanager
def serving(folder: Path, state: Path) -> Iterator[Dashboard]:
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package, reason="the ui extra is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dashboard = Dashboard(folder, state, port)
    dashboard.start()
    try:
        yield dashboard
    finally:
        dashboard.stop()


@dataclass
class Viewer:
    """A page of the dashboard; `faults` has console errors and requests to elsewhere."""

    page: Any
    faults: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait for something on the page; the page's own rules forbid waiting inside it."""
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, f"{what}: never seen"
            self.page.wait_for_timeout(50)

    def until_painted(self) -> None:
        self.page.wait_for_selector("html[data-painted]", timeout=PATIENCE * 1000)
        self.until(lambda: self.steps() > 0, "curves")

    def steps(self) -> int:
        return int(self.page.evaluate("+(document.documentElement.dataset.painted ?? 0)"))

    def until_heat(self) -> None:
        self.page.wait_for_selector("#heat .heat-stage canvas", timeout=PATIENCE * 1000)


@contextmanager
def viewing(chromium: Any, dashboard: Dashboard, **context: Any) -> Iterator[Viewer]:
    """A page that must stay without fault, less the requests while the server is away."""
    opened = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    viewer = Viewer(opened.new_page())
    host = f"http://127.0.0.1:{dashboard.port}/"

    def heard(message: Any) -> None:
        is_away = "ERR_CONNECTION_REFUSED" in message.text or "ERR_INCOMPLETE" in message.text
        if message.type in ("error", "warning") and not is_away:
            viewer.faults.append(message.text)

    def asked(request: Any) -> None:
        if not request.url.startswith((host, "data:")):
            viewer.faults.append(f"asked {request.url}")

    viewer.page.on("console", heard)
    viewer.page.on("pageerror", lambda error: viewer.faults.append(str(error)))
    viewer.page.on("dialog", lambda dialog: (viewer.faults.append("a dialog"), dialog.dismiss()))
    viewer.page.on("request", asked)
    viewer.page.goto(dashboard.url)
    try:
        yield viewer
        assert viewer.faults == []
    finally:
        opened.close()
