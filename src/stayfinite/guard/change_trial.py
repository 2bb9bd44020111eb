"""Changes of the source tried on the bad step, in place."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stayfinite.budget import Budget
from stayfinite.explain.experiments import IN_PLACE, Trial, is_proven
from stayfinite.patch.candidates import patches_for
from stayfinite.patch.edit import Patch
from stayfinite.records import Incident
from stayfinite.replay.swap import changed_loop, swapped

if TYPE_CHECKING:
    from stayfinite.guard.loop_replay import StepAgain

logger = logging.getLogger("stayfinite")


def with_change(
    step: StepAgain, incident: Incident, *, seconds: float, losses: Sequence[float]
) -> Incident:
    """The incident with the first change of the source that makes the same step finite, if any.

    `losses` are those of the steps before.
    """
    from stayfinite.capsule.make import own_files

    folder, budget = step.replay.folder or os.getcwd(), Budget(seconds)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for patch in patches_for(incident, folder=folder, files=own_files(folder, script)):
        if budget.left <= 0:
            break
        try:
            loss = _loss_with(patch, step)
        except Exception:
            logger.debug("a change could not be tried in place", exc_info=True)
            continue
        if loss is not None and _learns(losses, loss):
            return _changed(incident, patch, loss, folder)
    return incident


def _loss_with(patch: Patch, step: StepAgain) -> float | None:
    """The loss of the same step with the change; None if it is bad, or was not run."""
    loop = step.turn.loop
    is_loops_file = os.path.realpath(patch.file) == os.path.realpath(loop.file)
    changed = changed_loop(loop, patch.after) if is_loops_file else None
    with swapped(patch.file, patch.after) as is_changed:
        if changed is None and not is_changed:
            return None
        found = step.run() if changed is None else step.run(loop=changed, line=None)
    is_good = found.incident is None and found.came_to_end and found.loss is not None
    return found.loss if is_good else None


def _learns(losses: Sequence[float], loss: float) -> bool:
    """Whether the loss is one that training could go on from: it must not shoot up."""
    finite = [each for each in losses if math.isfinite(each)]
    trial = Trial(
        bad_step=len(finite), further=0, steps=len(finite) + 1, losses=(*finite, loss), exit_code=0
    )
    return trial.holds


def _changed(incident: Incident, patch: Patch, loss: float, folder: str) -> Incident:
    diagnosis = incident.diagnosis
    if diagnosis is None:
        return incident
    sure = "proven" if is_proven(incident, changed_file=patch.file) else diagnosis.confidence
    said = f"{IN_PLACE}, loss {loss:.3g}. {patch.what}"
    diagnosis = dataclasses.replace(
        diagnosis,
        patch=patch.diff(folder=folder),
        evidence=(*diagnosis.evidence, said),
        confidence=sure,
    )
    return dataclasses.replace(incident, diagnosis=diagnosis)
