"""A second run of the script with the tracer on, and what it says about the first."""

from __future__ import annotations

import dataclasses
import gc
import sys
import time

from stayfinite.errors import SandboxError
from stayfinite.explain.experiments import alike
from stayfinite.records import REPEATS, Diagnosis, Incident
from stayfinite.runner.case import (
    GRACE,
    LONGEST,
    TRACE_ALL,
    Case,
    OtherRun,
    is_exact,
    last_lines,
    refusal,
    run_child,
    sign_of_life,
    why_not_again,
)
from stayfinite.runner.options import Scene
from stayfinite.runner.plan import Plan, first_incident, load_records
from stayfinite.runner.seeds import unrepeatable
from stayfinite.settings import ROUND
from stayfinite.text import one_line

SHORTEST_LIMIT = 120.0
SLOWDOWN = 12.0


def look_again(case: Case) -> Case:
    """The case with its first incident seen exactly if it may be, and notes that say how."""
    scene = case.scene
    if case.first is None or scene.options.trace:
        return case
    record, incident = case.first
    reason = why_not_again(case)
    if is_exact(incident) and (reason is not None or not is_foreign(incident)):
        return case
    if scene.is_rank or reason is not None:
        return _without(case, incident, reason or "")
    duration = time.time() - scene.started
    # The script is over, but its tensors would still fill the GPU that the second run needs.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        vars(sys.modules["__main__"]).clear()
        gc.collect()
        torch.cuda.empty_cache()
    reached = record.seconds or duration
    done = incident.outcome
    is_undone = scene.plan.guard.on_nan == "recover" and (
        done is None or done.strategy not in ("warn", "none")
    )
    again: OtherRun | None = None
    if reached >= TRACE_ALL:
        plan = case.plan_for(
            "second", "armed", is_undone=is_undone, trace="armed", arm_at=record.arm_at
        )
        again = run_again(scene, plan, seconds=duration)
    if again is None or (is_foreign(again.incident) and SLOWDOWN * reached < LONGEST):
        plan = case.plan_for(
            "second", "from-start", is_undone=is_undone, trace="start", arm_at=None
        )
        again = run_again(scene, plan, seconds=duration)
    better, notes = _judge(case, incident, again)
    return case.with_notes(*notes).with_incidents(
        better if old == incident else alike(old, incident, better) for old in case.result.incidents
    )


def run_again(scene: Scene, plan: Plan, *, seconds: float) -> OtherRun:
    """Run the scene's target under the plan; `seconds` is what the first run took."""
    limit, began = max(SHORTEST_LIMIT, SLOWDOWN * seconds), time.monotonic()
    took = f"first run: {seconds:.0f} s"
    try:
        with sign_of_life(f"running the script again, traced, to find the operation ({took})"):
            code = run_child(scene, plan, seconds=limit, grace=GRACE)
    except SandboxError as error:
        return OtherRun(problem=f"There was no second run: {error}")
    except KeyboardInterrupt:
        return OtherRun(incident=_first_seen(plan), problem="The second run was interrupted.")
    found = _first_seen(plan)
    refused = refusal(load_records(plan.folder))
    passed = time.monotonic() - began
    if code is None:
        problem = f"The second run was ended after {passed:.0f} seconds; its last lines:"
    elif found is None and refused is not None:
        return OtherRun(
            problem=f"The second run was ended before it got there, because it {refused}."
        )
    elif found is None and code not in (0, 3):
        problem = f"The second run failed with exit code {code}; its last lines:"
    else:
        return OtherRun(incident=found)
    return OtherRun(incident=found, problem=problem, tail=last_lines(plan))


def _first_seen(plan: Plan) -> Incident | None:
    found = first_incident(load_records(plan.folder))
    return found and found[1]


def _without(case: Case, first: Incident, reason: str) -> Case:
    """What is known without a second run: steps that went bad like one whose operation was seen."""
    seen = list(filter(is_exact, case.result.incidents))
    better = {
        incident.step: next(
            (new for one in seen if (new := alike(incident, one, one)) != incident), incident
        )
        for incident in case.result.incidents
    }
    case = case.with_incidents(better.values())
    known = better.get(first.step, first).origin
    if known is not None and known.file is not None:
        return case
    what = f"the exact operation of step {first.step}" if seen else "the exact operation"
    if case.scene.is_rank:
        return case.with_notes(f"To find {what}, add --trace to `stayfinite run`.")
    has_written = any(record.effects for record in case.records)
    command = case.scene.again(*(["--trace"] if has_written else ["--second-run", "always"]))
    return case.with_notes(f"{reason} To find {what}: {command}")


def _judge(case: Case, before: Incident, again: OtherRun) -> tuple[Incident, list[str]]:
    second = again.incident
    if second is not None and is_same(before, second):
        return confirmed(before, second), []
    if again.problem is not None and second is None:
        return before, [again.problem, *again.tail]
    changed = (e.words for record in case.records for e in record.effects if not e.is_new)
    return unconfirmed(before, second, changed=next(changed, None)), unrepeatable()


def is_same(first: Incident, second: Incident) -> bool:
    """Whether both runs went bad at the same place in training.

    Traced, parameters are looked at after every update, untraced once in a round.
    """
    # A traced incident names the step of the birth, which may be long before.
    facts = second.origin.facts if second.origin else {}
    noticed = int(facts.get("noticed_step", second.step))
    return first.rank == second.rank and 0 <= first.step - noticed <= ROUND


def is_foreign(incident: Incident | None) -> bool:
    """Whether the value was born before the tracer looked, so that an earlier start is needed."""
    if incident is None:
        return False
    return incident.origin is None or bool(incident.origin.facts.get("foreign"))


def confirmed(first: Incident, second: Incident) -> Incident:
    """The first run's incident with what the tracer saw in the second."""
    diagnosis = second.diagnosis or first.diagnosis
    if diagnosis is not None:
        before = first.diagnosis
        # Which buffer it was is known of the first run alone.
        is_buffer = before is not None and before.cause == "bad_buffer" != diagnosis.cause
        known = (before.why,) if is_buffer and before is not None else ()
        evidence = (*known, *diagnosis.evidence, REPEATS)
        diagnosis = dataclasses.replace(diagnosis, evidence=evidence)
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
    what = "stayed finite" if second is None else f"went bad elsewhere ({one_line(second)})"
    evidence = f"Not deterministic: a second run with the same generator states {what}."
    if changed is not None:
        evidence = f"Not repeated: a second run {what}. The first one {changed}, which may be why."
    diagnosis = first.diagnosis or Diagnosis(
        cause="unknown",
        why="The run is not deterministic, so repeating it does not show the operation.",
        fix="Seed every generator, or run with --trace to see it the first time.",
    )
    diagnosis = dataclasses.replace(
        diagnosis, confidence="possible", evidence=(*diagnosis.evidence, evidence)
    )
    return dataclasses.replace(first, diagnosis=diagnosis)
