"""The command line: its sub-commands, loaded when they are asked for, and what they share."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stayfinite import __version__
from stayfinite.errors import RecordError
from stayfinite.text import plain

if TYPE_CHECKING:
    from stayfinite.report.store.reading import Run

_MODULES = {
    "script_commands": ("run", "preflight"),
    "record_commands": ("list", "show", "forecast", "compare", "html", "ui", "fix"),
    "capsule_commands": ("replay", "minimise"),
    "check": ("check",),
    "cause": ("cause",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
run_argument = click.argument("run", required=False, type=PATH)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def options_of(kind: type) -> Callable[[Decorated], Decorated]:
    """A decorator that gives a command one option per field, with the field's `help`."""
    hints = typing.get_type_hints(kind)

    def decorate(function: Decorated) -> Decorated:
        for field in reversed(dataclasses.fields(kind)):
            flag, hint = "--" + field.name.replace("_", "-"), hints[field.name]
            words: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
            if hint is bool:
                words["is_flag"] = True
            else:
                words |= {"type": _type(hint), "show_default": field.default is not None}
                files = {"json": "FILE", "capsule": "FILE", "run_dir": "FOLDER"}
                words["metavar"] = files.get(field.name)
            function = click.option(flag, **words)(function)
        return function

    return decorate


def _type(hint: Any) -> Any:
    if typing.get_origin(hint) is typing.Literal:
        return click.Choice(typing.get_args(hint))
    if isinstance(hint, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    return hint


class Refused(click.ClickException):
    """One line and exit code 2."""

    exit_code = 2


@contextmanager
def refuse_on(
    *kinds: type[Exception], doing: str | None = None, file: Path | None = None
) -> Iterator[None]:
    """A block in which these errors become a refusal.

    With `doing`, so do those of the file system: "FILE cannot be written: ..."
    """
    try:
        yield
    except kinds as error:
        raise Refused(plain(str(error))) from error
    except OSError as error:
        if doing is None:
            raise
        what = file or error.filename or "the file"
        raise Refused(f"{what} cannot be {doing}: {error.strerror}.") from error


def run_at(path: Path | None) -> Run:
    """The run in this folder, or of this name in stayfinite-runs; without a path, the newest."""
    from stayfinite.report.store.reading import read_run, runs_in
    from stayfinite.report.store.writer import RUNS

    if path is None:
        found = runs_in(RUNS)
        if not found:
            raise Refused(f"there is no run in {RUNS}; name one, or make one: stayfinite run ...")
        path = found[0]
    elif not path.exists() and (Path(RUNS) / path).is_dir():
        path = Path(RUNS) / path
    with refuse_on(RecordError):
        return read_run(path)


def object_from(name: str) -> Any:
    """What `module:factory` gives, with the current folder on the path as in python."""
    module, _, factory = name.partition(":")
    if not module or not factory:
        raise Refused(f"--model is {name!r}; it must be module:factory, such as train:build_model.")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in factory.split("."):
            found = getattr(found, part)
        is_model = hasattr(found, "state_dict") and not isinstance(found, type)
        return found() if callable(found) and not is_model else found
    except Exception as error:  # their code can raise anything
        raise Refused(f"--model {name} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())


class _Commands(click.Group):
    """Finds a sub-command NAME as `NAME_command` of its module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULE_OF)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _MODULE_OF:
            return None
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        command: click.Command = getattr(module, f"{name}_command")
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="stayfinite %(version)s")
def main() -> None:
    """Keeps PyTorch training finite: finds what made a NaN, and stops it before the weights."""
