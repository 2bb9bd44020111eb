"""The process of a second run: started, waited for with a sign of life, and read."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from stayfinite.records import Incident
from stayfinite.runner import tree
from stayfinite.runner.plan import MAIN, VARIABLE, Plan, child_command
from stayfinite.runner.scene import Scene
from stayfinite.runner.words import say

SHORTEST_LIMIT = 120.0
SLOWDOWN = 12.0
GRACE = 15.0  # seconds to unwind after the incident was seen
TAIL_LINES = 8
UNHELD = "unheld"  # the file with the reason why a run of ours was not made
UNHELD_CODE = 4


@dataclass(frozen=True, kw_only=True)
class Again:
    """What the second run saw; `problem` says why it saw nothing, if it ended strangely."""

    incident: Incident | None = None
    problem: str | None = None
    tail: tuple[str, ...] = ()


def run_again(scene: Scene, plan: Plan, *, seconds: float) -> Again:
    """Run the scene's target under the plan; `seconds` is what the first run took."""
    limit = max(SHORTEST_LIMIT, SLOWDOWN * seconds)
    process = start(scene, plan)
    problem = _wait(process, plan, limit=limit, seconds=seconds)
    if (reason := why_unheld(plan)) is not None:
        return Again(problem=f"There was no second run: {reason}")
    records = tree.load(plan.folder)
    found = tree.first_incident(records)
    if found is None and problem is None and (refused := refusal(records)) is not None:
        problem = f"The second run was ended before it got there, because it {refused}."
    elif found is None and problem is None and process.returncode not in (0, 3):
        problem = f"The second run failed with exit code {process.returncode}; its last lines:"
    return Again(incident=found[1] if found else None, problem=problem, tail=_tail(plan, problem))


def start(scene: Scene, plan: Plan) -> subprocess.Popen[bytes]:
    """Start the scene's target under the plan; what it prints goes to a file in its folder."""
    with open(_output(plan), "wb") as file:
        return subprocess.Popen(
            child_command(scene.target.command, key=MAIN),
            cwd=scene.cwd,
            env={**scene.environment, VARIABLE: plan.path},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def why_unheld(plan: Plan) -> str | None:
    """Why the run was not made, as a sentence: nothing here would have held it."""
    try:
        with open(os.path.join(plan.folder, UNHELD), encoding="utf-8") as file:
            return f"your files could not be protected from it ({file.read()})."
    except OSError:
        return None


def refusal(records: list[tree.ProcessRecord]) -> str | None:
    """What the run was about to change when its sandbox did not let it."""
    return next((record.refused for record in records if record.refused is not None), None)


def _output(plan: Plan) -> str:
    return os.path.join(plan.folder, "output.txt")


def _wait(
    process: subprocess.Popen[bytes], plan: Plan, *, limit: float, seconds: float
) -> str | None:
    began, seen = time.monotonic(), 0.0
    took = f"first run: {seconds:.0f} s"
    try:
        with sign_of_life(f"running the script again, traced, to find the operation ({took})"):
            while process.poll() is None:
                passed = time.monotonic() - began
                seen = seen or (passed if has_incident(plan) else 0.0)
                if passed > limit or (seen and passed > seen + GRACE):
                    return f"The second run was ended after {passed:.0f} seconds; its last lines:"
                time.sleep(min(0.5, 0.02 + passed / 20))
    except KeyboardInterrupt:
        return "The second run was interrupted."
    finally:
        end(process)
    return None


def has_incident(plan: Plan) -> bool:
    """Whether a process of the plan has seen one."""
    return any(record.result.incidents for record in tree.load(plan.folder))


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    # The whole group: a killed script leaves its own children behind.
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
            return


def _tail(plan: Plan, problem: str | None) -> tuple[str, ...]:
    return last_lines(plan) if problem is not None and problem.endswith(":") else ()


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
