"""`stayfinite run` and `stayfinite preflight`: a script that nobody changed is run."""

from __future__ import annotations

from typing import Any

import click

from stayfinite.cli import options_of, refuse_on
from stayfinite.errors import ConfigError
from stayfinite.runner.options import RunOptions
from stayfinite.runner.preflight_run import PreflightOptions
from stayfinite.runner.script import Target

_MODULE_OPTION = click.option(
    "-m", "is_module", is_flag=True, help="TARGET is a module, as in `python -m`."
)
_WORDS: dict[str, Any] = {
    "context_settings": {"allow_interspersed_args": False},
    "options_metavar": "[OPTIONS] [-m]",
}


@click.command("run", **_WORDS)
@_MODULE_OPTION
@options_of(RunOptions)
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run_command(target: str, args: tuple[str, ...], is_module: bool, **options: Any) -> None:
    """Run a training script and stop at the first NaN or Inf, with the line that made it.

    TARGET is a script, and everything after it belongs to the script. A run without
    incident ends with one line on stderr and the script's own exit code; an incident
    ends with a report and exit code 3.
    """
    from stayfinite.runner.run import run

    with refuse_on(ConfigError):
        chosen = RunOptions(**options)
        run(Target(name=target, args=args, is_module=is_module), options=chosen)


@click.command("preflight", **_WORDS)
@_MODULE_OPTION
@options_of(PreflightOptions)
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def preflight_command(target: str, args: tuple[str, ...], is_module: bool, **options: Any) -> None:
    """Find what can end a training with NaN or Inf, before it does.

    TARGET is a script, and everything after it belongs to the script. It is run up to its second
    update and then ended, and cannot change your files; the risks of its lines, weights,
    optimizers and first batch are said on stderr, each with a fix. The exit code is 0 when there
    is none, 1 when there are, and 2 when the script failed or never trained.
    """
    from stayfinite.runner.preflight_run import preflight

    with refuse_on(ConfigError):
        chosen = PreflightOptions(**options)
        preflight(Target(name=target, args=args, is_module=is_module), options=chosen)
