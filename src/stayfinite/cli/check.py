"""`stayfinite check`: is this checkpoint good?"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stayfinite.cli._models import model_from
from stayfinite.cli._options import options_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stayfinite.checkpoint.checking import Check

GOOD, PROBLEMS, UNREADABLE = 0, 1, 2
_SHOWN = 50


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `check` can be told."""

    model: str | None = field(
        default=None,
        metadata={"help": "module:factory that gives the model which the checkpoint must fit."},
    )
    against: str | None = field(
        default=None, metadata={"help": "Another checkpoint that it is compared with."}
    )
    json: bool = field(default=False, metadata={"help": "Print JSON instead of a table."})


@click.command("check")
@options_of(CheckOptions)
@click.argument("checkpoint", type=click.Path(path_type=Path))
def command(checkpoint: Path, **options: Any) -> None:
    """Check a checkpoint: checksums, non-finite values, learning rates, and whether it fits.

    CHECKPOINT is a file of save_checkpoint, torch.save, Lightning or safetensors, an index of
    shards, or a folder of transformers or torch.distributed.checkpoint. The exit code is 0 when it
    is good, 1 when problems were found, and 2 when it cannot be read.
    """
    chosen = CheckOptions(**options)
    result = _checked(checkpoint, chosen)
    if chosen.json:
        click.echo(json.dumps(as_data(result), indent=1))
    else:
        _show(result)
    if not result.is_good:
        sys.exit(PROBLEMS if result.is_readable else UNREADABLE)


def _checked(checkpoint: Path, options: CheckOptions) -> Check:
    from stayfinite.checkpoint.checking import check, size_on_disk

    model = None if options.model is None else model_from(options.model)
    against = None if options.against is None else Path(options.against)
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


def as_data(result: Check) -> dict[str, Any]:
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
    verdict = "[green]good[/]" if result.is_good else f"[red]{_count(errors, 'problem')}[/]"
    noted = f", {_count(warnings, 'warning')}" if warnings else ""
    console.print(f"{verdict}{noted}  {escape(_described(result))}", soft_wrap=True)
    _show_comparison(result, console)


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

    table = Table("", header_style="bold")
    for name in ("where", "problem"):
        table.add_column(name, overflow="fold")
    for problem in result.problems[:_SHOWN]:
        mark = "[red]error[/]" if problem.is_error else "[yellow]warning[/]"
        table.add_row(mark, _plain(problem.key), _plain(problem.message))
    if len(result.problems) > _SHOWN:
        table.add_row("", "", f"and {len(result.problems) - _SHOWN} more; --json has all of them")
    return table


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _described(result: Check) -> str:
    step = "" if result.step is None else f", step {result.step}"
    return f"{result.path}: {result.layout}{step}"


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}" if number == 1 else f"{number:,} {of}s"


def _show_comparison(result: Check, console: Console) -> None:
    if result.comparison is not None:
        same, changed = result.comparison.same, len(result.comparison.changed)
        console.print(f"against the other one: {same:,} the same to the byte, {changed:,} changed")
