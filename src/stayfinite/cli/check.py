"""`stayfinite check`: is this checkpoint good?"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stayfinite.cli import PATH, Refused, object_from, refuse_on
from stayfinite.text import count

if TYPE_CHECKING:
    from rich.table import Table

    from stayfinite.checkpoint.inspect import Check

GOOD, PROBLEMS, UNREADABLE = 0, 1, 2
_SHOWN = 50


@click.command("check")
@click.option("--model", help="module:factory that gives the model which the checkpoint must fit.")
@click.option("--against", help="Another checkpoint that it is compared with.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.argument("checkpoint", type=PATH)
def check_command(checkpoint: Path, model: str | None, against: str | None, as_json: bool) -> None:
    """Check a checkpoint: checksums, non-finite values, learning rates, and whether it fits.

    CHECKPOINT is a file of save_checkpoint, torch.save, Lightning or safetensors, an index of
    shards, a folder of transformers or torch.distributed.checkpoint, or any folder with such
    files: then each is checked. The exit code is 0 when it is good, 1 when problems were found,
    and 2 when it cannot be read; of several, that of the worst.
    """
    from stayfinite.checkpoint.folder import checkpoints_in, is_checkpoint_folder

    inside = []
    with refuse_on(doing="read", file=checkpoint):
        if checkpoint.is_dir() and not is_checkpoint_folder(checkpoint):
            inside = checkpoints_in(checkpoint)  # oldest first
    if inside and against is not None:
        raise Refused(f"--against compares one checkpoint, and {checkpoint} has {len(inside)}.")
    other = None if against is None else Path(against)
    results = [_check(path, model, other) for path in inside or [checkpoint]]
    if as_json:
        each = [_data_of(result) for result in results]
        is_good = all(result.is_good for result in results)
        folder = {"schema": 1, "path": str(checkpoint), "good": is_good, "checkpoints": each}
        click.echo(json.dumps(folder if inside else each[0], indent=1))
    elif inside:
        _show_folder(checkpoint, results)
    else:
        _show(results[0])
    sys.exit(max(map(_exit_code, results)))


def _exit_code(result: Check) -> int:
    if result.is_good:
        return GOOD
    return PROBLEMS if result.is_readable else UNREADABLE


def _check(checkpoint: Path, name: str | None, against: Path | None) -> Check:
    from stayfinite.checkpoint.inspect import check, size_on_disk

    model = None if name is None else object_from(name)
    if model is not None and not hasattr(model, "named_modules"):
        kind = type(model).__name__
        raise Refused(f"--model {name} gave a {kind}; it must give a torch.nn.Module.")
    size = size_on_disk(checkpoint) + (size_on_disk(against) if against else 0)
    with _progress(checkpoint, size) as progress:
        return check(checkpoint, model=model, against=against, progress=progress)


@contextmanager
def _progress(checkpoint: Path, size: int) -> Iterator[Any]:
    """A bar on stderr while it takes long enough to be seen; none when nobody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, TransferSpeedColumn(), console=console, transient=True)
    bar.disable = not console.is_terminal
    task = bar.add_task(checkpoint.name, total=size or None)
    with bar:
        yield lambda count: bar.advance(task, count)


def _data_of(result: Check) -> dict[str, Any]:
    """The result as JSON values."""
    comparison = result.comparison
    return {
        "schema": 1,
        "path": str(result.path),
        "good": result.is_good,
        "layout": result.layout,
        "step": result.step,
        "parts": [dataclasses.asdict(part) for part in result.parts],
        "problems": [dataclasses.asdict(problem) for problem in result.problems],
        "comparison": None
        if comparison is None
        else {"same": comparison.same, "changed": list(comparison.changed)},
    }


def _show_folder(folder: Path, results: list[Check]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table("", "checkpoint", "step", "problems", header_style="bold")
    table.columns[-1].overflow = "fold"
    for result in results:
        mark = "[green]good[/]" if result.is_good else "[red]bad[/]"
        step = "" if result.step is None else str(result.step)
        table.add_row(mark, Text(result.path.name), step, Text(_first_problem(result)))
    console.print(table)
    good = [result.path for result in results if result.is_good]
    newest = f"; the newest good one is {escape(str(good[-1]))}" if good else ""
    console.print(f"{len(good)} of {len(results)} in {escape(str(folder))} good{newest}")


def _first_problem(result: Check) -> str:
    if not result.problems:
        return ""
    first, *others = result.problems
    said = str(first) if result.is_readable else f"not readable: {first.message}"
    return f"{said} And {len(others)} more." if others else said


def _show(result: Check) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    if not result.is_readable:
        console.print(f"[red]not readable[/] {escape(result.problems[0].message)}", soft_wrap=True)
        return
    console.print(_parts(result))
    if result.problems:
        console.print(_problems(result))
    errors = sum(problem.is_error for problem in result.problems)
    warnings = len(result.problems) - errors
    verdict = "[green]good[/]" if result.is_good else f"[red]{count(errors, 'problem')}[/]"
    noted = f", {count(warnings, 'warning')}" if warnings else ""
    step = "" if result.step is None else f", step {result.step}"
    described = escape(f"{result.path}: {result.layout}{step}")
    console.print(f"{verdict}{noted}  {described}", soft_wrap=True)
    if result.comparison is not None:
        same, changed = result.comparison.same, len(result.comparison.changed)
        console.print(f"against the other one: {same:,} the same to the byte, {changed:,} changed")


def _parts(result: Check) -> Table:
    from rich.table import Table

    table = Table("part", header_style="bold")
    for name in ("tensors", "MB", "dtypes", "largest magnitude"):
        table.add_column(name, justify="left" if name == "dtypes" else "right")
    for part in result.parts:
        cells = (f"{part.tensors:,}", f"{part.bytes / 1e6:,.1f}", ", ".join(part.dtypes))
        table.add_row(part.name, *cells, f"{part.largest:.3g}" if part.largest else "")
    return table


def _problems(result: Check) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("", header_style="bold")
    for name in ("where", "problem"):
        table.add_column(name, overflow="fold")
    for problem in result.problems[:_SHOWN]:
        mark = "[red]error[/]" if problem.is_error else "[yellow]warning[/]"
        table.add_row(mark, Text(problem.key), Text(problem.message))
    if len(result.problems) > _SHOWN:
        table.add_row("", "", f"and {len(result.problems) - _SHOWN} more; --json has all of them")
    return table
