"""Only reading, only this machine, only with the token."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from dashboards import Dashboard, serving

# One browser and one server for all of them, on one worker.
pytestmark = pytest.mark.xdist_group("browser")

API = "/api/series?runs=000000000000"


def host(dashboard: Dashboard) -> str:
    return f"127.0.0.1:{dashboard.port}"


def test_token_is_exchanged_for_a_cookie_that_scripts_cannot_read(looked_at: Dashboard) -> None:
    status, headers, body = looked_at.get("/" + looked_at.url.rpartition("/")[2])
    assert status == 200
    assert b"<main" in body
    assert {"HttpOnly", "SameSite=Strict"} <= set(headers["set-cookie"].split("; "))
    assert looked_at.get(API, Cookie=looked_at.cookie())[0] == 200


@pytest.mark.parametrize("path", ["/", "/?token=", "/?token=wrong", API, "/runs/x/report"])
def test_without_the_token_nothing_is_told(path: str, looked_at: Dashboard) -> None:
    status, headers, body = looked_at.get(path, Cookie=f"stayfinite-{looked_at.port}=guess")
    assert status == 403
    assert "set-cookie" not in headers
    assert b"first" not in body


def test_token_opens_the_page_alone(looked_at: Dashboard) -> None:
    assert looked_at.get(f"{API}&{looked_at.url.rpartition('?')[2]}")[0] == 403


@pytest.mark.parametrize(
    "name", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::2]"]
)
def test_other_names_are_refused(name: str, looked_at: Dashboard) -> None:
    assert looked_at.get(API, Host=name, Cookie=looked_at.cookie())[0] == 421


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:80"])
def test_names_of_this_machine_are_served_behind_any_tunnel(
    name: str, looked_at: Dashboard
) -> None:
    assert looked_at.get(API, Host=name, Cookie=looked_at.cookie())[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(method: str, looked_at: Dashboard) -> None:
    assert looked_at.get("/", method=method, Cookie=looked_at.cookie())[0] == 405


def test_other_sites_cannot_read(looked_at: Dashboard) -> None:
    sent = {"Cookie": looked_at.cookie(), "Origin": "http://evil.example"}
    _, headers, _ = looked_at.get(API, **sent)
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert looked_at.get(API, **sent, **{"Sec-Fetch-Site": "cross-site"})[0] == 403


def test_policy_allows_no_script_in_the_page(looked_at: Dashboard) -> None:
    _, headers, body = looked_at.get("/", Cookie=looked_at.cookie())
    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'" in policy
    assert "unsafe" not in policy
    assert b"<script>" not in body
    assert b" style=" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../server.py",
        "/assets/..%2fserver.py",
        "/assets/%2e%2e/%2e%2e/store/reading.py",
        "/assets//etc/passwd",
        "/assets/..\\..\\server.py",
        "/runs/..%2f..%2fetc/report",
        "/runs/%2fetc/report",
        "/api/incident?run=../../etc&number=0",
        "/api/layer?run=/etc&name=x",
        "/api/heat?run=..",
    ],
)
def test_no_path_leads_out(path: str, looked_at: Dashboard) -> None:
    assert looked_at.get(path, Cookie=looked_at.cookie())[0] == 404


@pytest.mark.parametrize(
    "words",
    ["points=-5", "points=1e9", "first=9&last=1", "first=x", "optimizer=99", "last=" + "9" * 15],
)
def test_odd_questions_are_answered(words: str, looked_at: Dashboard) -> None:
    status, _, body = looked_at.get(f"{API}&{words}", Cookie=looked_at.cookie())
    assert status == 200
    json.loads(body)


def test_key_is_for_this_user_alone_and_outlives_the_server(tmp_path: Path, state: Path) -> None:
    with serving(tmp_path, state) as dashboard:
        first, cookie = dashboard.url, dashboard.cookie()
        key = state / "stayfinite" / "ui-key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        dashboard.stop()
        dashboard.start()
        assert dashboard.url != first
        assert dashboard.get(API, Cookie=cookie)[0] == 200
        assert dashboard.get("/?" + first.rpartition("?")[2])[0] == 403
