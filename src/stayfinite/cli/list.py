"""`stayfinite list`: the recorded runs in a folder."""

from __future__ import annotations

from pathlib import Path

import click

from stayfinite.cli._common import PATH, refusing
from stayfinite.errors import RecordError
from stayfinite.records import to_json


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.argument("folder", required=False, type=PATH)
def command(folder: Path | None, as_json: bool) -> None:
    """List recorded runs, newest first.

    FOLDER is where they are; without it, stayfinite-runs.
    """
    from stayfinite.report.run_summary import summary_of
    from stayfinite.report.store.reading import read_run, runs_in
    from stayfinite.report.store.writer import RUNS

    place = Path(RUNS) if folder is None else folder
    with refusing(RecordError):
        found = [summary_of(read_run(path)) for path in runs_in(place)]
    if as_json:
        fields = ("path", "started", "script", "steps", "incidents", "exit")
        entries = [{name: getattr(each, name) for name in fields} for each in found]
        for entry in entries:
            entry["incidents"] = len(entry["incidents"])
        click.echo(to_json(entries, indent=1))
    elif found:
        from stayfinite.report.run_tables import as_list, console

        console().print(as_list(found))
    else:
        click.echo(f"There is no recorded run in {place}.")
