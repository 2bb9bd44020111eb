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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stayfinite.errors import ConfigError, PackageError, RecordError
from stayfinite.report.dashboard import views
from stayfinite.report.dashboard.live_runs import RunIndex
from stayfinite.report.terminal import as_text

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

_ASSETS = Path(__file__).with_name("assets")
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

    assets = _assets()

    def nothing() -> Response:
        return PlainTextResponse("stayfinite: there is nothing here\n", status_code=404)

    def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in assets:
            return nothing()
        kind = _KINDS.get(Path(name).suffix, "text/plain")
        return Response(assets[name], media_type=f"{kind}; charset=utf-8")

    async def events(request: Request) -> Response:
        stream = _events(index, views.ids_in(request.query_params), is_ending)
        return StreamingResponse(stream, media_type="text/event-stream")

    def data_from(view: views.View) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            found = view(index, request.query_params)
            if found is None:
                return nothing()
            return Response(views.as_json(found), media_type="application/json")

        return answer

    def report(request: Request) -> Response:
        """The whole report; of a very long run, which would take much memory, the incidents."""
        run = index.known(request.path_params["run"])
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
    paths |= {f"/api/{name}": data_from(view) for name, view in views.VIEWS.items()}
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


def _assets() -> dict[str, bytes]:
    """Name and content of every file of the page: nothing else can be asked for."""
    files = [path for path in _ASSETS.rglob("*") if path.is_file()]
    return {path.relative_to(_ASSETS).as_posix(): path.read_bytes() for path in files}


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
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        token = request.query_params.get("token", "")
        has_token = scope["path"] == "/" and _is_same(token, self._token)
        status, text = self._refusal(request, has_token)
        extra = dict(HEADERS)
        if has_token and not text:
            extra["Set-Cookie"] = f"{self._name}={self._cookie}; HttpOnly; SameSite=Strict; Path=/"

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in extra.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = PlainTextResponse(f"stayfinite: {text}\n", status_code=status)
        await (refusal if text else self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request, has_token: bool) -> tuple[int, str]:
        """Status and reason; the reason is empty when all is well."""
        given = request.headers.get("host", "")
        # The name without the port, which may be another behind a tunnel.
        host, colon, port = given.rpartition(":")
        host = host if colon and port.isdigit() else given
        if request.method not in ("GET", "HEAD"):
            return 405, "This page only shows; it takes no changes."
        if host.lower() not in LOOPBACK:
            return 421, "This page answers to localhost only."
        if request.headers.get("sec-fetch-site") == "cross-site" and not has_token:
            return 403, "Another site may not read this page."
        is_free = has_token or request.scope["path"].startswith("/assets/")
        if not is_free and not _is_same(request.cookies.get(self._name, ""), self._cookie):
            reason = "Open the address that `stayfinite ui` printed: it has the token of this page."
            return 403, reason
        return 200, ""


def _is_same(sent: str, known: str) -> bool:
    """Compared in a time that tells nothing."""
    return hmac.compare_digest(sent.encode(), known.encode())


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
