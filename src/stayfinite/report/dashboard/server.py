"""The dashboard's server on this machine, and who may see its page."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from http.cookies import CookieError, SimpleCookie
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from stayfinite.errors import ConfigError, PackageError, RecordError
from stayfinite.report.dashboard import views
from stayfinite.report.dashboard.live_runs import RunIndex
from stayfinite.report.dashboard.views import compare_view, incident_view, incidents_view

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


_TICK = 0.2  # seconds between two looks at what is new
_ALIVE = 10.0  # seconds after which a silent stream says that it is there

_MOST_REPORTED = 200_000  # steps
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; sandbox allow-popups"
)

_KINDS = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def make_app(
    index: RunIndex,
    *,
    report_of: Callable[[Path], str] | None = None,
    is_ending: Callable[[], bool] = lambda: False,
) -> Starlette:
    """The app without its guard, which is `Access`.

    `report_of` gives the report of a run as a page, `is_ending` ends the streams.
    """
    from starlette.applications import Starlette
    from starlette.routing import Route

    pages = _Pages(index, report_of, is_ending)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        index.start()
        yield
        await asyncio.to_thread(index.stop)

    paths = {
        "/": pages.page,
        "/assets/{name:path}": pages.asset,
        "/api/events": pages.events,
        "/api/series": pages.series,
        "/api/heat": pages.heat,
        "/api/layer": pages.layer,
        "/api/incidents": pages.incidents,
        "/api/incident": pages.incident,
        "/api/compare": pages.compare,
        "/runs/{run}/report": pages.report,
    }
    routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in paths.items()]
    return Starlette(routes=routes, lifespan=lifespan)


class _Pages:
    """One method for each address. Those that are not `async` run in threads."""

    def __init__(
        self,
        index: RunIndex,
        report_of: Callable[[Path], str] | None,
        is_ending: Callable[[], bool],
    ) -> None:
        self._index, self._report_of, self._is_ending = index, report_of, is_ending
        self._assets = dict(_assets())

    def page(self, request: Request) -> Response:
        return self._file("index.html")

    def asset(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    async def events(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        return StreamingResponse(self._stream(_ids(request)), media_type="text/event-stream")

    async def _stream(self, opened: list[str]) -> AsyncIterator[bytes]:
        """The list of runs, again whenever it has changed."""
        said, silent = b"", 0.0
        while not self._is_ending():
            for identity in opened:
                self._index.open(identity)
            now = views.as_json(views.runs_view(self._index))
            silent = 0.0 if now != said else silent + _TICK
            if now != said:
                said = now
                yield b"event: runs\ndata: " + now + b"\n\n"
            elif silent > _ALIVE:
                silent = 0.0
                yield b": here\n\n"
            await asyncio.sleep(_TICK)

    def series(self, request: Request) -> Response:
        view = views.series_view(
            views.opened_runs(self._index, _ids(request)),
            first=_number(request, "first"),
            last=_number(request, "last"),
            points=_number(request, "points") or 800,
            optimizer=_number(request, "optimizer"),
        )
        return _json(view)

    def heat(self, request: Request) -> Response:
        run = self._index.open(request.query_params.get("run", ""))
        if run is None:
            return _nothing()
        first, last = _number(request, "first"), _number(request, "last")
        view = views.heat_view(
            run,
            kind=request.query_params.get("kind", "norm"),
            first=0 if first is None else first,
            last=1 << 62 if last is None else last,
            optimizer=_number(request, "optimizer"),
        )
        return _json(view)

    def layer(self, request: Request) -> Response:
        run = self._index.open(request.query_params.get("run", ""))
        name = request.query_params.get("name", "")
        found = run and views.layer_view(run, name, _number(request, "optimizer"))
        return _json(found) if found else _nothing()

    def incidents(self, request: Request) -> Response:
        runs = views.known_runs(self._index, _ids(request))
        return _json({"incidents": incidents_view(runs)})

    def incident(self, request: Request) -> Response:
        runs = views.known_runs(self._index, [request.query_params.get("run", "")])
        number = _number(request, "number")
        chosen = -1 if number is None else number
        found = next((incident_view(run, chosen) for run in runs.values()), None)
        return _json(found) if found else _nothing()

    def compare(self, request: Request) -> Response:
        runs = views.opened_runs(self._index, _ids(request))
        return _json(compare_view(runs))

    def report(self, request: Request) -> Response:
        """The whole report; of a very long run, which would take much memory, the incidents."""
        from starlette.responses import HTMLResponse, PlainTextResponse

        from stayfinite.report.terminal import as_text

        runs = views.known_runs(self._index, [request.path_params["run"]])
        if not runs:
            return _nothing()
        (run,) = runs.values()
        if self._report_of is not None and run.steps <= _MOST_REPORTED:
            with contextlib.suppress(RecordError):
                page = self._report_of(run.path)
                return HTMLResponse(page, headers={"Content-Security-Policy": _REPORT_POLICY})
        texts = [as_text(incident, verbose=True) for incident in run.incidents]
        return PlainTextResponse("\n\n".join(texts) or "No incident was recorded.\n")

    def _file(self, name: str) -> Response:
        from starlette.responses import Response

        found = self._assets.get(name)
        if found is None:
            return _nothing()
        kind = _KINDS.get(name[name.rfind(".") :], "text/plain")
        return Response(found, media_type=f"{kind}; charset=utf-8")


def _assets() -> Any:
    """Name and content of every file of the page: nothing else can be asked for."""
    waiting = [("", resources.files("stayfinite.report.dashboard") / "assets")]
    while waiting:
        prefix, folder = waiting.pop()
        for each in folder.iterdir():
            if each.is_dir():
                waiting.append((f"{prefix}{each.name}/", each))
            else:
                yield f"{prefix}{each.name}", each.read_bytes()


def _ids(request: Request) -> list[str]:
    return [each for each in request.query_params.get("runs", "").split(",") if each][:16]


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    is_number = text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 16
    return int(text) if is_number else None


def _json(data: Any) -> Response:
    from starlette.responses import Response

    return Response(views.as_json(data), media_type="application/json")


def _nothing() -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("stayfinite: there is nothing here\n", status_code=404)


PORT = 8642
_TRIED = 20  # ports after it, if none was asked for


def check_packages() -> None:
    """PackageError, with the command that installs them, if the server's packages are missing."""
    for package in ("starlette", "uvicorn"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            command = "pip install 'stayfinite[ui]'"
            raise PackageError(f"{package} is not installed: {command}") from None


def serve(
    places: Sequence[Path],
    *,
    port: int | None = None,
    report_of: Callable[[Path], str] | None = None,
    tell: Callable[[str], None] = print,
    opens_browser: bool = False,
) -> None:
    """Show the runs in these places until Ctrl-C; `tell` gets the address with its token."""
    check_packages()
    import uvicorn

    listening = _listen(port)
    chosen, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    index = RunIndex([place.absolute() for place in places])
    server: uvicorn.Server
    app = make_app(index, report_of=report_of, is_ending=lambda: server.should_exit)
    guarded = Access(app, token=token, secret=kept_secret(), port=chosen)
    config = uvicorn.Config(
        guarded,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        http="h11",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    address = f"http://127.0.0.1:{chosen}/?token={token}"
    tell(address)
    if opens_browser and _has_screen():
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    with listening:
        server.run(sockets=[listening])


def _listen(port: int | None) -> socket.socket:
    """A socket on the loopback interface; without a port, on the first that is free."""
    for candidate in range(PORT, PORT + _TRIED) if port is None else (port,):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if sys.platform != "win32":  # there it would let two servers share the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(("127.0.0.1", candidate))
            made.listen(64)
        except (OSError, OverflowError) as error:
            made.close()
            reason = error
            continue
        return made
    wanted = f"port {port}" if port is not None else f"ports {PORT} to {PORT + _TRIED - 1}"
    raise ConfigError(f"{wanted} cannot be used: {reason}. Choose another with --port.")


def _has_screen() -> bool:
    """Whether a browser would open before the eyes of the one who asked."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


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
