"""A run that has ended, and other runs of its script that find out more about it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stayfinite.budget import Budget
from stayfinite.errors import SandboxError
from stayfinite.records import Incident, RunResult
from stayfinite.runner.options import Scene
from stayfinite.runner.plan import (
    MAIN,
    VARIABLE,
    Plan,
    ProcessRecord,
    Purpose,
    child_command,
    first_incident,
    load_records,
)
from stayfinite.runner.sandbox import allowed_kinds
from stayfinite.safely import say

LONGEST = 300.0  # a first run of more seconds is repeated only when asked
TRACE_ALL = 25.0  # an incident within so many seconds is traced from the start
GRACE = 15.0  # seconds to unwind after the incident was seen
TAIL_LINES = 8
UNHELD = "unheld"  # the file with the reason why a run of ours was not made
UNHELD_CODE = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is known at the end of a run; `notes` are lines that follow the report."""

    scene: Scene
    records: list[ProcessRecord]
    result: RunResult
    budget: Budget
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> tuple[ProcessRecord, Incident] | None:
        """The incident that the others followed from, and the process that saw it."""
        return first_incident(self.records)

    @property
    def exact(self) -> Incident | None:
        """The first incident of the result whose operation was seen."""
        return next(filter(is_exact, self.result.incidents), None)

    @property
    def folder(self) -> str:
        """The folder that file names in incidents are relative to."""
        return (self.first and self.first[0].folder) or self.scene.plan.script_folder

    def with_incidents(self, incidents: Iterable[Incident]) -> Case:
        result = dataclasses.replace(self.result, incidents=tuple(incidents))
        return dataclasses.replace(self, result=result)

    def with_incident(self, before: Incident, after: Incident) -> Case:
        """The case with another incident in the place of one of its own."""
        return self.with_incidents(after if i is before else i for i in self.result.incidents)

    def with_notes(self, *notes: str) -> Case:
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    def plan_for(self, purpose: Purpose, name: str, **guard: Any) -> Plan:
        """The plan of another run, in a new folder of that name, which can change nothing.

        Where the first run has written files, only a view of them lets another one get as far.
        """
        first, options = self.scene.plan, self.scene.options
        is_any = options.second_run == "always" or not any(r.effects for r in self.records)
        made = dict.fromkeys(path for record in self.records for path in record.made)
        folder = os.path.join(first.folder, name)
        os.mkdir(folder)
        return Plan(
            folder=folder,
            purpose=purpose,
            guard=dataclasses.replace(first.guard, on_nan="stop", forecast=False, **guard),
            repeat=first.folder,
            command=first.command,
            capsule=first.capsule if purpose == "second" else None,
            sandboxes=tuple(kind for kind in allowed_kinds() if is_any or kind == "overlay"),
            hidden=tuple(made),
        )


Stage = Callable[[Case], Case]


def run_stages(case: Case, *stages: Stage, save: Callable[[RunResult], None]) -> Case:
    """The case after one stage and the other; the result is saved before them and after each."""
    save(case.result)
    for stage in stages:
        case = stage(case)
        save(case.result)
    return case


def is_exact(incident: Incident) -> bool:
    """Whether its operation was seen, not inferred."""
    return incident.origin is not None and incident.origin.exact


def why_not_again(case: Case) -> str | None:
    """Why the script is not run again, as a sentence; None if it may be."""
    options = case.scene.options
    if options.second_run == "always":
        return None
    if options.second_run == "never":
        return "There was no second run (--second-run never)."
    took = time.time() - case.scene.started
    if took > LONGEST:
        return f"There was no second run, because the first took {took / 60:.0f} minutes."
    effects = [effect for record in case.records for effect in record.effects]
    outside = [effect for effect in effects if effect.path is None]
    if not outside and (not effects or "overlay" in allowed_kinds()):
        return None
    return f"There was no second run, because the script {(outside or effects)[0].words}."


@dataclass(frozen=True, kw_only=True)
class OtherRun:
    """What another run saw; `problem` and its last lines say why it did not get there."""

    incident: Incident | None = None
    problem: str | None = None
    tail: tuple[str, ...] = ()


def run_child(scene: Scene, plan: Plan, *, seconds: float, grace: float = math.inf) -> int | None:
    """Run the scene's target under the plan; the result is its exit code, None if it was ended.

    It is ended after so many seconds, or `grace` seconds after its first incident. What it prints
    goes to a file in the folder of the plan. SandboxError if nothing here would have held it.
    """
    plan.save()
    with open(_output(plan), "wb") as file:
        process = subprocess.Popen(
            child_command(scene.target.command, key=MAIN),
            cwd=scene.cwd,
            env={**scene.environment, VARIABLE: plan.path},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    began, seen = time.monotonic(), math.inf
    try:
        while (code := process.poll()) is None:
            now = time.monotonic()
            if seen > now and has_incident(plan):
                seen = now
            if now > began + seconds or now >= seen + grace:
                break
            time.sleep(min(0.5, 0.02 + (now - began) / 50))
    finally:
        _end(process)
    if (reason := why_unheld(plan)) is not None:
        raise SandboxError(reason)
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    # The whole group: a killed script leaves its own children behind.
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
            return


def has_incident(plan: Plan) -> bool:
    """Whether a process of the plan has seen one."""
    return any(record.result.incidents for record in load_records(plan.folder))


def why_unheld(plan: Plan) -> str | None:
    """Why the run was not made, as a sentence: nothing here would have held it."""
    try:
        with open(os.path.join(plan.folder, UNHELD), encoding="utf-8") as file:
            return f"your files could not be protected from it ({file.read()})."
    except OSError:
        return None


def refusal(records: list[ProcessRecord]) -> str | None:
    """What the run was about to change when its sandbox did not let it."""
    return next((record.refused for record in records if record.refused is not None), None)


def _output(plan: Plan) -> str:
    return os.path.join(plan.folder, "output.txt")


def last_lines(plan: Plan) -> tuple[str, ...]:
    """What the script printed last."""
    with open(_output(plan), "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 8000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return tuple(f"  {line}" for line in lines[-TAIL_LINES:])


@contextlib.contextmanager
def sign_of_life(doing: str) -> Iterator[None]:
    """Say what is being done while it takes its time."""
    if not sys.stderr.isatty():
        say(f"{doing} ...")
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(f"stayfinite: {doing}", total=None)
        yield
