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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from stayfinite.errors import ConfigError, PackageError, RecordError
from stayfinite.report.dashboard import views
from stayfinite.report.dashboard.live_runs import RunIndex
from stayfinite.report.terminal import as_text

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

Query = Mapping[str, str]


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

    `report_of` gives the report of a run as a page, `is_ending` ends the streams. What is not
    `async` here runs in threads.
    """
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    assets = dict(_assets())

    def nothing() -> Response:
        return PlainTextResponse("stayfinite: there is nothing here\n", status_code=404)

    def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in assets:
            return nothing()
        kind = _KINDS.get(Path(name).suffix, "text/plain")
        return Response(assets[name], media_type=f"{kind}; charset=utf-8")

    async def events(request: Request) -> Response:
        stream = _events(index, _ids(request.query_params), is_ending)
        return StreamingResponse(stream, media_type="text/event-stream")

    def data_from(view: Callable[[RunIndex, Query], Any]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            found = view(index, request.query_params)
            if found is None:
                return nothing()
            return Response(views.as_json(found), media_type="application/json")

        return answer

    def report(request: Request) -> Response:
        """The whole report; of a very long run, which would take much memory, the incidents."""
        run = views.known_run(index, request.path_params["run"])
        if run is None:
            return nothing()
        if report_of is not None and run.steps <= _MOST_REPORTED:
            with contextlib.suppress(RecordError):
                page = report_of(run.path)
                return HTMLResponse(page, headers={"Content-Security-Policy": _REPORT_POLICY})
        texts = [as_text(incident, verbose=True) for incident in run.incidents]
        return PlainTextResponse("\n\n".join(texts) or "No incident was recorded.\n")

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        index.start()
        yield
        await asyncio.to_thread(index.stop)

    paths: dict[str, Any] = {"/": file, "/assets/{name:path}": file, "/api/events": events}
    paths |= {f"/api/{name}": data_from(view) for name, view in _DATA.items()}
    paths["/runs/{run}/report"] = report
    routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in paths.items()]
    return Starlette(routes=routes, lifespan=lifespan)


async def _events(
    index: RunIndex, opened: list[str], is_ending: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """The list of runs, again whenever it has changed."""
    said, silent = b"", 0.0
    while not is_ending():
        for identity in opened:
            index.open(identity)
        now = views.as_json(views.runs_view(index))
        silent = 0.0 if now != said else silent + _TICK
        if now != said:
            said = now
            yield b"event: runs\ndata: " + now + b"\n\n"
        elif silent > _ALIVE:
            silent = 0.0
            yield b": here\n\n"
        await asyncio.sleep(_TICK)


def _series(index: RunIndex, query: Query) -> Any:
    return views.series_view(
        views.opened_runs(index, _ids(query)),
        first=_number(query, "first"),
        last=_number(query, "last"),
        points=_number(query, "points") or 800,
        optimizer=_number(query, "optimizer"),
    )


def _heat(index: RunIndex, query: Query) -> Any:
    run = index.open(query.get("run", ""))
    first, last = _number(query, "first"), _number(query, "last")
    return run and views.heat_view(
        run,
        kind=query.get("kind", "norm"),
        first=0 if first is None else first,
        last=1 << 62 if last is None else last,
        optimizer=_number(query, "optimizer"),
    )


def _layer(index: RunIndex, query: Query) -> Any:
    run = index.open(query.get("run", ""))
    return run and views.layer_view(run, query.get("name", ""), _number(query, "optimizer"))


def _incidents(index: RunIndex, query: Query) -> Any:
    found = {identity: views.known_run(index, identity) for identity in _ids(query)}
    return {"incidents": views.incidents_view({id_: run for id_, run in found.items() if run})}


def _incident(index: RunIndex, query: Query) -> Any:
    run, number = views.known_run(index, query.get("run", "")), _number(query, "number")
    return None if run is None or number is None else views.incident_view(run, number)


def _compare(index: RunIndex, query: Query) -> Any:
    return views.compare_view(views.opened_runs(index, _ids(query)))


_DATA: dict[str, Callable[[RunIndex, Query], Any]] = {
    "series": _series,
    "heat": _heat,
    "layer": _layer,
    "incidents": _incidents,
    "incident": _incident,
    "compare": _compare,
}


def _assets() -> Iterator[tuple[str, bytes]]:
    """Name and content of every file of the page: nothing else can be asked for."""
    waiting = [("", resources.files("stayfinite.report.dashboard") / "assets")]
    while waiting:
        prefix, folder = waiting.pop()
        for each in folder.iterdir():
            if each.is_dir():
                waiting.append((f"{prefix}{each.name}/", each))
            else:
                yield f"{prefix}{each.name}", each.read_bytes()


def _ids(query: Query) -> list[str]:
    return [each for each in query.get("runs", "").split(",") if each][:16]


def _number(query: Query, name: str) -> int | None:
    text = query.get(name, "")
    is_number = text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 16
    return int(text) if is_number else None


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

Scope = dict[str, Any]
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
        if refusal is not None:
            status, text = refusal
            body = f"stayfinite: {text}\n".encode()
            kinds = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
            headers = [(k.lower().encode(), v.encode()) for k, v in {**HEADERS, **kinds}.items()]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        cookie = f"{self._name}={self._cookie}; HttpOnly; SameSite=Strict; Path=/"
        extra = {**HEADERS, "Set-Cookie": cookie} if self._has_token(scope) else HEADERS

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", []))
                present = {name.lower() for name, _ in given}
                ours = [(name.lower().encode(), value.encode()) for name, value in extra.items()]
                message["headers"] = given + [each for each in ours if each[0] not in present]
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        # The name without the port, which may be another behind a tunnel.
        host, colon, port = headers.get("host", "").rpartition(":")
        host = host if colon and port.isdigit() else headers.get("host", "")
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This page only shows; it takes no changes."
        if host.lower() not in LOOPBACK:
            return 421, "This page answers to localhost only."
        if headers.get("sec-fetch-site", "none") == "cross-site" and not self._has_token(scope):
            return 403, "Another site may not read this page."
        if scope["path"].startswith("/assets/") or self._has_token(scope):
            return None
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._name)
        except CookieError:
            found = None
        sent = found.value if found and found.value.isascii() else ""
        if hmac.compare_digest(sent, self._cookie):
            return None
        return 403, "Open the address that `stayfinite ui` printed: it has the token of this page."

    def _has_token(self, scope: Scope) -> bool:
        sent = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return scope["path"] == "/" and hmac.compare_digest(sent.encode(), self._token.encode())


def kept_secret() -> bytes:
    """The key that cookies are made with: made once and kept for this user alone.

    Where it cannot be kept, it is new, and a page must be opened again after a restart.
    """
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path, key = Path(base) / "stayfinite" / "ui-key", secrets.token_bytes(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(key)
    except FileExistsError:
        with contextlib.suppress(OSError):
            kept = path.read_bytes()
            return kept if len(kept) == 32 else key
    except (OSError, RuntimeError):
        return key
    return key
