"""Runs of the script that prove something: trials of changes, and experiments."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stayfinite.errors import SandboxError
from stayfinite.explain.proof import Trial, evidence_of, is_proven
from stayfinite.patch.candidates import patches_for
from stayfinite.patch.edit import Patch
from stayfinite.records import Diagnosis, Incident, RunResult, from_json
from stayfinite.report.store.reading import Run
from stayfinite.runner.options import Scene
from stayfinite.runner.plan import (
    Effect,
    LabOrder,
    Plan,
    ProcessRecord,
    first_incident,
    load_records,
)
from stayfinite.runner.second_run import (
    Holding,
    end,
    has_incident,
    holding,
    refusal,
    sign_of_life,
    start,
    why_not,
    why_unheld,
)
from stayfinite.runner.watcher import Watch, open_post
from stayfinite.safely import step_aside
from stayfinite.text import count

if TYPE_CHECKING:
    from stayfinite.guard.lab import Bench


_TRIAL_PAUSE = 0.1  # seconds between two looks at a trial
_FURTHER = 20  # steps beyond the bad one that a change has to hold for


def try_changes(
    scene: Scene, records: list[ProcessRecord], result: RunResult, budget: Budget
) -> tuple[RunResult, list[str]]:
    """The result with a change that cures its first incident, and lines that say more."""
    found = next((i for i in result.incidents if i.origin is not None and i.origin.exact), None)
    seen = first_incident(records)
    if found is None or seen is None or not may_try(scene, records):
        return result, []
    folder = seen[0].folder or scene.plan.script_folder
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
    from stayfinite.capsule.make import own_files

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
        purpose="trial",
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
            time.sleep(_TRIAL_PAUSE)
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


_SLOWER = 1.5  # a traced run, at least
_EXPERIMENT_PAUSE = 0.05


def experiment(
    scene: Scene, records: list[ProcessRecord], result: RunResult, budget: Budget
) -> RunResult:
    """The result with what experiments showed about its first incident."""
    found = next((i for i in result.incidents if i.origin is not None and i.origin.exact), None)
    seen = first_incident(records)
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
    folder = record.folder or scene.plan.script_folder
    path = None if origin.file is None else os.path.join(folder, origin.file)
    return dataclasses.replace(incident, origin=dataclasses.replace(origin, file=path))


def _asked(scene: Scene, incident: Incident, *, seconds: float, held: Holding) -> Diagnosis | None:
    folder = os.path.join(scene.plan.folder, "lab")
    os.mkdir(folder)
    path = os.path.join(folder, "diagnosis.json")
    plan = Plan(
        folder=folder,
        purpose="lab",
        guard=scene.plan.guard,
        repeat=scene.plan.folder,
        command=scene.plan.command,
        lab=LabOrder(incident=incident, seconds=seconds, result=path),
        **held,
    ).with_guard(on_nan="stop", trace="start", arm_at=None)
    plan.save()
    process, stop = start(scene, plan), time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < stop:
            time.sleep(_EXPERIMENT_PAUSE)
    finally:
        end(process)
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
        from stayfinite.guard.lab import Bench, LabGuard

        self._bench = Bench(
            self._order.incident,
            folder=self._watch.plan.folder,
            result=self._order.result,
            deadline=self._watch.plan.started + self._order.seconds,
            leave=_leave,
        )
        guard = LabGuard(self._watch.plan.guard, on_incident=self._tell)
        guard.bench = self._bench
        post = open_post(self._watch, guard)
        self._bench.attach(guard)
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


@dataclass
class Budget:
    """Seconds that may be spent in all."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.began + self.seconds - time.monotonic()


def may_try(scene: Scene, records: list[ProcessRecord]) -> bool:
    """Whether the script may be run again to prove something."""
    return scene.options.prove > 0 and not scene.is_rank and why_not(scene, records) is None
