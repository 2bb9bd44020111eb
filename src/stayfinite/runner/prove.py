"""Runs of the script that prove something: trials of changes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from stayfinite.errors import SandboxError
from stayfinite.explain.experiments import IN_PLACE, Trial, evidence_of, is_proven
from stayfinite.patch.candidates import patches_for
from stayfinite.patch.edit import Patch
from stayfinite.records import Incident
from stayfinite.report.store.reading import Run
from stayfinite.runner.case import (
    Case,
    has_incident,
    refusal,
    run_child,
    sign_of_life,
    why_not_again,
)
from stayfinite.runner.plan import load_records
from stayfinite.text import count

_FURTHER = 20  # steps beyond the bad one that a change has to hold for


def _may_try(case: Case) -> bool:
    """Whether the script may be run again to prove something."""
    scene = case.scene
    return scene.options.prove > 0 and not scene.is_rank and why_not_again(case) is None


def try_changes(case: Case) -> Case:
    """The case with a change that cures its first exact incident, and notes that say more."""
    scene, found, seen = case.scene, case.exact, case.first
    if found is None or seen is None or not _may_try(case):
        return case
    from stayfinite.capsule.make import own_files

    files = own_files(case.folder, _script_of(case))
    patches = patches_for(found, folder=case.folder, files=files)
    if not patches:
        return case
    reached = seen[0].seconds or 0.0
    held = found.diagnosis is not None and found.diagnosis.patch is not None  # on the bad step
    if held and 2 * reached > case.budget.left:
        return case
    if reached > scene.options.prove:
        command = scene.again("--prove", str(int(10 + 4 * reached)))
        return case.with_notes(
            f"No change was tried: there was not enough time. To try some: {command}"
        )
    try:
        with sign_of_life(f"trying changes, for at most {max(1, case.budget.left):.0f} s"):
            cured, tried = _first_that_holds(case, found, patches)
    except SandboxError as error:
        return case.with_notes(f"No change was tried: {error}")
    if cured is not None:
        return case.with_incident(found, cured)
    if held and tried < len(patches):
        return case
    changes = count(tried, "change")
    if tried < len(patches):
        return case.with_notes(
            f"{changes} of {len(patches)} tried in the time of --prove; none holds."
        )
    return case.with_notes(f"{changes} tried; none holds, so none is shown.")


def _script_of(case: Case) -> str | None:
    target = case.scene.target
    path = os.path.join(case.scene.cwd, target.name)
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    return None if target.is_module or not os.path.exists(path) else path


def _first_that_holds(
    case: Case, incident: Incident, patches: list[Patch]
) -> tuple[Incident | None, int]:
    """The incident with the first change that holds, and how many were tried."""
    for number, patch in enumerate(patches):
        if case.budget.left <= 0:
            return None, number
        trial = _try(case, patch, incident, number=number)
        if trial.holds:
            return _cured(incident, patch, trial, folder=case.folder), number + 1
    return None, len(patches)


def _cured(incident: Incident, patch: Patch, trial: Trial, *, folder: str) -> Incident:
    diagnosis = incident.diagnosis
    assert diagnosis is not None
    kept = [each for each in diagnosis.evidence if not each.startswith(IN_PLACE)]
    diagnosis = dataclasses.replace(diagnosis, evidence=tuple(kept))
    sure = "proven" if is_proven(incident, changed_file=patch.file) else diagnosis.confidence
    diagnosis = dataclasses.replace(
        diagnosis,
        patch=patch.diff(folder=folder),
        evidence=(*diagnosis.evidence, evidence_of(trial, patch.what)),
        confidence=sure,
    )
    return dataclasses.replace(incident, diagnosis=diagnosis)


def _try(case: Case, patch: Patch, incident: Incident, *, number: int) -> Trial:
    """Run the script with the change, until it goes bad, ends, or the time is up."""
    plan = case.plan_for("trial", f"trial-{number}", trace="never", arm_at=None)
    text = os.path.join(plan.folder, "changed.py")
    with open(text, "w", encoding="utf-8", newline="") as file:
        file.write(patch.after)
    run_dir = os.path.join(plan.folder, "run")
    plan = dataclasses.replace(plan, run_dir=run_dir, instead={patch.file: text})
    code = run_child(case.scene, plan, seconds=case.budget.left, grace=0.0)
    run = Run(Path(run_dir))
    run.refresh()
    losses = run.series["loss"] if run.ranks else []
    records = load_records(plan.folder)
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
