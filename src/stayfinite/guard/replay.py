"""A bad step run once more, to see which operation made it bad and to experiment on it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from stayfinite.detect.hooks import run_again
from stayfinite.errors import NonFiniteError, TrainingAbortedError
from stayfinite.explain.experiments import (
    CannotReplayError,
    Change,
    Lab,
    Seen,
    experiment,
    judged,
    with_reason,
    with_samples,
)
from stayfinite.guard.conditions import (
    KEPT_FOR,
    KeptInside,
    Split,
    clip_updates,
    in_float32,
    in_float64,
    multiply_scale,
)
from stayfinite.guard.job import Job, finding_of
from stayfinite.locate.loss_terms import only_term
from stayfinite.records import Diagnosis, Incident, Origin
from stayfinite.recover.actions import lower_rates
from stayfinite.recover.float32 import raised
from stayfinite.snapshot import RandomState, Snapshot
from stayfinite.snapshot.walk import PARTS
from stayfinite.training import pairs_of, params_of, put_gradients

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard


logger = logging.getLogger("stayfinite")
_LOW = ("float16", "bfloat16")
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
NO_BATCH = object()
_MOST_TIMES = 3  # for one place


class Reruns(Protocol):
    """Who can run the bad step that is under way once more.

    If that is not the whole step, its batch is what the model was given, in whatever order.
    """

    is_whole: bool

    def run(self, batch: Any, *, traced: bool) -> Incident | None:
        """What is bad when it runs with this batch, or its own for NO_BATCH; no update happens."""

    def put_back(self) -> None:
        """Undo what a run has left behind."""

    def run_before(self, since: int) -> bool:
        """Run the steps from this one on again, up to the bad one; whether all were good."""


class StepReplays:
    """One bad step under changed conditions.

    `batch` is NO_BATCH where whoever runs it keeps it to himself, or has several.
    """

    def __init__(
        self, guard: Guard, job: Job, incident: Incident, reruns: Reruns, batch: Any
    ) -> None:
        self._guard, self._job, self._reruns, self._batch = guard, job, reruns, batch
        self._origin = incident.origin if incident.origin is not None else Origin(phase="forward")
        self._cause = incident.diagnosis.cause if incident.diagnosis else "unknown"
        self.split = None if batch is NO_BATCH else Split(batch)
        self._whole: Snapshot = job.state.capture()

    @property
    def rows(self) -> int:
        return 0 if self.split is None else self.split.rows

    @property
    def values(self) -> int:
        return 0 if self.split is None else self.split.values

    @property
    def terms(self) -> tuple[str, ...]:
        """Of a step whose backward pass went bad; in a forward pass the values tell."""
        if self._job.parts.scaler is not None:  # a term alone would go without its scale
            return ()
        return tuple(name for name, _ in self._origin.facts.get("term", {}).get("terms", ()))

    @property
    def snapshots(self) -> int:
        return len(self._earlier())

    def run(self, change: Change) -> Seen:
        """Run it with the change, and put everything back."""
        batch = self._changed_batch(change)
        try:
            with self._conditions(change):
                found = self._reruns.run(batch, traced=not change.is_compiled)
            return seen_of(found, change)
        finally:
            self._reruns.put_back()
            self._job.state.restore(self._whole, rewind_loader=False)

    def _changed_batch(self, change: Change) -> Any:
        batch = self._batch
        if change.rows is not None:
            if self.split is None or not self.split.rows:
                raise CannotReplayError("the batch cannot be split")
            batch = self.split.only(change.rows)
            if change.replaced is not None and change.donor is not None:
                batch = self.split.with_values(batch, *change.replaced, change.donor)
        if change.precision is not None and batch is not NO_BATCH:
            batch = in_float64(batch) if change.precision == "float64" else in_float32(batch)
        return batch

    @contextlib.contextmanager
    def _conditions(self, change: Change) -> Iterator[None]:
        if change.steps:
            self._come_again(change)
        begun = inside = None
        with contextlib.ExitStack() as all_of_them:
            if change.term is not None:
                begun = all_of_them.enter_context(
                    only_term(change.term, lambda: self._guard.past.tracing.nodes)
                )
            if change.precision is not None:
                dtype = higher_dtype(change.precision, self._origin)
                all_of_them.enter_context(raised(self._job.parts.modules, dtype))
            if change.is_compiled and not _has_compiled(self._job.parts.modules):
                raise CannotReplayError("nothing is compiled")
            if change.snapshot is not None:
                self._earlier()[change.snapshot].restore(parts=("parameters", "buffers"))
            if change.is_guarded:
                inside = all_of_them.enter_context(kept_inside(self._cause, self._origin))
            yield
            if inside is not None and not inside.applied:
                raise CannotReplayError("the operation could not be guarded")
            if begun is not None and len(begun) != 1:
                raise CannotReplayError("there is not one backward pass from a sum")

    @property
    def steps(self) -> int:
        """How many steps before it can be run again."""
        earlier = self._earlier()
        return self._job.good_steps - earlier[0].step if earlier else 0

    def _come_again(self, change: Change) -> None:
        """Come to the step anew, from the last snapshot, under other conditions."""
        parts, factor = self._job.parts, change.learning_rate
        if change.loss_scale != 1.0 and parts.scaler is None:
            raise CannotReplayError("there is no loss scale")
        groups = parts.optimizer.param_groups
        snapshot, usual = self._earlier()[0], [float(group["lr"]) for group in groups]
        random = RandomState.capture()
        snapshot.restore(parts=[part for part in PARTS if part != "loader"])
        lower_rates(parts.optimizer, parts.schedulers, factor)
        if change.loss_scale != 1.0:
            multiply_scale(parts.scaler, change.loss_scale)
        clipped = [] if change.clip is None else [parts.optimizer]
        clipping = clip_updates(clipped, max_norm=change.clip or 0.0)
        try:
            is_good = self._reruns.run_before(snapshot.step)
        finally:
            clipping.remove()
        random.restore()
        ends = zip(parts.optimizer.param_groups, usual, strict=True)
        is_same = all(math.isclose(float(g["lr"]), r * factor, rel_tol=1e-6) for g, r in ends)
        if not (is_good and is_same):
            raise CannotReplayError("the steps before it went another way")

    def _earlier(self) -> list[Snapshot]:
        """The snapshots of steps before this one, the newest first."""
        ring, now = self._job.ring, self._job.good_steps
        kept = [snapshot for k in range(len(ring)) if (snapshot := ring.back(k)) is not None]
        return [snapshot for snapshot in kept if snapshot.step < now]


def _has_compiled(roots: Iterable[nn.Module]) -> bool:
    # Whoever compiles has imported it, and it takes seconds: it is not imported to ask.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    modules = (module for root in roots for module in root.modules())
    return dynamo is not None and any(isinstance(m, dynamo.OptimizedModule) for m in modules)


def higher_dtype(precision: str, origin: Origin) -> torch.dtype:
    """The type to compute in; CannotReplayError if it is no higher than the one that went bad."""
    dtypes = {each.dtype for each in origin.outputs}
    if precision == "float32" and not dtypes & set(_LOW):
        raise CannotReplayError("it is not in a lower precision")
    return _DTYPES[precision]


def kept_inside(cause: str, origin: Origin) -> KeptInside:
    """The guard for the operation that went bad; CannotReplayError if there is none."""
    if cause not in KEPT_FOR or origin.file is None or origin.line is None:
        raise CannotReplayError("there is no guard for it")
    return KeptInside(cause, file=origin.file, line=origin.line)


def seen_of(found: Incident | None, change: Change) -> Seen:
    """What the incident of a replay shows; CannotReplayError if the change did not take."""
    if found is None:
        return Seen(is_finite=True)
    kind = found.reports[0].nan_type
    origin = found.origin
    if origin is None:
        return Seen(is_finite=False, kind=kind)
    dtypes = {each.dtype for each in origin.outputs}
    if change.precision is not None and dtypes & {*_LOW, "float32"} - {change.precision}:
        raise CannotReplayError("the step goes back to a lower precision by itself")
    return Seen(is_finite=False, op=origin.op, file=origin.file, line=origin.line, kind=kind)


def prove(
    guard: Guard, job: Job, incident: Incident, reruns: Reruns, batch: Any = NO_BATCH
) -> Incident:
    """The incident with what experiments showed; as it was if there is no time for any.

    The state is as before afterwards. An error of ours is logged and goes no further.
    """
    seconds, origin, diagnosis = guard.settings.prove_seconds, incident.origin, incident.diagnosis
    if not seconds or origin is None or diagnosis is None or job.is_distributed:
        return incident
    place = (origin.file, origin.line, diagnosis.cause)
    guard.examined.append(place)
    if guard.examined.count(place) > _MOST_TIMES:
        return incident
    try:
        is_diverging = guard.is_diverging(incident, job.parts.optimizer)
        with guard.evidence.kept():
            placed = dataclasses.replace(incident, origin=absolute(origin, guard.settings.folder))
            replays = StepReplays(guard, job, placed, reruns, batch)
            lab = Lab(replays, seconds=seconds)
            steps = replays.steps
            findings = experiment(lab, diagnosis, origin, steps=steps, is_diverging=is_diverging)
    except NonFiniteError:
        return incident  # the state was bad before the step: there is nothing to go back to
    except TrainingAbortedError:
        raise
    except Exception:
        logger.warning("the experiments on a bad step failed", exc_info=True)
        return incident
    is_alone = not reruns.is_whole
    delivery = (
        None if batch is NO_BATCH else guard.past.tracing.deliveries.of(batch, exactly=is_alone)
    )
    if delivery is not None and len(delivery.indices or ()) == replays.rows:
        indices, dataset = delivery.indices, delivery.dataset
        findings = [with_samples(each, indices, dataset) for each in findings]
    judgement = judged(diagnosis, origin, findings, is_diverging=is_diverging)
    why_not = replays.split.why_not if replays.split is not None else None
    return dataclasses.replace(incident, diagnosis=with_reason(judgement, why_not))


def absolute(origin: Origin, folder: str | None) -> Origin:
    """With the whole path of its file."""
    if origin.file is None or folder is None:
        return origin
    return dataclasses.replace(origin, file=os.path.join(folder, origin.file))


_MOST = 20
CLEAN_AGAIN = Diagnosis(
    cause="transient_fault",
    why="The same step, run again from the same state, was finite: it does not repeat.",
    fix="Look for a hardware fault or a non-deterministic operation if it happens again.",
    confidence="likely",
    evidence=("the step was replayed with the same batch, weights and random state",),
)


class Replay:
    """Calls `again(batch)`, which runs the step under way up to its update, and may raise.

    It is given NO_BATCH for the batches that the step had, or, in experiments, others in the
    place of `batch()`; that is NO_BATCH where there are several. If it is not the whole step
    that is run, one that is finite says nothing. `again` raises CannotReplayError where it finds
    that it cannot run this step; nothing more is said of it then.
    """

    def __init__(
        self,
        guard: Guard,
        again: Callable[[Any], Any],
        *,
        batch: Callable[[], Any] = lambda: NO_BATCH,
        is_whole: bool = True,
    ) -> None:
        self._guard, self._again, self._batch, self.is_whole = guard, again, batch, is_whole
        self._left = _MOST

    def locate(self, job: Job, noticed: Incident) -> Incident:
        """The incident with origin and diagnosis; the state is that of the step's beginning."""
        if not self._left or (noticed.origin is not None and noticed.origin.exact):
            return noticed
        self._left -= 1
        try:
            found = self.find(job)
        except CannotReplayError:
            return noticed
        except Exception:
            logger.warning(
                "a step could not be replayed; where it went bad is not known", exc_info=True
            )
            return noticed
        finally:
            job.undo()
        if found is None:
            return dataclasses.replace(noticed, diagnosis=CLEAN_AGAIN) if self.is_whole else noticed
        known = dataclasses.replace(noticed, origin=found.origin, diagnosis=found.diagnosis)
        return prove(self._guard, job, known, _ReplayReruns(self, job), self._batch())

    def find(self, job: Job, batch: Any = NO_BATCH) -> Incident | None:
        """What is bad this time."""
        params = params_of(job.parts.optimizer)
        before, trouble = [(param, param.grad) for param in params], job.trouble
        job.trouble = None
        try:
            with run_again(), self._guard.traced():
                job.undo()
                self._again(batch)
                finding = finding_of(job, pairs_of(job.parts.optimizer))
                return self._guard.incident(finding, strategy="recover") if finding.named else None
        finally:
            job.trouble = trouble
            put_gradients(before)


class _ReplayReruns:
    """The step that a framework replays, for experiments."""

    def __init__(self, replay: Replay, job: Job) -> None:
        self._replay, self._job = replay, job
        self.is_whole = replay.is_whole
        self.put_back = job.undo

    def run(self, batch: Any, *, traced: bool) -> Incident | None:
        if not traced:
            raise CannotReplayError("it is only run under the tracer")
        return self._replay.find(self._job, batch)

    def run_before(self, since: int) -> bool:
        raise CannotReplayError("the steps before it are not known")
