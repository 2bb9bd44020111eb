"""The facts of one run that its parts share: what is run, where from, and into which folder."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field

from stayfinite.runner.options import RunOptions
from stayfinite.runner.plan import Plan
from stayfinite.runner.script import Target


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

    @property
    def started(self) -> float:
        return self.plan.started

    def again(self, *extra: str) -> str:
        """The command line that runs the same again with more options."""
        given = ["--on-nan", self.options.on_nan] if self.options.on_nan != "stop" else []
        return shlex.join(["stayfinite", "run", *given, *extra, *self.target.command])


def guard_data(options: RunOptions, target: Target) -> dict[str, object]:
    """The fields of GuardSettings for a first run with these options."""
    return {
        "on_nan": options.on_nan,
        "max_scaler_skips": options.max_scaler_skips,
        "trace": "start" if options.trace else "never",
        "folder": target.folder,
    }
