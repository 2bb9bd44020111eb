"""What a watched process is told, as a JSON file whose path travels in one variable."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from stayfinite.records import Incident, from_json, to_json
from stayfinite.runner.words import what_was_done

MAIN = "main"  # the key of the process that the script begins in
VARIABLE = "STAYFINITE_PLAN"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

ours = threading.local()  # `is_writing` while a file is written that is not the script's doing


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where a process reports to, how its guard watches, and what it repeats.

    `folder` belongs to one run of the script and all its processes. `guard` has the fields
    of GuardSettings, as data, because that class cannot be imported before torch.
    `pid` is the process that reports for all; `ends_peers` is false where a launcher ends them.
    `repeat` is the folder of an earlier run whose generator states are given back.
    `run_dir` is where steps and incidents are recorded, if they are.
    `capsule` says what goes into the capsule of the first incident, if one is wanted.
    `instead` has other text for source files: path -> path of the text.
    `lab` has the incident that experiments are made on, the seconds, and where the result goes.
    `sandboxes` are the kinds in which a run that is not the user's own may be made, `sandbox` the
    one it is in, `writable` folders besides `folder` that it may write; it does not see `hidden`
    paths, which an earlier run has made.
    """

    folder: str
    guard: dict[str, Any] = field(default_factory=dict)
    repeat: str | None = None
    started: float = field(default_factory=time.time)
    pid: int = field(default_factory=os.getpid)
    ends_peers: bool = True
    run_dir: str | None = None
    command: tuple[str, ...] = ()
    instead: dict[str, str] = field(default_factory=dict)
    capsule: dict[str, Any] | None = None
    lab: dict[str, Any] | None = None
    sandboxes: tuple[str, ...] = ()
    sandbox: str | None = None
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return os.path.join(self.folder, f"plan-{self.pid}.json")

    @property
    def stops(self) -> bool:
        """Whether the first incident ends the script."""
        return bool(self.guard.get("on_nan", "stop") == "stop")

    def what_follows(self, incident: Incident) -> str:
        """What becomes of the script, in a few words."""
        if self.guard.get("on_nan") == "recover":
            return what_was_done(incident)
        return "ending the run" if self.stops else "the script goes on"

    def with_guard(self, **changes: Any) -> Plan:
        return dataclasses.replace(self, guard={**self.guard, **changes})

    def save(self) -> None:
        write_atomically(self.path, to_json(self))


def read_plan(path: str) -> Plan:
    """The plan that was saved at the path."""
    with open(path, encoding="utf-8") as file:
        return from_json(Plan, file.read())


def write_atomically(path: str, text: str) -> None:
    """Write the file so that a reader sees the old content or the new one, never a part."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}")
    ours.is_writing = True
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        ours.is_writing = False


def child_command(target: list[str], *, key: str, flags: list[str] | None = None) -> list[str]:
    """The command that runs the target as a watched process of an existing plan."""
    boot = f"import sys; sys.path.insert(0, {ROOT!r}); from stayfinite.runner.child import main"
    if flags is None:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", f"{boot}; main(key={key!r})", *target]


def launched(words: tuple[str, ...], *, ranks: int) -> tuple[str, ...]:
    """What follows `python` to start so many ranks of a script here."""
    alone = ("--standalone", "--nproc-per-node", str(ranks))
    return ("-m", "torch.distributed.run", *alone, *words)
