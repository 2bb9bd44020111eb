"""What a watched process is told, what it reports, and the one result of all processes."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from stayfinite.errors import RecordError
from stayfinite.files import replace_file
from stayfinite.records import Aftermath, Incident, RunResult, from_json, to_json
from stayfinite.settings import GuardSettings
from stayfinite.text import what_was_done

MAIN = "main"  # the key of the process that the script begins in
VARIABLE = "STAYFINITE_PLAN"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

Purpose = Literal["run", "second", "trial", "preflight"]

ours = threading.local()  # `is_writing` while a file is written that is not the script's doing


@contextmanager
def our_own_writes() -> Iterator[None]:
    """A block in which nothing that this thread does is the script's doing."""
    before, ours.is_writing = getattr(ours, "is_writing", False), True
    try:
        yield
    finally:
        ours.is_writing = before


def write_atomically(path: str, text: str) -> None:
    """Write the file in one move, on our own account."""
    with our_own_writes():
        replace_file(path, text)


@dataclass(frozen=True, kw_only=True)
class CapsuleWish:
    """What goes into the capsule of the first incident; `ranks` if a launcher started some."""

    with_batch: bool
    with_source: bool
    cwd: str
    ranks: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where a process reports to, how its guard watches, and what it repeats.

    `folder` belongs to one run of the script and all its processes. `purpose` is what the run is
    made for: the user's own, one that is traced, one with a change, experiments, or a preflight.
    `pid` is the process that reports for all; `ends_peers` is false where a launcher ends them.
    `repeat` is the folder of an earlier run whose generator states are given back.
    `run_dir` is where steps and incidents are recorded, if they are.
    `instead` has other text for source files: path -> path of the text.
    `sandboxes` are the kinds in which a run that is not the user's own may be made, `sandbox` the
    one it is in, `writable` folders besides `folder` that it may write; it does not see `hidden`
    paths, which an earlier run has made.
    """

    folder: str
    purpose: Purpose = "run"
    guard: GuardSettings = field(default_factory=GuardSettings)
    repeat: str | None = None
    started: float = field(default_factory=time.time)
    pid: int = field(default_factory=os.getpid)
    ends_peers: bool = True
    run_dir: str | None = None
    command: tuple[str, ...] = ()
    instead: dict[str, str] = field(default_factory=dict)
    capsule: CapsuleWish | None = None
    sandboxes: tuple[str, ...] = ()
    sandbox: str | None = None
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return os.path.join(self.folder, f"plan-{self.pid}.json")

    @property
    def script_folder(self) -> str:
        """The folder that paths in a report are relative to."""
        return self.guard.folder or os.getcwd()

    @property
    def stops(self) -> bool:
        """Whether the first incident ends the script."""
        return self.guard.on_nan == "stop"

    @property
    def config(self) -> dict[str, Any]:
        """What a record of the run says of its settings: those of `run`, and unusual ones."""
        always = ("on_nan", "max_scaler_skips", "trace", "folder")
        usual = vars(GuardSettings())
        return {k: v for k, v in vars(self.guard).items() if k in always or v != usual[k]}

    def what_follows(self, incident: Incident) -> str:
        """What becomes of the script, in a few words."""
        if self.guard.on_nan == "recover":
            return what_was_done(incident)
        return "ending the run" if self.stops else "the script goes on"

    def with_guard(self, **changes: Any) -> Plan:
        return dataclasses.replace(self, guard=dataclasses.replace(self.guard, **changes))

    def save(self) -> None:
        write_atomically(self.path, to_json(self))


def read_plan(path: str) -> Plan:
    """The plan that was saved at the path."""
    with open(path, encoding="utf-8") as file:
        return from_json(Plan, file.read())


def child_command(target: list[str], *, key: str, flags: list[str] | None = None) -> list[str]:
    """The command that runs the target as a watched process of an existing plan."""
    boot = f"import sys; sys.path.insert(0, {ROOT!r}); from stayfinite.runner.run import main"
    if flags is None:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", f"{boot}; main(key={key!r})", *target]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One thing that a script did, or is about to do; `words` follow "the script".

    `path` is that of a file or folder, if it is about one; `is_new`: it was not there before.
    """

    words: str
    path: str | None = None
    is_new: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One process: what its guard saw, and what a second run needs to know about it.

    `born` tells the process from a later one with the same number. `in_group` is true while
    it trains together with others.
    `seconds` is the time from the start of the run to the first incident. `effects` are
    the things outside temporary folders that the process changed, `made` all paths that it made.
    `refused` is what it was about to change when its sandbox did not let it. `folder` is the one
    that file names in its incidents are relative to. `has_begun` says that it trains, `ended` is
    the exit code with which it ended, None as long as it has not. `attempt` counts how often a
    launcher has started all ranks again before it.
    """

    pid: int
    born: str = ""
    rank: int = 0
    result: RunResult
    saw_torch: bool = False
    stopped: bool = False
    in_group: bool = False
    arm_at: int | None = None
    seconds: float | None = None
    effects: tuple[Effect, ...] = ()
    made: tuple[str, ...] = ()
    refused: str | None = None
    folder: str | None = None
    has_begun: bool = False
    ended: int | None = None
    attempt: int = 0
    aftermath: Aftermath = field(default_factory=Aftermath)


def birth_of_process(pid: int) -> str | None:
    """When a running process was started, in the system's own terms; None if it is gone.

    Empty where the system does not say.
    """
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            facts = file.read().rpartition(")")[2].split()
        return None if facts[0] == "Z" else facts[19]
    except ProcessLookupError:
        return None
    except OSError:
        return ""


def is_running(record: ProcessRecord) -> bool:
    """Whether the process of the record is still there, and no other with its number."""
    return birth_of_process(record.pid) == record.born


def save_record(record: ProcessRecord, folder: str) -> None:
    """Write the record of one process; a reader never sees half of it."""
    write_atomically(os.path.join(folder, f"process-{record.pid}.json"), to_json(record))


def load_records(folder: str) -> list[ProcessRecord]:
    """The records of all processes that have reported so far."""
    records = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "process-*.json"))):
        with contextlib.suppress(OSError, RecordError), open(path, encoding="utf-8") as file:
            records.append(from_json(ProcessRecord, file.read()))
    return records


def attempt_here() -> int:
    """How often the launcher of this process has started its ranks again."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdigit() else 0


