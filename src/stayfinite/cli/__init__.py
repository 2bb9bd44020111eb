"""The command line: one file per sub-command, loaded when it is asked for."""

from __future__ import annotations

import importlib
import pkgutil

import click

from stayfinite import __version__


class _Commands(click.Group):
    """Finds a sub-command as the `command` of the module with its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = (module.name for module in pkgutil.iter_modules(__path__))
        return sorted(name for name in names if not name.startswith("_"))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{__name__}.{name}")
        command: click.Command = module.command
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="stayfinite %(version)s")
def main() -> None:
    """Keeps PyTorch training finite: finds what made a NaN, and stops it before the weights."""
