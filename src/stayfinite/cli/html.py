"""`stayfinite html`: a recorded run as one file that can be mailed."""

from __future__ import annotations

from pathlib import Path

import click

from stayfinite.cli._common import refusing, run_argument, run_at


@click.command("html")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; RUN/report.html by default, - for stdout.",
)
@click.option("--no-source", is_flag=True, help="Leave out all code and all paths of source.")
@run_argument
def command(run: Path | None, output: Path | None, no_source: bool) -> None:
    """Write a report of a recorded run: one HTML file that needs nothing else.

    RUN is a run directory, or the name of one in stayfinite-runs; without it, the newest.
    """
    from stayfinite.recover.advice import recommended
    from stayfinite.report.html.page import page_of

    found = run_at(run)
    page = page_of(found, advice=recommended(found), with_source=not no_source)
    if output == Path("-"):
        click.echo(page, nl=False)
        return
    file = output or found.path / "report.html"
    with refusing(doing="written", file=file):
        file.write_text(page, encoding="utf-8")
    click.echo(file)
