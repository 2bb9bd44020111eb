"""`stayfinite minimise`: the smallest script that shows the first bad operation of a capsule."""

from __future__ import annotations

import os
from pathlib import Path

import click

from stayfinite.cli._common import PATH, Refused, refusing
from stayfinite.errors import CapsuleError
from stayfinite.text import plain


@click.command("minimise")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; by default the script is printed.",
)
@click.option("--force", is_flag=True, help="Replace the output file if it is there already.")
@click.argument("capsule", type=PATH)
def command(capsule: Path, output: Path | None, force: bool) -> None:
    """Write the smallest script that shows the first bad operation of a CAPSULE.

    It has at most 40 lines, needs nothing but torch, and exits with 1 when it goes bad. Only that
    one operation is run here, on its recorded inputs, and none of the source in the capsule. The
    exit code is 2 when there is no such script.
    """
    from stayfinite.capsule import read_capsule
    from stayfinite.capsule.minimal import minimised

    if output is not None and os.path.lexists(output) and not force:
        raise Refused(f"{output} is there already; give another name, or --force to replace it.")
    try:
        repro = minimised(read_capsule(capsule))
    except CapsuleError as error:
        text = str(error) if str(error).startswith(str(capsule)) else f"{capsule}: {error}"
        raise Refused(plain(text)) from error
    if output is None:
        click.echo(repro.text, nl=False)
        return
    mode = "w" if force else "x"
    with refusing(doing="written", file=output), open(output, mode, encoding="utf-8") as file:
        file.write(repro.text)
    before, after = repro.numbers_before, repro.numbers
    click.echo(f"{output}: {repro.experiment.op}, {before:,} numbers cut down to {after:,}")
