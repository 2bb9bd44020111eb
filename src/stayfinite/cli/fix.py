"""`stayfinite fix`: the change that cures a recorded run, shown or written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stayfinite.cli._common import Refused, refusing, run_argument, run_at
from stayfinite.errors import PatchError
from stayfinite.text import plain, source_line, visible

if TYPE_CHECKING:
    from stayfinite.records import Diagnosis, Incident
    from stayfinite.report.store.reading import Run

_VERIFIED = "With this change"


@click.command("fix")
@click.option("--write", is_flag=True, help="Change the file, after asking; the old one is kept.")
@click.option("--yes", is_flag=True, help="With --write: do not ask.")
@run_argument
def command(run: Path | None, write: bool, yes: bool) -> None:
    """Show the change of the source that was tried and seen to cure a run, or write it.

    RUN is a run directory, or the name of one in stayfinite-runs; without it, the newest.
    """
    found = run_at(run)
    incident, diagnosis, patch = _patched(found)
    _show(incident, diagnosis, patch)
    if not write:
        click.echo(f"\nTo make this change: stayfinite fix --write {found.path}")
        return
    try:
        with refusing(doing="changed"):
            _write(found, patch, ask=not yes)
    except PatchError as error:
        raise Refused(f"nothing was changed: {error}") from error


def _patched(run: Run) -> tuple[Incident, Diagnosis, str]:
    """The first incident with a patch; else a refusal that says what there is instead."""
    for incident in run.incidents:
        if incident.diagnosis is not None and incident.diagnosis.patch:
            return incident, incident.diagnosis, incident.diagnosis.patch
    if not run.incidents:
        raise Refused(f"{run.path} has no incident, so there is nothing to fix (it is {run.exit}).")
    first = run.incidents[0]
    if run.result is None:
        why = f"{run.path} has no result.json, which `stayfinite run` writes at its end"
    elif first.origin is None or first.origin.file is None:
        why = "it is not known which line of the source it began on"
    else:
        why = "no change of the source was tried and seen to hold"
    words = f" In words: {plain(first.diagnosis.fix)}" if first.diagnosis else ""
    raise Refused(f"there is no patch: {why}.{words}")


def _show(incident: Incident, diagnosis: Diagnosis, patch: str) -> None:
    from rich.text import Text

    from stayfinite.report.run_tables import console

    place = source_line(incident.origin)
    where = f"{place}, step {incident.step}" if place else f"step {incident.step}"
    shown = Text(plain(f"{where}: {diagnosis.cause}") + "\n\n")
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in patch.rstrip("\n").split("\n"):
        style = "bold" if line.startswith(("--- ", "+++ ")) else styles.get(line[:1], "")
        shown.append("".join(map(visible, line)) + "\n", style=style)
    proof = [text for text in diagnosis.evidence if text.startswith(_VERIFIED)]
    for text in proof or diagnosis.evidence:
        shown.append(f"\n{plain(text)}")
    console().print(shown, soft_wrap=True)


def _write(run: Run, patch: str, *, ask: bool) -> None:
    from stayfinite.files import keep_copy, replace_file
    from stayfinite.patch.edit import apply, parse

    diff = parse(patch)
    path = _inside(run, diff.name)
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = apply(diff, file.read())
    except UnicodeDecodeError as error:
        raise PatchError(f"{path} is not UTF-8.") from error
    if ask and not click.confirm(f"\nChange {path}?"):
        click.echo("Nothing was changed.")
        return
    copy = keep_copy(path)
    replace_file(path, text, is_durable=True)
    click.echo(f"{path} is changed; the old text is in {copy}.")


def _inside(run: Run, name: str) -> Path:
    """The file of that name in the project, which is the folder of the script."""
    given = run.info.config.get("folder") or str(Path(run.info.script).parent)
    folder = Path(str(given)).resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder):
        raise PatchError(f"{path} is outside the project, {folder}.")
    if not path.is_file():
        raise PatchError(f"{path} is not there, or is no file.")
    return path
