"""A second run of the script with the tracer on, and when there may be one."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from dataclasses import dataclass
from typing import TypedDict

from stayfinite.explain.alike import alike
from stayfinite.records import Incident, RunResult
from stayfinite.runner import tree
from stayfinite.runner.again import Again, run_again
from stayfinite.runner.match import confirmed, is_foreign, is_same, unconfirmed
from stayfinite.runner.plan import Plan
from stayfinite.runner.sandbox import allowed_kinds
from stayfinite.runner.scene import Scene
from stayfinite.runner.seeds import unrepeatable
from stayfinite.runner.tree import ProcessRecord

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
    found = tree.first_incident(records)
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
        guard=scene.plan.guard,
        repeat=scene.plan.folder,
        capsule=scene.plan.capsule,
        command=scene.plan.command,
        **holding(scene, first.records),
    )
    done = first.incident.outcome
    is_undone = scene.plan.guard.get("on_nan") == "recover" and (
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
