"""Changes of the source, each tried in a run of the script; the first one that holds is shown."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from stayfinite.errors import SandboxError
from stayfinite.explain.patch.candidates import patches_for
from stayfinite.explain.patch.patch import Patch
from stayfinite.explain.trial import Trial, evidence_of, is_proven
from stayfinite.records import Incident, RunResult
from stayfinite.report.store.reading import Run
from stayfinite.runner import tree
from stayfinite.runner.again import (
    end,
    has_incident,
    refusal,
    sign_of_life,
    start,
    why_unheld,
)
from stayfinite.runner.budget import Budget, may_try
from stayfinite.runner.plan import Plan
from stayfinite.runner.scene import Scene
from stayfinite.runner.second import Holding, holding
from stayfinite.runner.tree import ProcessRecord
from stayfinite.runner.words import count

_PAUSE = 0.1  # seconds between two looks at a trial
_FURTHER = 20  # steps beyond the bad one that a change has to hold for


def try_changes(
    scene: Scene, records: list[ProcessRecord], result: RunResult, budget: Budget
) -> tuple[RunResult, list[str]]:
    """The result with a change that cures its first incident, and lines that say more."""
    found = next((i for i in result.incidents if i.origin is not None and i.origin.exact), None)
    seen = tree.first_incident(records)
    if found is None or seen is None or not may_try(scene, records):
        return result, []
    folder = seen[0].folder or str(scene.plan.guard["folder"])
    patches = patches_for(found, folder=folder, files=_own_files(scene, folder))
    if not patches:
        return result, []
    reached = seen[0].seconds or 0.0
    if reached > scene.options.prove:
        command = scene.again("--prove", str(int(10 + 4 * reached)))
        return result, [f"No change was tried, because that takes longer. To try some: {command}"]
    try:
        with sign_of_life(f"trying changes, for at most {max(1, budget.left):.0f} s"):
            cured, tried = _first_that_holds(
                scene, found, patches, budget, folder=folder, held=holding(scene, records)
            )
    except SandboxError as error:
        return result, [f"No change was tried: {error}"]
    if cured is None:
        return result, [_none_holds(tried, len(patches))]
    incidents = tuple(cured if each is found else each for each in result.incidents)
    return dataclasses.replace(result, incidents=incidents), []


def _none_holds(tried: int, ideas: int) -> str:
    if tried < ideas:
        return f"{count(tried, 'change')} of {ideas} tried in the time of --prove; none holds."
    return f"{count(tried, 'change')} tried; none holds, so none is shown."


def _own_files(scene: Scene, folder: str) -> list[str]:
    """The script, and what it has imported of the same project."""
    from stayfinite.capsule.sources import own_files

    target = scene.target
    path = os.path.join(scene.cwd, target.name)
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    script = [] if target.is_module or not os.path.exists(path) else [path]
    known = set(map(os.path.realpath, script))
    return [*script, *(file for file in own_files(folder) if file not in known)]


def _first_that_holds(
    scene: Scene,
    incident: Incident,
    patches: list[Patch],
    budget: Budget,
    *,
    folder: str,
    held: Holding,
) -> tuple[Incident | None, int]:
    """The incident with the first change that holds, and how many were tried."""
    for number, patch in enumerate(patches):
        if budget.left <= 0:
            return None, number
        trial = _try(scene, patch, incident, budget, number=number, held=held)
        if trial.holds:
            return _cured(incident, patch, trial, folder=folder), number + 1
    return None, len(patches)


def _cured(incident: Incident, patch: Patch, trial: Trial, *, folder: str) -> Incident:
    diagnosis = incident.diagnosis
    assert diagnosis is not None
    diagnosis = dataclasses.replace(
        diagnosis,
        patch=patch.diff(folder=folder),
        evidence=(*diagnosis.evidence, evidence_of(trial, patch.what)),
    )
    sure = "proven" if is_proven(incident, changed_file=patch.file) else diagnosis.confidence
    return dataclasses.replace(incident, diagnosis=dataclasses.replace(diagnosis, confidence=sure))


def _try(
    scene: Scene, patch: Patch, incident: Incident, budget: Budget, *, number: int, held: Holding
) -> Trial:
    """Run the script with the change, until it goes bad, ends, or the time is up."""
    folder = os.path.join(scene.plan.folder, f"trial-{number}")
    os.mkdir(folder)
    text = os.path.join(folder, "changed.py")
    with open(text, "w", encoding="utf-8", newline="") as file:
        file.write(patch.after)
    plan = Plan(
        folder=folder,
        guard=scene.plan.guard,
        repeat=scene.plan.folder,
        run_dir=os.path.join(folder, "run"),
        command=scene.plan.command,
        instead={patch.file: text},
        **held,
    ).with_guard(on_nan="stop", trace="never", arm_at=None)
    plan.save()
    process = start(scene, plan)
    try:
        while process.poll() is None and budget.left > 0 and not has_incident(plan):
            time.sleep(_PAUSE)
        code = process.poll()
    finally:
        end(process)
    if (reason := why_unheld(plan)) is not None:
        raise SandboxError(reason)
    return _judged(plan, incident, code)


def _judged(plan: Plan, incident: Incident, code: int | None) -> Trial:
    run = Run(Path(str(plan.run_dir)))
    run.refresh()
    losses = run.series["loss"] if run.ranks else []
    records = tree.load(plan.folder)
    counted = max((record.result.steps for record in records), default=0)
    return Trial(
        bad_step=incident.step,
        further=_FURTHER,
        steps=max(run.steps if run.ranks else 0, counted),
        losses=tuple(loss for loss in losses if loss is not None),
        went_bad=has_incident(plan),
        exit_code=code,
        was_refused=refusal(records) is not None,
    )
