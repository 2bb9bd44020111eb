"""`stayfinite compare`: two recorded runs side by side."""

from __future__ import annotations

from pathlib import Path

import click

from stayfinite.cli._common import PATH, json_option, run_at
from stayfinite.records import to_json


@click.command("compare")
@json_option
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
def command(before: Path, after: Path, as_json: bool) -> None:
    """Compare two recorded runs, such as one before and one after a fix.

    BEFORE and AFTER are run directories, or names of runs in stayfinite-runs, as `stayfinite list`
    prints them. Shows bad and skipped steps, gradient norms, losses and speed of both, and what is
    different in options, versions and code.
    """
    from stayfinite.report.run_summary import compare

    found = compare(run_at(before), run_at(after))
    if as_json:
        click.echo(to_json(found, indent=1))
        return
    from stayfinite.report.run_tables import as_comparison, console

    console().print(as_comparison(found))
