"""What is tried on the bad step of a running loop, in place: changes of its source, experiments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stayfinite.budget import Budget
from stayfinite.explain.experiments import (
    IN_PLACE,
    CannotReplayError,
    Change,
    Seen,
    Trial,
    is_proven,
)
from stayfinite.guard.conditions import Weights, changed_conditions, terms_of, weights_before
from stayfinite.guard.replay import NO_BATCH, KnownStep, samples_of, seen_of
from stayfinite.living import has_compiled_module, living
from stayfinite.patch.candidates import patches_for
from stayfinite.patch.edit import Patch
from stayfinite.records import Incident
from stayfinite.replay.moments import GONE
from stayfinite.replay.swap import changed_loop, swapped
from stayfinite.snapshot.walk import WEIGHTS

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard
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
    """The loss of the same step with the change; None if it is bad, or was not run.

    It is run up to its update: a change may make the loss finite, and not the gradients.
    """
    loop = step.turn.loop
    is_loops_file = os.path.realpath(patch.file) == os.path.realpath(loop.file)
    changed = changed_loop(loop, patch.after) if is_loops_file else None
    with swapped(patch.file, patch.after) as is_changed:
        if changed is None and not is_changed:
            return None
        found = step.run(loop=changed or loop, line=None)
    is_good = found.came_to_end and not found.was_bad and not found.has_bad_gradients
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


class LoopExperiments(KnownStep):
    """The step under changed conditions.

    The steps before it are over. Of the last one the update can be made smaller, where its rule
    says what the weights were before.
    """

    def __init__(self, guard: Guard, step: StepAgain, incident: Incident) -> None:
        batch, optimizer = step.turn.batch, step.finding.optimizer
        jobs = list(guard.jobs.values()) if optimizer is None else [guard.jobs.get(id(optimizer))]
        job = jobs[0] if len(jobs) == 1 else None
        super().__init__(guard, job, incident, NO_BATCH if batch is GONE else batch)
        self._step = step
        self._before = self._before_last_update()

    @property
    def steps(self) -> int:
        return 1 if self._before else 0

    @property
    def terms(self) -> tuple[str, ...]:
        return terms_of(self._origin, self._guard.evidence.scaler)

    def run(self, change: Change) -> Seen:
        """Run the step with the change; everything is as before afterwards."""
        if change.clip is not None or change.loss_scale != 1.0:
            raise CannotReplayError("only this step can be run again")
        if change.is_compiled:
            return self._run_compiled()
        instead = None
        if self.split is not None and (change.rows is not None or change.precision is not None):
            instead = (self._batch, self.split.changed(change))
        elif change.rows is not None:
            raise CannotReplayError("the batch cannot be split")
        put_weights: Callable[[], None] | None = None
        if change.snapshot is not None:
            earlier = self._earlier()[change.snapshot]
            put_weights = functools.partial(earlier.restore, parts=WEIGHTS)
        elif change.learning_rate != 1.0:
            put_weights = functools.partial(self._move_less, change.learning_rate)
        with changed_conditions(
            self._guard, change, cause=self._cause, origin=self._origin, modules=living(nn.Module)
        ):
            found = self._step.run(instead=instead, put_weights=put_weights)
        if found.incident is None and not found.came_to_end:
            raise CannotReplayError(found.reason or "it did not finish")
        return seen_of(found.incident, change)

    def _before_last_update(self) -> Weights | None:
        evidence, finding = self._guard.evidence, self._step.finding
        optimizer = finding.optimizer if finding.optimizer is not None else evidence.at_work()
        if optimizer is None or not evidence.was_applied(optimizer):
            return None
        made = [each for each in self._guard.past.moments if each.optimizer == id(optimizer)]
        if not made or made[-1].gradients is None:
            return None
        with contextlib.suppress(KeyError):  # of a state that is not there
            return weights_before(optimizer, made[-1].gradients, made[-1].rates)
        return None

    @torch.no_grad()
    def _move_less(self, share: float) -> None:
        """Have the weights as if the last update had been so many times as large."""
        for param, before in self._before or ():
            param.copy_(torch.lerp(before, param, share))

    def _run_compiled(self) -> Seen:
        found = self._step.run(is_traced=False)
        if not has_compiled_module() or not (found.was_bad or found.came_to_end):
            raise CannotReplayError(found.reason or "nothing in it is compiled")
        return Seen(is_finite=not found.was_bad)

    def samples(self) -> tuple[list[Any] | None, str]:
        """The dataset's numbers of the rows, if they are known, and its name."""
        if self.split is None:
            return None, ""
        deliveries = self._guard.past.tracing.deliveries
        return samples_of(deliveries.of(self._batch), self.rows)
