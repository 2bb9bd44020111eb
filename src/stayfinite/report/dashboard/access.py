"""Who may see the page: the person at this machine who was given its address, and nobody else."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class Access:
    """Stands before the app: only reading, only this machine's names, only with the token.

    The token of the address is exchanged for a cookie. The cookie stays good when the server is
    started again on its port, so that a page that is open finds its way back.
    """

    def __init__(self, app: App, *, token: str, secret: bytes, port: int) -> None:
        self._app, self._token = app, token
        self._name = f"stayfinite-{port}"
        self._cookie = hmac.new(secret, self._name.encode(), hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal:
            await _answer(send, *refusal)
            return
        cookie = f"{self._name}={self._cookie}; HttpOnly; SameSite=Strict; Path=/"
        extra = {"Set-Cookie": cookie} if self._has_token(scope) else {}
        await self._app(scope, receive, _adding(send, {**HEADERS, **extra}))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This page only shows; it takes no changes."
        if _host(headers.get("host", "")) not in LOOPBACK:
            return 421, "This page answers to localhost only."
        if headers.get("sec-fetch-site", "none") == "cross-site" and not self._has_token(scope):
            return 403, "Another site may not read this page."
        if scope["path"].startswith("/assets/") or self._has_token(scope):
            return None
        if hmac.compare_digest(self._sent(headers.get("cookie", "")), self._cookie):
            return None
        return 403, "Open the address that `stayfinite ui` printed: it has the token of this page."

    def _has_token(self, scope: Scope) -> bool:
        sent = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return scope["path"] == "/" and hmac.compare_digest(sent.encode(), self._token.encode())

    def _sent(self, header: str) -> str:
        try:
            found = SimpleCookie(header).get(self._name)
        except CookieError:
            return ""
        return found.value if found and found.value.isascii() else ""


def _host(header: str) -> str:
    """The name without the port, which may be another behind a tunnel."""
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdigit() else header).lower()


def _adding(send: Any, extra: dict[str, str]) -> Any:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", [])}
            message["headers"] = [*message.get("headers", [])] + [
                (name.lower().encode(), value.encode())
                for name, value in extra.items()
                if name.lower().encode() not in present
            ]
        await send(message)

    return sending


async def _answer(send: Any, status: int, text: str) -> None:
    body = f"stayfinite: {text}\n".encode()
    headers = {**HEADERS, "Content-Type": "text/plain; charset=utf-8"}
    lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    lines.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


def kept_secret() -> bytes:
    """The key that cookies are made with: made once and kept for this user alone.

    Where it cannot be kept, it is new, and a page must be opened again after a restart.
    """
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(base) / "stayfinite" / "ui-key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path) or secrets.token_bytes(32)
    except (OSError, RuntimeError):
        return secrets.token_bytes(32)
    with open(file, "wb") as out:
        key = secrets.token_bytes(32)
        out.write(key)
    return key


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes()
    except OSError:
        return b""
    return key if len(key) == 32 else b""
