"""A second run of the script with the tracer on, and when there may be one."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from dataclasses import dataclass

from stayfinite.explain.alike import alike
from stayfinite.records import Incident, RunResult
from stayfinite.runner import tree
from stayfinite.runner.again import Again, run_again
from stayfinite.runner.match import confirmed, is_foreign, is_same, unconfirmed
from stayfinite.runner.plan import Plan
from stayfinite.runner.scene import Scene
from stayfinite.runner.seeds import unrepeatable
from stayfinite.runner.tree import ProcessRecord

LONGEST = 300.0  # a first run of more seconds is repeated only when asked
TRACE_ALL = 25.0  # an incident within so many seconds is traced from the start


@dataclass(frozen=True, kw_only=True)
class _First:
    scene: Scene
    record: ProcessRecord
    incident: Incident
    duration: float


def look_again(
    scene: Scene, records: list[ProcessRecord], result: RunResult
) -> tuple[RunResult, list[str]]:
    """The result with the first incident seen exactly if it may be, and lines that say how."""
    found = tree.first_incident(records)
    if found is None or _is_exact(found[1]) or scene.options.trace:
        return result, []
    record, incident = found
    reason = why_not(scene, records)
    if scene.is_rank or reason is not None:
        return _without(scene, incident, result, reason or "")
    duration = time.time() - scene.started
    first = _First(scene=scene, record=record, incident=incident, duration=duration)
    _free_devices()
    better, notes = _second(first)
    incidents = tuple(
        better if old == incident else alike(old, incident, better) for old in result.incidents
    )
    return dataclasses.replace(result, incidents=incidents), notes


def _without(
    scene: Scene, first: Incident, result: RunResult, reason: str
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
    return result, [f"{reason} To find {what}: {scene.again('--second-run', 'always')}"]


def why_not(scene: Scene, records: list[ProcessRecord]) -> str | None:
    """Why the script is not run a second time, as a sentence; None if it may be."""
    if scene.options.second_run == "always":
        return None
    if scene.options.second_run == "never":
        return "There was no second run (--second-run never)."
    took = time.time() - scene.started
    if took > LONGEST:
        return f"There was no second run, because the first took {took / 60:.0f} minutes."
    effect = next((effect for record in records for effect in record.effects), None)
    return f"There was no second run, because the script {effect}." if effect else None


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
    return _judge(first.incident, again)


def _run(first: _First, *, from_start: bool) -> Again:
    armed = {"trace": "armed", "arm_at": first.record.arm_at}
    how = {"trace": "start", "arm_at": None} if from_start else armed
    scene = first.scene
    folder = os.path.join(scene.plan.folder, "from-start" if from_start else "armed")
    os.mkdir(folder)
    plan = Plan(folder=folder, guard=scene.plan.guard, repeat=scene.plan.folder)
    plan = dataclasses.replace(plan, capsule=scene.plan.capsule, command=scene.plan.command)
    done = first.incident.outcome
    is_undone = scene.plan.guard.get("on_nan") == "recover" and (
        done is None or done.strategy not in ("warn", "none")
    )
    plan = plan.with_guard(on_nan="stop", is_undone=is_undone, **how)
    plan.save()
    return run_again(scene, plan, seconds=first.duration)


def _judge(first: Incident, again: Again) -> tuple[Incident, list[str]]:
    second = again.incident
    if second is not None and is_same(first, second):
        return confirmed(first, second), []
    if again.problem is not None and second is None:
        return first, [again.problem, *again.tail]
    return unconfirmed(first, second), unrepeatable()


def _is_exact(incident: Incident) -> bool:
    return incident.origin is not None and incident.origin.exact
