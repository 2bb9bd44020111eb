"""What each process of a run reported, and the one result that they add up to."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from stayfinite.errors import RecordError
from stayfinite.records import Aftermath, Incident, RunResult, from_json, to_json
from stayfinite.runner.audit import Effect
from stayfinite.runner.plan import write_atomically


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One process: what its guard saw, and what a second run needs to know about it.

    `born` tells the process from a later one with the same number. `in_group` is true while
    it trains together with others.
    `seconds` is the time from the start of the run to the first incident. `effects` are
    the things outside temporary folders that the process changed, `made` all paths that it made.
    `refused` is what it was about to change when its sandbox did not let it. `folder` is the one
    that file names in its incidents are relative to. `has_begun` says that it trains, `ended` is
    the exit code with which it ended, None as long as it has not.
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
    aftermath: Aftermath = field(default_factory=Aftermath)


def birth(pid: int) -> str | None:
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
    return birth(record.pid) == record.born


def save(record: ProcessRecord, folder: str) -> None:
    """Write the record of one process; a reader never sees half of it."""
    write_atomically(os.path.join(folder, f"process-{record.pid}.json"), to_json(record))


def load(folder: str) -> list[ProcessRecord]:
    """The records of all processes that have reported so far."""
    records = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "process-*.json"))):
        with contextlib.suppress(OSError, RecordError), open(path, encoding="utf-8") as file:
            records.append(from_json(ProcessRecord, file.read()))
    return records


def first_incident(records: Iterable[ProcessRecord]) -> tuple[ProcessRecord, Incident] | None:
    """The incident that the others followed from, and the process that saw it; None if healthy."""
    pairs = [(record, i) for record in records for i in record.result.incidents]
    return min(pairs, key=lambda pair: _age(pair[1]), default=None)


def merged(records: list[ProcessRecord], *, only_first: bool) -> RunResult:
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
    )


def _age(incident: Incident) -> tuple[bool, int, float]:
    # A rank that only received the value through a collective is never where it began.
    received = incident.origin is not None and incident.origin.phase == "distributed"
    return received, incident.step, incident.time
