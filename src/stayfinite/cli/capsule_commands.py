"""The commands for capsules: `replay` and `minimise`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stayfinite.cli import PATH, Refused, object_from, refuse_on
from stayfinite.errors import CapsuleError
from stayfinite.text import plain

if TYPE_CHECKING:
    from stayfinite.capsule import Capsule
    from stayfinite.capsule.reproduces import Point
    from stayfinite.runner.case import OtherRun

REPRODUCES, OTHERWISE = 0, 1


@click.command("replay")
@click.option("--trust", is_flag=True, help="Allow the source files in the capsule to be run.")
@click.option(
    "--model",
    help="module:factory that gives the model, or (model, step) with step(batch) giving "
    "a loss; then none of the capsule's own code is run.",
)
@click.option(
    "--seconds",
    type=int,
    default=600,
    show_default=True,
    help="Stop the script after this many seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.argument("capsule", type=PATH)
def replay_command(
    capsule: Path, trust: bool, model: str | None, seconds: int, as_json: bool
) -> None:
    """Run the bad step of a CAPSULE again, traced, and say whether it goes bad in the same way.

    The source in it is run only with --trust, in a new temporary folder. The exit code is 0 when
    the same operation gives the same bad value on the same line, 1 when not, and 2 when the file
    cannot be used.
    """
    from stayfinite.capsule import read_capsule
    from stayfinite.capsule.reproduces import compare_incidents, reproduces
    from stayfinite.runner.capsules import replay

    with refuse_on(CapsuleError):
        read = read_capsule(capsule)
        if model is not None:
            done = _replay_model(read, model)
        elif trust:
            done = replay(read, capsule, seconds=seconds)
        else:
            raise CapsuleError(_what_would_run(read, capsule))
    is_script = read.code.kind == "script" and model is None
    points = compare_incidents(read.incident, done.incident, with_step=is_script)
    same = done.problem is None and reproduces(points)
    if as_json:
        names = {"what": "name", "there": "there", "here": "here", "same": "is_same"}
        rows = [{key: getattr(point, name) for key, name in names.items()} for point in points]
        data = {"schema": 1, "reproduces": same, "compared": rows, "problem": done.problem}
        click.echo(json.dumps(data, indent=1))
    else:
        _show(read, done, points, same)
    sys.exit(REPRODUCES if same else OTHERWISE)


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


def _replay_model(capsule: Capsule, name: str) -> OtherRun:
    """Put the capsule's state into the model and its batch through it, traced."""
    import torch

    from stayfinite.capsule.make import put_random, put_state
    from stayfinite.checkpoint.modules import Members
    from stayfinite.locate.search import call, loss_of
    from stayfinite.runner.case import OtherRun
    from stayfinite.tracing import trace

    if not capsule.batch or capsule.state is None or capsule.state.tensors is None:
        raise CapsuleError(
            "the capsule has no batch or no state to put into a model; make it with --with-batch."
        )
    made = object_from(name)
    model, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module) or not (step is None or callable(step)):
        kind = type(made).__name__
        raise Refused(f"--model {name} gave a {kind}; it must give a model, or (model, step).")
    put_state(capsule.state, Members(models=(model,)))
    if capsule.random is not None:
        put_random(capsule.random)
    with trace(raise_on_nan=False) as found:
        try:
            for batch in capsule.batch:
                loss = loss_of(call(model, batch), None, None) if step is None else step(batch)
                if getattr(loss, "requires_grad", False):
                    loss.backward()
        except Exception as error:  # their code can raise anything
            if not found.incidents:
                raise Refused(f"--model {name}: {type(error).__name__}: {error}") from error
    return OtherRun(incident=found.incidents[0] if found.incidents else None)


def _show(capsule: Capsule, done: OtherRun, points: list[Point], same: bool) -> None:
    from stayfinite.capsule.make import differences

    rows = [(p.name, p.there, p.here, "same" if p.is_same else "differs") for p in points]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo(plain("  ".join(cells)))
    if done.problem is not None:
        click.echo(f"stayfinite: {done.problem}", err=True)
        for line in done.tail:
            click.echo(plain(line), err=True)
    if not same:
        for difference in differences(capsule.versions):
            click.echo(plain(f"note: {difference}"))
    click.echo("It reproduces." if same else "It does not reproduce.")


@click.command("minimise")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; by default the script is printed.",
)
@click.option("--force", is_flag=True, help="Replace the output file if it already exists.")
@click.argument("capsule", type=PATH)
def minimise_command(capsule: Path, output: Path | None, force: bool) -> None:
    """Write the smallest script that shows the first bad operation of a CAPSULE.

    It has at most 40 lines, needs nothing but torch, and exits with 1 when it goes bad. Only that
    one operation is run here, on its recorded inputs, and none of the source in the capsule. The
    exit code is 2 when there is no such script.
    """
    from stayfinite.capsule import read_capsule
    from stayfinite.capsule.minimal import minimise

    if output is not None and os.path.lexists(output) and not force:
        raise Refused(f"{output} already exists; give another name, or --force to replace it.")
    try:
        repro = minimise(read_capsule(capsule))
    except CapsuleError as error:
        text = str(error) if str(error).startswith(str(capsule)) else f"{capsule}: {error}"
        raise Refused(plain(text)) from error
    if output is None:
        click.echo(repro.text, nl=False)
        return
    mode = "w" if force else "x"
    with refuse_on(doing="written", file=output), open(output, mode, encoding="utf-8") as file:
        file.write(repro.text)
    before, after = repro.numbers_before, repro.numbers
    click.echo(f"{output}: {repro.experiment.op}, {before:,} numbers cut down to {after:,}")