def was_stopped(records: list[ProcessRecord]) -> bool:
    """Whether we have ended training; not if a launcher has started it again since."""
    last = max((record.attempt for record in records), default=0)
    last = max(last, attempt_here())
    return any(record.stopped for record in records if record.attempt == last)


def first_incident(records: Iterable[ProcessRecord]) -> tuple[ProcessRecord, Incident] | None:
    """The incident that the others followed from, and the process that saw it; None if healthy."""
    pairs = [(record, i) for record in records for i in record.result.incidents]
    return min(pairs, key=lambda pair: _age(pair[1]), default=None)


def merged_result(records: list[ProcessRecord], *, only_first: bool) -> RunResult:
    """One result for all processes: one incident per step, or only the first one.

    Ranks step together, so steps and skips are the largest count of any one process.
    """
    incidents = sorted((i for r in records for i in r.result.incidents), key=_age)
    by_step: dict[int, Incident] = {}
    for incident in incidents[:1] if only_first else incidents:
        by_step.setdefault(incident.step, incident)
    return RunResult(
        incidents=tuple(by_step[step] for step in sorted(by_step)),
        skipped_by_scaler=max((r.result.skipped_by_scaler for r in records), default=0),
        steps=max((r.result.steps for r in records), default=0),
        forecasts=tuple(forecast for r in records for forecast in r.result.forecasts),
    )


def _age(incident: Incident) -> tuple[bool, int, float]:
    # A rank that only received the value through a collective is never where it began.
    received = incident.origin is not None and incident.origin.phase == "distributed"
    return received, incident.step, incident.time
