"""Runs of the script that prove something: trials of changes, and experiments."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stayfinite.errors import SandboxError
from stayfinite.explain.proof import IN_PLACE, Trial, evidence_of, is_proven
from stayfinite.patch.candidates import patches_for
from stayfinite.patch.edit import Patch
from stayfinite.records import Diagnosis, Incident, from_json
from stayfinite.report.store.reading import Run
from stayfinite.runner.case import (
    Case,
    has_incident,
    refusal,
    run_child,
    sign_of_life,
    why_not_again,
)
from stayfinite.runner.plan import Effect, LabOrder, load_records
from stayfinite.runner.watcher import Watch, open_post
from stayfinite.safely import step_aside
from stayfinite.text import count

if TYPE_CHECKING:
    from stayfinite.guard.lab import Bench

_FURTHER = 20  # steps beyond the bad one that a change has to hold for
_SLOWER = 1.5  # a traced run, at least


def _may_try(case: Case) -> bool:
    """Whether the script may be run again to prove something."""
    scene = case.scene
    return scene.options.prove > 0 and not scene.is_rank and why_not_again(case) is None


def try_changes(case: Case) -> Case:
    """The case with a change that cures its first exact incident, and notes that say more."""
    scene, found, seen = case.scene, case.exact, case.first
    if found is None or seen is None or not _may_try(case):
        return case
    patches = patches_for(found, folder=case.folder, files=_own_files(case))
    if not patches:
        return case
    reached = seen[0].seconds or 0.0
    held = found.diagnosis is not None and found.diagnosis.patch is not None  # on the bad step
    if held and 2 * reached > case.budget.left:
        return case
    if reached > scene.options.prove:
        command = scene.again("--prove", str(int(10 + 4 * reached)))
        return case.with_notes(
            f"No change was tried, because that takes longer. To try some: {command}"
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


def _own_files(case: Case) -> list[str]:
    """The script, and what it has imported of the same project."""
    from stayfinite.capsule.make import own_files

    target = case.scene.target
    path = os.path.join(case.scene.cwd, target.name)
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    script = [] if target.is_module or not os.path.exists(path) else [path]
    known = set(map(os.path.realpath, script))
    return [*script, *(file for file in own_files(case.folder) if file not in known)]


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


def experiment(case: Case) -> Case:
    """The case with what experiments showed about its first exact incident."""
    found, seen = case.exact, case.first
    if found is None or found.diagnosis is None or seen is None:
        return case
    seconds = case.budget.left
    is_soon = (seen[0].seconds or 0.0) * _SLOWER < seconds
    is_alone = not any(record.in_group or record.rank for record in case.records)
    if not (is_soon and is_alone and hasattr(os, "fork") and _may_try(case)):
        return case
    with step_aside("making experiments"):
        with sign_of_life(f"making experiments on step {found.step}, for at most {seconds:.0f} s"):
            diagnosis = _ask(case, found, seconds=seconds)
        if diagnosis is not None:
            joined = _joined(found.diagnosis, diagnosis)
            return case.with_incident(found, dataclasses.replace(found, diagnosis=joined))
    return case


def _joined(before: Diagnosis, after: Diagnosis) -> Diagnosis:
    """With all evidence; that of a change that was tried comes last, and what it proves stays."""
    tried = before.evidence[-1:] if before.patch else ()
    evidence = (*(said for said in after.evidence if said not in tried), *tried)
    sure = before.confidence if before.confidence == "proven" else after.confidence
    return dataclasses.replace(after, evidence=evidence, confidence=sure)


def _ask(case: Case, incident: Incident, *, seconds: float) -> Diagnosis | None:
    """What a run says that makes experiments; it knows the whole path of the incident's file."""
    origin = incident.origin
    if origin is not None and origin.file is not None:
        origin = dataclasses.replace(origin, file=os.path.join(case.folder, origin.file))
    incident = dataclasses.replace(incident, origin=origin)
    plan = case.plan_for("lab", "lab", trace="start", arm_at=None)
    path = os.path.join(plan.folder, "diagnosis.json")
    order = LabOrder(incident=incident, seconds=seconds, result=path)
    with contextlib.suppress(SandboxError):
        run_child(case.scene, dataclasses.replace(plan, lab=order), seconds=seconds)
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return from_json(Diagnosis, file.read())


_leave = os._exit  # as it is before a watch makes it tell of the end


class LabReporter:
    """Runs the script to its bad step; from there children of it go on, and tell what they see."""

    def __init__(self, watch: Watch, order: LabOrder) -> None:
        self._watch, self._order = watch, order
        self._bench: Bench | None = None

    def attach(self) -> Callable[[], None]:
        from stayfinite.guard.lab import Bench

        self._bench = Bench(
            self._order.incident,
            folder=self._watch.plan.folder,
            result=self._order.result,
            deadline=self._watch.plan.started + self._order.seconds,
            leave=_leave,
        )
        post = open_post(self._watch, on_incident=self._tell)
        self._bench.attach(post.guard)
        return post.close

    def _child(self) -> Bench | None:
        return self._bench if self._bench is not None and self._bench.is_child else None

    def _tell(self, incident: Incident) -> None:
        if (bench := self._child()) is not None:
            bench.answer(incident)

    def crashed(self, error: BaseException) -> None:
        if (bench := self._child()) is not None:
            bench.crashed(error)

    def refused(self, effect: Effect) -> None:
        """It is noted."""

    def end(self) -> None:
        """The script is over; in a child that means that it stayed finite."""
        if (bench := self._child()) is not None:
            bench.answer(None)
        if self._watch.post is not None and not self._watch.is_muted:
            self._watch.post.close()

    def after_fork(self) -> bool:
        """A child of ours is still the same script; one of the script's own is not."""
        if self._bench is not None and self._bench.is_forking:
            return False
        if self._watch.guard is not None:
            self._watch.guard.after_fork()
        return True
