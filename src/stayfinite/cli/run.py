"""`stayfinite run`: watch a script that nobody changed."""

from __future__ import annotations

from typing import Any

import click

from stayfinite.cli._common import options_of, refusing
from stayfinite.errors import ConfigError
from stayfinite.runner.options import RunOptions
from stayfinite.runner.script import Target


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [-m]",
)
@click.option("-m", "is_module", is_flag=True, help="TARGET is a module, as in `python -m`.")
@options_of(RunOptions)
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(target: str, args: tuple[str, ...], is_module: bool, **options: Any) -> None:
    """Run a training script and stop at the first NaN or Inf, with the line that made it.

    TARGET is a script, and everything after it belongs to the script. A run without
    incident ends with one line on stderr and the script's own exit code; an incident
    ends with a report and exit code 3.
    """
    from stayfinite.runner.run import run

    with refusing(ConfigError):
        chosen = RunOptions(**options)
        run(Target(name=target, args=args, is_module=is_module), options=chosen)
