"""`stayfinite ui`: runs on a page, while they train."""

from __future__ import annotations

from pathlib import Path

import click

from stayfinite.cli._common import PATH, Refused, refusing
from stayfinite.errors import ConfigError, PackageError


@click.command("ui")
@click.argument("run_dirs", metavar="[RUN_DIR]...", nargs=-1, type=PATH)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="The port to listen on, 0 for any; by default the first free one from 8642.",
)
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
def command(run_dirs: tuple[Path, ...], port: int | None, no_open: bool) -> None:
    """Show runs on a page in the browser, live while they train.

    RUN_DIR is a run directory, or a folder with several; by default stayfinite-runs. The page is
    served on this machine only, and only to whoever has the address that is printed. Nothing can
    be changed there. Ctrl-C ends it.
    """
    from stayfinite.report.dashboard.server import serve
    from stayfinite.report.store.writer import RUNS

    missing = [str(path) for path in run_dirs if not path.is_dir()]
    if missing:
        raise Refused(f"{', '.join(missing)}: there is no such directory.")
    places = run_dirs or [Path(RUNS)]
    try:
        with refusing(ConfigError, PackageError):
            serve(places, port=port, report_of=_report_of, tell=_tell, opens_browser=not no_open)
    except KeyboardInterrupt:
        click.echo("stayfinite ui: ended.", err=True)


def _report_of(path: Path) -> str:
    from stayfinite.recover.advice import recommended
    from stayfinite.report.html.page import page_of
    from stayfinite.report.store.reading import read_run

    run = read_run(path)
    return page_of(run, advice=recommended(run))


def _tell(address: str) -> None:
    click.echo(f"stayfinite ui: {address}")
    click.echo("stayfinite ui: Ctrl-C ends it.", err=True)
