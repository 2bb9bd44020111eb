"""The options of `stayfinite run`, each written once; the command line is made from them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from stayfinite.errors import ConfigError


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a script is watched and what is done about an incident."""

    on_nan: Literal["stop", "warn", "recover"] = _option(
        "stop",
        "stop: end the script before the update, exit code 3. warn: report and go on. "
        "recover: leave bad updates out, and do more if they go on; exit code 3 if nothing helps.",
    )
    second_run: Literal["auto", "always", "never"] = _option(
        "auto",
        "Find the exact operation by running the script again with the tracer on. "
        "auto: if the first run took under 5 minutes and did no more than write files; "
        "the second cannot change yours.",
    )
    trace: bool = _option(False, "Trace from the start, which is slower; no second run is needed.")
    max_scaler_skips: int = _option(
        20, "Loss-scale overflows in a row that are still taken for normal."
    )
    prove: int = _option(
        30,
        "Seconds for trying changes of the source after an incident (the first one with which the "
        "script stays finite is shown), and for experiments on the bad step. 0: none.",
    )
    json: str | None = _option(None, "Write the result to this file, as JSON.")
    run_dir: str | None = _option(
        None, "Record the run in this folder; else in stayfinite-runs/<time>-<script>."
    )
    no_record: bool = _option(False, "Do not record the run.")
    capsule: str | None = _option(
        None, "After an incident, write what replays it elsewhere to this file."
    )
    with_batch: bool = _option(
        False, "Put the batch, and values computed from it, into the capsule too."
    )
    no_source: bool = _option(False, "Leave your source files out of the capsule.")
    verbose: bool = _option(False, "Show the whole report.")

    def __post_init__(self) -> None:
        if self.max_scaler_skips < 1:
            raise ConfigError(
                f"max_scaler_skips is {self.max_scaler_skips}; it must be at least 1."
            )
        if self.prove < 0:
            raise ConfigError(f"prove is {self.prove}; it must be a number of seconds, or 0.")
        if self.capsule is not None:
            object.__setattr__(self, "capsule", os.path.abspath(self.capsule))
        if self.json is not None:
            object.__setattr__(self, "json", os.path.abspath(self.json))
        if self.run_dir is not None:
            object.__setattr__(self, "run_dir", os.path.abspath(self.run_dir))
