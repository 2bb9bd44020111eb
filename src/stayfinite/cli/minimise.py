"""`stayfinite minimise`: the smallest script that shows the first bad operation of a capsule."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stayfinite.cli._common import Refused, options_of
from stayfinite.errors import CapsuleError

if TYPE_CHECKING:
    from stayfinite.capsule.minimal import Repro


@dataclass(frozen=True, kw_only=True)
class MinimiseOptions:
    """What `minimise` can be told."""

    force: bool = field(
        default=False, metadata={"help": "Replace the output file if it is there already."}
    )


@click.command("minimise")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; by default the script is printed.",
)
@options_of(MinimiseOptions)
@click.argument("capsule", type=click.Path(path_type=Path))
def command(capsule: Path, output: Path | None, **options: Any) -> None:
    """Write the smallest script that shows the first bad operation of a CAPSULE.

    It has at most 40 lines, needs nothing but torch, and exits with 1 when it goes bad. Only that
    one operation is run here, on its recorded inputs, and none of the source in the capsule. The
    exit code is 2 when there is no such script.
    """
    chosen = MinimiseOptions(**options)
    if output is not None and os.path.lexists(output) and not chosen.force:
        raise Refused(f"{output} is there already; give another name, or --force to replace it.")
    repro = _minimised(capsule)
    if output is None:
        click.echo(repro.text, nl=False)
        return
    try:
        with open(output, "w" if chosen.force else "x", encoding="utf-8") as file:
            file.write(repro.text)
    except OSError as error:
        raise Refused(f"{output} cannot be written: {error.strerror}.") from error
    before, after = repro.numbers_before, repro.numbers
    click.echo(f"{output}: {repro.experiment.op}, {before:,} numbers cut down to {after:,}")


def _minimised(path: Path) -> Repro:
    from stayfinite.capsule import read_capsule
    from stayfinite.capsule.minimal import minimised

    try:
        return minimised(read_capsule(path))
    except CapsuleError as error:
        text = str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
        raise Refused("".join(c if c.isprintable() else "?" for c in text)) from error
