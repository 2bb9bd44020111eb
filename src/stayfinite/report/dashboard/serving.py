"""Starts the server of the dashboard on this machine."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from stayfinite.errors import ConfigError, PackageError
from stayfinite.report.dashboard.access import Access, kept_secret
from stayfinite.report.dashboard.server import make_app
from stayfinite.report.dashboard.shelf import Shelf

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
    shelf = Shelf([place.absolute() for place in places])
    server: uvicorn.Server
    app = make_app(shelf, report_of=report_of, is_ending=lambda: server.should_exit)
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
