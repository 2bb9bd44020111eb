"""A run of the script that is for experiments alone, and what they say about its incident."""

from __future__ import annotations

import dataclasses
import os
import time

from stayfinite.records import Diagnosis, Incident, RunResult, from_json, to_data
from stayfinite.runner import tree
from stayfinite.runner.again import end, sign_of_life, start
from stayfinite.runner.aside import step_aside
from stayfinite.runner.budget import Budget, may_try
from stayfinite.runner.plan import Plan
from stayfinite.runner.scene import Scene
from stayfinite.runner.second import Holding, holding
from stayfinite.runner.tree import ProcessRecord

_SLOWER = 1.5  # a traced run, at least
_PAUSE = 0.05


def experiment(
    scene: Scene, records: list[ProcessRecord], result: RunResult, budget: Budget
) -> RunResult:
    """The result with what experiments showed about its first incident."""
    found = next((i for i in result.incidents if i.origin is not None and i.origin.exact), None)
    seen = tree.first_incident(records)
    if found is None or found.diagnosis is None or seen is None:
        return result
    seconds = budget.left
    is_soon = (seen[0].seconds or 0.0) * _SLOWER < seconds
    is_alone = not any(record.in_group or record.rank for record in records)
    if not (is_soon and is_alone and hasattr(os, "fork") and may_try(scene, records)):
        return result
    with step_aside("making experiments"):
        with sign_of_life(f"making experiments on step {found.step}, for at most {seconds:.0f} s"):
            whole = _whole(found, seen[0], scene)
            diagnosis = _asked(scene, whole, seconds=seconds, held=holding(scene, records))
        if diagnosis is not None:
            better = dataclasses.replace(found, diagnosis=_joined(found.diagnosis, diagnosis))
            incidents = tuple(better if each is found else each for each in result.incidents)
            return dataclasses.replace(result, incidents=incidents)
    return result


def _joined(before: Diagnosis, after: Diagnosis) -> Diagnosis:
    """With all evidence; that of a change that was tried comes last, and what it proves stays."""
    tried = before.evidence[-1:] if before.patch else ()
    evidence = (*(said for said in after.evidence if said not in tried), *tried)
    sure = before.confidence if before.confidence == "proven" else after.confidence
    return dataclasses.replace(after, evidence=evidence, confidence=sure)


def _whole(incident: Incident, record: ProcessRecord, scene: Scene) -> Incident:
    """The incident with the whole path of its file."""
    origin = incident.origin
    assert origin is not None
    folder = record.folder or str(scene.plan.guard["folder"])
    path = None if origin.file is None else os.path.join(folder, origin.file)
    return dataclasses.replace(incident, origin=dataclasses.replace(origin, file=path))


def _asked(scene: Scene, incident: Incident, *, seconds: float, held: Holding) -> Diagnosis | None:
    folder = os.path.join(scene.plan.folder, "lab")
    os.mkdir(folder)
    path = os.path.join(folder, "diagnosis.json")
    plan = Plan(
        folder=folder,
        guard=scene.plan.guard,
        repeat=scene.plan.folder,
        command=scene.plan.command,
        lab={"incident": to_data(incident), "seconds": seconds, "result": path},
        **held,
    ).with_guard(on_nan="stop", trace="start", arm_at=None)
    plan.save()
    process, stop = start(scene, plan), time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < stop:
            time.sleep(_PAUSE)
    finally:
        end(process)
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return from_json(Diagnosis, file.read())
