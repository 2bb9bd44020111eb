"""What the sub-commands share: options, refusals, and the runs and models they are given."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stayfinite.errors import CapsuleError, RecordError

if TYPE_CHECKING:
    from stayfinite.capsule import Capsule
    from stayfinite.report.store.reading import Run
    from stayfinite.runner.case import Replayed


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


class Refused(click.ClickException):
    """One line and exit code 2."""

    exit_code = 2


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
    try:
        return read_run(path)
    except RecordError as error:
        raise Refused(str(error)) from error


def replay_model(capsule: Capsule, name: str) -> Replayed:
    """Put the capsule's state into the model and its batch through it, traced."""
    from stayfinite.capsule.make import put_random, put_state
    from stayfinite.checkpoint.modules import Members
    from stayfinite.runner.case import Replayed
    from stayfinite.tracing import trace

    if not capsule.batch or capsule.state is None or capsule.state.tensors is None:
        raise CapsuleError(
            "the capsule has no batch or no state to put into a model; make it with --with-batch."
        )
    model, step = _given(name)
    put_state(capsule.state, Members(models=(model,)))
    if capsule.random is not None:
        put_random(capsule.random)
    with trace(raise_on_nan=False) as found:
        try:
            _run(model, step, capsule.batch)
        except Exception as error:  # their code can raise anything
            if not found.incidents:
                raise Refused(f"--model {name}: {type(error).__name__}: {error}") from error
    return Replayed(incident=found.incidents[0] if found.incidents else None)


def _run(model: Any, step: Callable[[Any], Any] | None, batches: tuple[Any, ...]) -> None:
    from stayfinite.locate.search import call, loss_of

    for batch in batches:
        loss = step(batch) if step is not None else loss_of(call(model, batch), None, None)
        if getattr(loss, "requires_grad", False):
            loss.backward()


def model_from(name: str) -> Any:
    """The model that `module:factory` gives."""
    model = _made_by(name)
    if not hasattr(model, "named_modules"):
        kind = type(model).__name__
        raise Refused(f"--model {name} gave a {kind}; it must give a torch.nn.Module.")
    return model


def _made_by(name: str) -> Any:
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


def _given(name: str) -> tuple[Any, Callable[[Any], Any] | None]:
    """(model, step) from `module:factory`; step is None where there is only a model."""
    import torch

    made = _made_by(name)
    model, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module) or not (step is None or callable(step)):
        kind = type(made).__name__
        raise Refused(f"--model {name} gave a {kind}; it must give a model, or (model, step).")
    return model, step
