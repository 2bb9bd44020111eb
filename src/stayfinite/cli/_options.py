"""Command-line options made from the fields of a dataclass, so that each is written once."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def options_of(kind: type) -> Callable[[Decorated], Decorated]:
    """A decorator that gives a command one option per field, with the field's `help`."""
    hints = typing.get_type_hints(kind)

    def decorate(function: Decorated) -> Decorated:
        for field in reversed(dataclasses.fields(kind)):
            function = _option(field, hints[field.name])(function)
        return function

    return decorate


def _option(field: dataclasses.Field[Any], hint: Any) -> Callable[[Decorated], Decorated]:
    flag = "--" + field.name.replace("_", "-")
    help_text = field.metadata.get("help", "")
    if hint is bool:
        return click.option(flag, is_flag=True, default=field.default, help=help_text)
    return click.option(
        flag,
        type=_type(hint),
        default=field.default,
        help=help_text,
        show_default=field.default is not None,
        metavar={"json": "FILE", "capsule": "FILE", "run_dir": "FOLDER"}.get(field.name),
    )


def _type(hint: Any) -> Any:
    if typing.get_origin(hint) is typing.Literal:
        return click.Choice(typing.get_args(hint))
    if isinstance(hint, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    return hint
