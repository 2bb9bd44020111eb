"""`stayfinite ui` refuses in one line, and its page is in the wheel."""

from __future__ import annotations

import socket
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from stayfinite.cli import main
from stayfinite.report.dashboard import server
from stayfinite.report.dashboard.server import _assets


def refused(*words: str) -> str:
    result = CliRunner().invoke(main, ["ui", "--no-open", *words])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    return result.output


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "nothing: there is no such directory." in refused(str(tmp_path / "nothing"))


def test_missing_package_is_told_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(server.metadata, "version", version)
    assert "starlette is not installed: pip install 'stayfinite[ui]'" in refused(str(tmp_path))


def test_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the ui extra is not installed")
    pytest.importorskip("starlette", reason="the ui extra is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} cannot be used" in refused(str(tmp_path), "--port", str(port))


def test_every_part_of_the_page_is_there_with_the_license_of_what_is_not_ours() -> None:
    found = _assets()
    assert {"index.html", "main.js", "style.css", "vendor/uplot/LICENSE"} <= set(found)
    page = found["index.html"].decode()
    named = [part.partition('"')[0] for part in page.split('"/assets/')[1:]]
    assert named
    assert set(named) <= set(found)


def test_page_asks_nobody_else() -> None:
    ours = {name: data for name, data in _assets().items() if not name.startswith("vendor/")}
    outside = [name for name, data in ours.items() if b"https://" in data or b"innerHTML" in data]
    assert outside == []
