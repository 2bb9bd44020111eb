"""`stayfinite show`: a recorded run in the terminal."""

from __future__ import annotations

from pathlib import Path

import click

from stayfinite.cli._common import json_option, run_argument, run_at
from stayfinite.records import to_json


@click.command("show")
@json_option
@run_argument
def command(run: Path | None, as_json: bool) -> None:
    """Show a recorded run: bad and skipped steps, incidents, losses, norms, the worst layers.

    RUN is a run directory, or the name of one in stayfinite-runs; without it, the newest.
    """
    from stayfinite.report.run_summary import summary_of

    summary = summary_of(run_at(run))
    if as_json:
        click.echo(to_json(summary, indent=1))
        return
    from stayfinite.report.run_tables import as_summary, console

    console().print(as_summary(summary))
