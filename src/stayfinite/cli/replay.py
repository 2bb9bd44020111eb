"""`stayfinite replay`: does the bad step of a capsule go bad here too?"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stayfinite.cli._common import Refused, options_of
from stayfinite.errors import CapsuleError

if TYPE_CHECKING:
    from stayfinite.capsule import Capsule
    from stayfinite.capsule.reproduces import Point
    from stayfinite.runner.case import Replayed

REPRODUCES, OTHERWISE = 0, 1


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What `replay` can be told."""

    trust: bool = field(
        default=False, metadata={"help": "Run the source files in the capsule, as anybody's code."}
    )
    model: str | None = field(
        default=None,
        metadata={
            "help": "module:factory that gives the model, or (model, step) with step(batch) giving "
            "a loss; then none of the capsule's own code is run."
        },
    )
    seconds: int = field(
        default=600, metadata={"help": "The script is ended after so many seconds."}
    )
    json: bool = field(default=False, metadata={"help": "Print JSON instead of text."})


@click.command("replay")
@options_of(ReplayOptions)
@click.argument("capsule", type=click.Path(path_type=Path))
def command(capsule: Path, **options: Any) -> None:
    """Run the bad step of a CAPSULE again, traced, and say whether it goes bad in the same way.

    The source in it is run only with --trust, in a new temporary folder. The exit code is 0 when
    the same operation gives the same bad value on the same line, 1 when not, and 2 when the file
    cannot be used.
    """
    from stayfinite.capsule import read_capsule
    from stayfinite.capsule.reproduces import compared, reproduces

    chosen = ReplayOptions(**options)
    try:
        read = read_capsule(capsule)
        done = _replayed(read, capsule, chosen)
    except CapsuleError as error:
        raise Refused(_plain(str(error))) from error
    is_script = read.code.kind == "script" and chosen.model is None
    points = compared(read.incident, done.incident, with_step=is_script)
    same = done.problem is None and reproduces(points)
    if chosen.json:
        click.echo(json.dumps(_data(done, points, same), indent=1))
    else:
        _show(read, done, points, same)
    sys.exit(REPRODUCES if same else OTHERWISE)


def _replayed(capsule: Capsule, path: Path, options: ReplayOptions) -> Replayed:
    if options.model is not None:
        from stayfinite.cli._common import replay_model

        return replay_model(capsule, options.model)
    if not options.trust:
        raise CapsuleError(_what_would_run(capsule, path))
    from stayfinite.runner.capsules import replay

    return replay(capsule, path, seconds=options.seconds)


def _what_would_run(capsule: Capsule, path: Path) -> str:
    if not capsule.sources:
        return f"{path} has no source files to run; give the model with --model module:factory."
    names = [each.name for each in capsule.sources]
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    run = shlex.join(["python", *capsule.code.command])
    return (
        f"nothing was run. {path} has code of its own: {shown}. To replay it, `{run}` would be run "
        "in a temporary folder; it cannot change your files, but it can read them. If you trust "
        "who sent it, add --trust; with code of your own, give --model module:factory."
    )


def _show(capsule: Capsule, done: Replayed, points: list[Point], same: bool) -> None:
    from stayfinite.capsule.make import differences

    widths = [max(len(cell) for cell in column) for column in _columns(points)]
    for point in points:
        mark = "same" if point.is_same else "differs"
        cells = (point.name, point.there, point.here, mark)
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        click.echo(_plain(line.rstrip()))
    if done.problem is not None:
        click.echo(f"stayfinite: {done.problem}", err=True)
        for line in done.tail:
            click.echo(_plain(line), err=True)
    if not same:
        for difference in differences(capsule.versions):
            click.echo(_plain(f"note: {difference}"))
    click.echo("It reproduces." if same else "It does not reproduce.")


def _columns(points: list[Point]) -> list[list[str]]:
    heads = [[point.name, point.there, point.here, "differs"] for point in points]
    return [list(column) for column in zip(*heads, strict=True)] or [[""]] * 4


def _data(done: Replayed, points: list[Point], same: bool) -> dict[str, Any]:
    compared = [
        {"what": p.name, "there": p.there, "here": p.here, "same": p.is_same} for p in points
    ]
    return {"schema": 1, "reproduces": same, "compared": compared, "problem": done.problem}


def _plain(text: str) -> str:
    """Without characters that would steer a terminal: the text is somebody else's."""
    return "".join(char if char.isprintable() else "?" for char in text)
