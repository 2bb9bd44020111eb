"""The commands for recorded runs: `list`, `show`, `forecast`, `compare`, `html`, `ui` and `fix`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stayfinite.cli import PATH, Refused, json_option, refuse_on, run_argument, run_at
from stayfinite.errors import ConfigError, PackageError, PatchError, RecordError
from stayfinite.records import to_json
from stayfinite.text import count, forecast_and_answer, plain, source_line, trial_of, visible

if TYPE_CHECKING:
    from stayfinite.records import Diagnosis, Incident
    from stayfinite.report.store.reading import Run


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.argument("folder", required=False, type=PATH)
def list_command(folder: Path | None, as_json: bool) -> None:
    """List recorded runs, newest first.

    FOLDER is where they are; without it, stayfinite-runs.
    """
    from stayfinite.report.run_summary import as_list, console, summary_of
    from stayfinite.report.store.reading import read_run, runs_in
    from stayfinite.report.store.writer import RUNS

    place = Path(RUNS) if folder is None else folder
    with refuse_on(RecordError):
        found = [summary_of(read_run(path)) for path in runs_in(place)]
    if as_json:
        fields = ("path", "started", "script", "steps", "incidents", "exit")
        entries = [{name: getattr(each, name) for name in fields} for each in found]
        for entry in entries:
            entry["incidents"] = len(entry["incidents"])
        click.echo(to_json(entries, indent=1))
    elif found:
        console().print(as_list(found))
    else:
        click.echo(f"There is no recorded run in {place}.")


@click.command("show")
@json_option
@run_argument
def show_command(run: Path | None, as_json: bool) -> None:
    """Show a recorded run: bad and skipped steps, incidents, losses, norms, the worst layers.

    RUN is a run directory, or the name of one in stayfinite-runs; without it, the newest.
    """
    from stayfinite.report.run_summary import as_summary, console, summary_of

    summary = summary_of(run_at(run))
    if as_json:
        click.echo(to_json(summary, indent=1))
        return
    console().print(as_summary(summary))


@click.command("compare")
@json_option
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
def compare_command(before: Path, after: Path, as_json: bool) -> None:
    """Compare two recorded runs, such as one before and one after a fix.

    BEFORE and AFTER are run directories, or names of runs in stayfinite-runs, as `stayfinite list`
    prints them. Shows bad and skipped steps, gradient norms, losses and speed of both, and what is
    different in options, versions and code.
    """
    from stayfinite.report.run_summary import as_comparison, compare, console

    found = compare(run_at(before), run_at(after))
    if as_json:
        click.echo(to_json(found, indent=1))
        return
    console().print(as_comparison(found))


@click.command("html")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; RUN/report.html by default, - for stdout.",
)
@click.option("--no-source", is_flag=True, help="Do not include code or paths of source files.")
@run_argument
def html_command(run: Path | None, output: Path | None, no_source: bool) -> None:
    """Write a report of a recorded run: one HTML file that needs nothing else.

    RUN is a run directory, or the name of one in stayfinite-runs; without it, the newest.
    """
    from stayfinite.recover.advice import recommendations_of
    from stayfinite.report.html.page import page_of

    found = run_at(run)
    page = page_of(found, advice=recommendations_of(found), with_source=not no_source)
    if output == Path("-"):
        click.echo(page, nl=False)
        return
    file = output or found.path / "report.html"
    with refuse_on(doing="written", file=file):
        file.write_text(page, encoding="utf-8")
    click.echo(file)


@click.command("ui")
@click.argument("run_dirs", metavar="[RUN_DIR]...", nargs=-1, type=PATH)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="The port to listen on, 0 for any; by default the first free one from 8642.",
)
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
def ui_command(run_dirs: tuple[Path, ...], port: int | None, no_open: bool) -> None:
    """Show runs on a page in the browser, live while they train.

    RUN_DIR is a run directory, or a folder with several; by default stayfinite-runs. The page is
    served on this machine only, and only with the address that is printed. Nothing can
    be changed there. Ctrl-C ends it.
    """
    from stayfinite.report.dashboard.server import serve
    from stayfinite.report.store.writer import RUNS

    missing = [str(path) for path in run_dirs if not path.is_dir()]
    if missing:
        raise Refused(f"{', '.join(missing)}: there is no such directory.")
    places = run_dirs or [Path(RUNS)]
    try:
        with refuse_on(ConfigError, PackageError):
            serve(places, port=port, report_of=_report_of, tell=_tell, opens_browser=not no_open)
    except KeyboardInterrupt:
        click.echo("stayfinite ui: ended.", err=True)


def _report_of(path: Path) -> str:
    from stayfinite.recover.advice import recommendations_of
    from stayfinite.report.html.page import page_of
    from stayfinite.report.store.reading import read_run

    run = read_run(path)
    return page_of(run, advice=recommendations_of(run))


def _tell(address: str) -> None:
    click.echo(f"stayfinite ui: {address}")
    click.echo("stayfinite ui: Ctrl-C ends it.", err=True)


@click.command("fix")
@click.option("--write", is_flag=True, help="Change the file, after asking; the old one is kept.")
@click.option("--yes", is_flag=True, help="With --write: do not ask.")
@run_argument
def fix_command(run: Path | None, write: bool, yes: bool) -> None:
    """Show the change of the source that was tried and seen to cure a run, or write it.

    RUN is a run directory, or the name of one in stayfinite-runs; without it, the newest.
    """
    found = run_at(run)
    incident, diagnosis, patch = _first_patch(found)
    _show(incident, diagnosis, patch)
    if not write:
        click.echo(f"\nTo make this change: stayfinite fix --write {found.path}")
        return
    try:
        with refuse_on(doing="changed"):
            _write(found, patch, ask=not yes)
    except PatchError as error:
        raise Refused(f"nothing was changed: {error}") from error


def _first_patch(run: Run) -> tuple[Incident, Diagnosis, str]:
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
        why = "the source line was not found"
    else:
        why = "no change of the source was tried and seen to hold"
    words = f" In words: {plain(first.diagnosis.fix)}" if first.diagnosis else ""
    raise Refused(f"there is no patch: {why}.{words}")


def _show(incident: Incident, diagnosis: Diagnosis, patch: str) -> None:
    from rich.text import Text

    from stayfinite.report.run_summary import console

    place = source_line(incident.origin)
    where = f"{place}, step {incident.step}" if place else f"step {incident.step}"
    shown = Text(plain(f"{where}: {diagnosis.cause}") + "\n\n")
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in patch.rstrip("\n").split("\n"):
        style = "bold" if line.startswith(("--- ", "+++ ")) else styles.get(line[:1], "")
        shown.append("".join(map(visible, line)) + "\n", style=style)
    trial = trial_of(diagnosis)
    for text in [trial] if trial else diagnosis.evidence:
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
        raise PatchError(f"{path} does not exist, or is not a file.")
    return path


@click.command("forecast")
@json_option
@run_argument
def forecast_command(run: Path | None, as_json: bool) -> None:
    """Show what was going to overflow or diverge in a recorded run, and when it could be known.

    RUN is a run directory, or the name of one in stayfinite-runs; without it, the newest. Forecasts
    that were made while it ran are shown. If there are none, the recorded losses and gradients are
    searched now.
    """
    from stayfinite.prevent.forecast.outlook import foretold
    from stayfinite.report.run_summary import next_bad_step

    recorded = run_at(run)
    told, is_recorded = recorded.forecasts, bool(recorded.forecasts)
    if not is_recorded:
        series = recorded.series
        samples = {
            sample.step: [
                (name, room)
                for name, room in zip(sample.layers, sample.headroom, strict=True)
                if room is not None and math.isfinite(room)
            ]
            for sample in series.samples
        }
        columns = (series[name] for name in ("step", "loss", "norm", "lr"))
        told = foretold(zip(*columns, strict=True), samples)
    if as_json:
        click.echo(to_json(told, indent=1))
        return
    incidents = recorded.incidents
    for forecast in told:
        end = next_bad_step(forecast, incidents)
        steps = count((end or 0) - forecast.step, "step")
        ahead = "" if end is None else f", {steps} before the incident at step {end}"
        known = "" if is_recorded else "could be known at "
        click.echo(f"{known}step {forecast.step}{ahead}: {forecast_and_answer(forecast)}")
        for line in forecast.evidence:
            click.echo(f"  {plain(line)}")
    if not told:
        click.echo(f"no overflow or divergence was seen coming in {recorded.steps:,} steps.")
