"""The options of `stayfinite run`, each written once, and the facts of one run."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from typing import Any, Literal

from stayfinite.errors import ConfigError
from stayfinite.report.sinks import Repeats
from stayfinite.runner.plan import Plan
from stayfinite.runner.script import Target
from stayfinite.settings import GuardSettings


def option(default: Any, help: str) -> Any:
    """A field of options, with the help of its flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a script is watched and what is done about an incident."""

    on_nan: Literal["stop", "warn", "recover"] = option(
        "stop",
        "stop: end the script before the update, exit code 3. warn: report and go on. "
        "recover: skip bad updates, and do more if they continue; exit code 3 if nothing helps.",
    )
    second_run: Literal["auto", "always", "never"] = option(
        "auto",
        "Find the exact operation by running the script again with the tracer on. "
        "auto: if the first run took under 5 minutes and did no more than write files; "
        "the second cannot change yours.",
    )
    again: Literal["auto", "never"] = option(
        "auto",
        "Find the exact operation by running the body of the running loop again, in place, with "
        "the tracer on and without its effects; then no second run is needed.",
    )
    trace: bool = option(False, "Trace from the start, which is slower; no second run is needed.")
    max_scaler_skips: int = option(
        20, "Loss-scale overflows in a row that are still taken for normal."
    )
    prove: int = option(
        15,
        "Seconds for trying changes of the source after an incident (the first one with which the "
        "script stays finite is shown), and for experiments on the bad step. 0: none.",
    )
    forecast: bool = option(
        False, "Say what is going to overflow or diverge, and in how many steps, before it does."
    )
    json: str | None = option(None, "Write the result to this file, as JSON.")
    run_dir: str | None = option(
        None, "Record the run in this folder; else in stayfinite-runs/<time>-<script>."
    )
    no_record: bool = option(False, "Do not record the run.")
    capsule: str | None = option(
        None, "After an incident, write what replays it elsewhere to this file."
    )
    with_batch: bool = option(
        False, "Put the batch, and values computed from it, into the capsule too."
    )
    no_source: bool = option(False, "Do not include your source files in the capsule.")
    verbose: bool = option(False, "Show the whole report.")

    def __post_init__(self) -> None:
        if self.max_scaler_skips < 1:
            raise ConfigError(
                f"max_scaler_skips is {self.max_scaler_skips}; it must be at least 1."
            )
        if self.prove < 0:
            raise ConfigError(f"prove is {self.prove}; it must be a number of seconds, or 0.")
        for name in ("capsule", "json", "run_dir"):  # the script may change the folder
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, os.path.abspath(path))


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Taken before the script starts, so that it holds whatever the script does later.

    `is_rank`: this is one of several runs, each started by a launcher for its own rank.
    """

    target: Target
    options: RunOptions
    plan: Plan
    is_rank: bool = False
    cwd: str = field(default_factory=os.getcwd)
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    repeats: Repeats = field(default_factory=Repeats)

    @property
    def started(self) -> float:
        return self.plan.started

    def again(self, *extra: str) -> str:
        """The command line that runs the same again with more options."""
        given = ["--on-nan", self.options.on_nan] if self.options.on_nan != "stop" else []
        return shlex.join(["stayfinite", "run", *given, *extra, *self.target.command])


def first_settings(options: RunOptions, target: Target) -> GuardSettings:
    """How the guard of a first run with these options watches."""
    return GuardSettings(
        on_nan=options.on_nan,
        max_scaler_skips=options.max_scaler_skips,
        trace="start" if options.trace else "never",
        again=options.again,
        prove_seconds=min(options.prove, 15) / 2,
        change_seconds=min(options.prove, 15) / 2,
        folder=target.folder,
        forecast=options.forecast,
    )
