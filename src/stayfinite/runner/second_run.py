"""A second run of the script with the tracer on, and what it says about the first."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from stayfinite.explain.proof import alike
from stayfinite.records import REPEATS, Diagnosis, Incident, RunResult
from stayfinite.runner.options import Scene
from stayfinite.runner.plan import (
    MAIN,
    VARIABLE,
    Plan,
    ProcessRecord,
    child_command,
    first_incident,
    load_records,
)
from stayfinite.runner.sandbox import allowed_kinds
from stayfinite.runner.seeds import unrepeatable
from stayfinite.safely import say
from stayfinite.settings import ROUND
from stayfinite.text import one_line

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
    records = load_records(plan.folder)
    found = first_incident(records)
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


def refusal(records: list[ProcessRecord]) -> str | None:
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
    return any(record.result.incidents for record in load_records(plan.folder))


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


LONGEST = 300.0  # a first run of more seconds is repeated only when asked
TRACE_ALL = 25.0  # an incident within so many seconds is traced from the start


@dataclass(frozen=True, kw_only=True)
class _First:
    scene: Scene
    records: list[ProcessRecord]
    record: ProcessRecord
    incident: Incident
    duration: float


def look_again(
    scene: Scene, records: list[ProcessRecord], result: RunResult
) -> tuple[RunResult, list[str]]:
    """The result with the first incident seen exactly if it may be, and lines that say how."""
    found = first_incident(records)
    if found is None or _is_exact(found[1]) or scene.options.trace:
        return result, []
    record, incident = found
    reason = why_not(scene, records)
    if scene.is_rank or reason is not None:
        has_written = any(each.effects for each in records)
        return _without(scene, incident, result, reason or "", has_written=has_written)
    duration = time.time() - scene.started
    first = _First(
        scene=scene, records=records, record=record, incident=incident, duration=duration
    )
    _free_devices()
    better, notes = _second(first)
    incidents = tuple(
        better if old == incident else alike(old, incident, better) for old in result.incidents
    )
    return dataclasses.replace(result, incidents=incidents), notes


def _without(
    scene: Scene, first: Incident, result: RunResult, reason: str, *, has_written: bool
) -> tuple[RunResult, list[str]]:
    """What is known without a second run: steps that went bad like one whose operation was seen."""
    seen = [incident for incident in result.incidents if _is_exact(incident)]
    better = {
        incident.step: next(
            (new for one in seen if (new := alike(incident, one, one)) != incident), incident
        )
        for incident in result.incidents
    }
    result = dataclasses.replace(result, incidents=tuple(better.values()))
    known = better.get(first.step, first).origin
    if known is not None and known.file is not None:
        return result, []
    what = f"the exact operation of step {first.step}" if seen else "the exact operation"
    if scene.is_rank:
        return result, [f"To find {what}, add --trace to `stayfinite run`."]
    command = scene.again(*(["--trace"] if has_written else ["--second-run", "always"]))
    return result, [f"{reason} To find {what}: {command}"]


def why_not(scene: Scene, records: list[ProcessRecord]) -> str | None:
    """Why the script is not run a second time, as a sentence; None if it may be."""
    if scene.options.second_run == "always":
        return None
    if scene.options.second_run == "never":
        return "There was no second run (--second-run never)."
    took = time.time() - scene.started
    if took > LONGEST:
        return f"There was no second run, because the first took {took / 60:.0f} minutes."
    effects = [effect for record in records for effect in record.effects]
    outside = [effect for effect in effects if effect.path is None]
    if not outside and (not effects or "overlay" in allowed_kinds()):
        return None
    return f"There was no second run, because the script {(outside or effects)[0].words}."


def holding(scene: Scene, records: list[ProcessRecord]) -> Holding:
    """How a run of ours is kept from changing anything; `records` are those of the first run.

    Where that one has written files, only a view of them lets another run get as far.
    """
    is_any = scene.options.second_run == "always" or not any(r.effects for r in records)
    kinds = [kind for kind in allowed_kinds() if is_any or kind == "overlay"]
    made = dict.fromkeys(path for record in records for path in record.made)
    return {"sandboxes": tuple(kinds), "hidden": tuple(made)}


class Holding(TypedDict):
    """Fields of a Plan."""

    sandboxes: tuple[str, ...]
    hidden: tuple[str, ...]


def _free_devices() -> None:
    # The script is over, but its tensors would still fill the GPU that the second run needs.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        vars(sys.modules["__main__"]).clear()
        gc.collect()
        torch.cuda.empty_cache()


def _second(first: _First) -> tuple[Incident, list[str]]:
    reached = first.record.seconds or first.duration
    from_start = reached < TRACE_ALL
    again = _run(first, from_start=from_start)
    if not from_start and is_foreign(again.incident) and 12 * reached < LONGEST:
        again = _run(first, from_start=True)
    return _judge(first, again)


def _run(first: _First, *, from_start: bool) -> Again:
    armed = {"trace": "armed", "arm_at": first.record.arm_at}
    how = {"trace": "start", "arm_at": None} if from_start else armed
    scene = first.scene
    folder = os.path.join(scene.plan.folder, "from-start" if from_start else "armed")
    os.mkdir(folder)
    plan = Plan(
        folder=folder,
        purpose="second",
        guard=scene.plan.guard,
        repeat=scene.plan.folder,
        capsule=scene.plan.capsule,
        command=scene.plan.command,
        **holding(scene, first.records),
    )
    done = first.incident.outcome
    is_undone = scene.plan.guard.on_nan == "recover" and (
        done is None or done.strategy not in ("warn", "none")
    )
    plan = plan.with_guard(on_nan="stop", is_undone=is_undone, **how)
    plan.save()
    return run_again(scene, plan, seconds=first.duration)


def _judge(first: _First, again: Again) -> tuple[Incident, list[str]]:
    before, second = first.incident, again.incident
    if second is not None and is_same(before, second):
        return confirmed(before, second), []
    if again.problem is not None and second is None:
        return before, [again.problem, *again.tail]
    changed = (e.words for record in first.records for e in record.effects if not e.is_new)
    return unconfirmed(before, second, changed=next(changed, None)), unrepeatable()


def _is_exact(incident: Incident) -> bool:
    return incident.origin is not None and incident.origin.exact


def is_same(first: Incident, second: Incident) -> bool:
    """Whether both runs went bad at the same place in training.

    Traced, parameters are looked at after every update, untraced once in a round.
    """
    return first.rank == second.rank and 0 <= first.step - _noticed(second) <= ROUND


def _noticed(incident: Incident) -> int:
    # A traced incident names the step of the birth, which may be long before.
    facts = incident.origin.facts if incident.origin else {}
    return int(facts.get("noticed_step", incident.step))


def is_foreign(incident: Incident | None) -> bool:
    """Whether the value was born before the tracer looked, so that an earlier start is needed."""
    if incident is None:
        return False
    return incident.origin is None or bool(incident.origin.facts.get("foreign"))


def confirmed(first: Incident, second: Incident) -> Incident:
    """The first run's incident with what the tracer saw in the second."""
    diagnosis = second.diagnosis or first.diagnosis
    if diagnosis is not None:
        diagnosis = dataclasses.replace(diagnosis, evidence=(*diagnosis.evidence, REPEATS))
    return dataclasses.replace(
        first,
        step=second.step,
        reports=second.reports or first.reports,
        origin=second.origin or first.origin,
        diagnosis=diagnosis,
    )


def unconfirmed(
    first: Incident, second: Incident | None, *, changed: str | None = None
) -> Incident:
    """The first run's incident, with the evidence that it does not come back.

    `changed` is what the first run did to a file that was there before it.
    """
    evidence = _evidence(second, changed)
    return dataclasses.replace(first, diagnosis=_doubted(first.diagnosis, evidence))


def _evidence(second: Incident | None, changed: str | None) -> str:
    what = "stayed finite" if second is None else f"went bad elsewhere ({one_line(second)})"
    if changed is not None:
        return f"Not repeated: a second run {what}. The first one {changed}, which may be why."
    return f"Not deterministic: a second run with the same generator states {what}."


def _doubted(diagnosis: Diagnosis | None, evidence: str) -> Diagnosis:
    if diagnosis is None:
        diagnosis = Diagnosis(
            cause="unknown",
            why="The run is not deterministic, so repeating it does not show the operation.",
            fix="Seed every generator, or run with --trace to see it the first time.",
        )
    return dataclasses.replace(
        diagnosis, confidence="possible", evidence=(*diagnosis.evidence, evidence)
    )
