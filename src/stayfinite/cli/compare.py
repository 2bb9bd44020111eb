"""`stayfinite compare`: two recorded runs side by side."""

from __future__ import annotations

from pathlib import Path

import click

from stayfinite.cli._common import run_at


@click.command("compare")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
def command(before: Path, after: Path, as_json: bool) -> None:
    """Compare two recorded runs, such as one before and one after a fix.

    BEFORE and AFTER are run directories, or names of runs in stayfinite-runs, as `stayfinite list`
    prints them. Shows bad and skipped steps, gradient norms, losses and speed of both, and what is
    different in options, versions and code.
    """
    from stayfinite.records import to_json
    from stayfinite.report.run_summary import compare

    found = compare(run_at(before), run_at(after))
    if as_json:
        click.echo(to_json(found, indent=1))
        return
    from stayfinite.report.run_tables import as_comparison, console

    console().print(as_comparison(found))
