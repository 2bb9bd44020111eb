"""The dashboard's server: a page, its data, and a stream that says when there is more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stayfinite.errors import RecordError
from stayfinite.report.dashboard import views
from stayfinite.report.dashboard.comparing import compare_view
from stayfinite.report.dashboard.incidents import incident_view, incidents_view
from stayfinite.report.dashboard.shelf import Shelf

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
    shelf: Shelf,
    *,
    report_of: Callable[[Path], str] | None = None,
    is_ending: Callable[[], bool] = lambda: False,
) -> Starlette:
    """The app without its guard, which is `Access`.

    `report_of` gives the report of a run as a page, `is_ending` ends the streams.
    """
    from starlette.applications import Starlette
    from starlette.routing import Route

    pages = _Pages(shelf, report_of, is_ending)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        shelf.start()
        yield
        await asyncio.to_thread(shelf.stop)

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
        shelf: Shelf,
        report_of: Callable[[Path], str] | None,
        is_ending: Callable[[], bool],
    ) -> None:
        self._shelf, self._report_of, self._is_ending = shelf, report_of, is_ending
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
                self._shelf.open(identity)
            now = views.as_json(views.shelf_view(self._shelf))
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
            views.chosen(self._shelf, _ids(request)),
            first=_number(request, "first"),
            last=_number(request, "last"),
            points=_number(request, "points") or 800,
            optimizer=_number(request, "optimizer"),
        )
        return _json(view)

    def heat(self, request: Request) -> Response:
        run = self._shelf.open(request.query_params.get("run", ""))
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
        run = self._shelf.open(request.query_params.get("run", ""))
        name = request.query_params.get("name", "")
        found = run and views.layer_view(run, name, _number(request, "optimizer"))
        return _json(found) if found else _nothing()

    def incidents(self, request: Request) -> Response:
        runs = views.glanced(self._shelf, _ids(request))
        view = {"incidents": incidents_view(runs), "forecasts": views.forecasts_view(runs)}
        return _json(view)

    def incident(self, request: Request) -> Response:
        runs = views.glanced(self._shelf, [request.query_params.get("run", "")])
        number = _number(request, "number")
        chosen = -1 if number is None else number
        found = next((incident_view(run, chosen) for run in runs.values()), None)
        return _json(found) if found else _nothing()

    def compare(self, request: Request) -> Response:
        runs = views.chosen(self._shelf, _ids(request))
        return _json(compare_view(runs))

    def report(self, request: Request) -> Response:
        """The whole report; of a very long run, which would take much memory, the incidents."""
        from starlette.responses import HTMLResponse, PlainTextResponse

        from stayfinite.report.terminal import as_text

        runs = views.glanced(self._shelf, [request.path_params["run"]])
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
