"""Experiments on a bad step of ours: what is run, and how all is put back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._dynamo.eval_frame import OptimizedModule

from stayfinite.errors import NonFiniteError, TrainingAbortedError
from stayfinite.explain.experiments.findings import Finding
from stayfinite.explain.experiments.lab import Lab
from stayfinite.explain.experiments.replays import CannotReplayError, Change, Seen
from stayfinite.explain.experiments.verdict import experiment, judged
from stayfinite.guard.job import Job
from stayfinite.guard.raising import raised
from stayfinite.guard.splitting import Split, in_float32, in_float64
from stayfinite.locate.domains import KEPT_FOR, KeptInside
from stayfinite.locate.lossgraph import only_term
from stayfinite.locate.samples import Delivery
from stayfinite.records import Diagnosis, Incident, Origin
from stayfinite.snapshot import RandomState, Snapshot
from stayfinite.snapshot.census import PARTS

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard

logger = logging.getLogger("stayfinite")
_LOW = ("float16", "bfloat16")
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
NO_BATCH = object()
_MOST_TIMES = 3  # for one place


class Attempts(Protocol):
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
        self, guard: Guard, job: Job, incident: Incident, attempts: Attempts, batch: Any
    ) -> None:
        self._guard, self._job, self._attempts, self._batch = guard, job, attempts, batch
        self._origin, self._cause = _known(incident)
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
                found = self._attempts.run(batch, traced=not change.is_compiled)
            return _seen(found, change)
        finally:
            self._attempts.put_back()
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
            self._come_again(change.learning_rate)
        begun = None
        with contextlib.ExitStack() as all_of_them:
            if change.term is not None:
                begun = all_of_them.enter_context(only_term(change.term, self._guard.node_sites))
            if change.precision is not None:
                all_of_them.enter_context(self._in_precision(change.precision))
            if change.is_compiled and not self._is_compiled():
                raise CannotReplayError("nothing is compiled")
            if change.snapshot is not None:
                self._earlier()[change.snapshot].restore(parts=("parameters", "buffers"))
            inside = all_of_them.enter_context(self._kept_inside()) if change.is_guarded else None
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

    def _come_again(self, factor: float) -> None:
        """Come to the step anew, from the last snapshot, with another learning rate."""
        snapshot, usual = self._earlier()[0], _rates(self._job)
        random = RandomState.capture()
        snapshot.restore(parts=[part for part in PARTS if part != "loader"])
        multiply_rates(self._job, factor)
        is_good = self._attempts.run_before(snapshot.step)
        random.restore()
        ends = zip(_rates(self._job), usual, strict=True)
        if not is_good or any(not math.isclose(a, b * factor, rel_tol=1e-6) for a, b in ends):
            raise CannotReplayError("the steps before it went another way")

    def _in_precision(self, precision: str) -> contextlib.AbstractContextManager[None]:
        dtypes = {each.dtype for each in self._origin.outputs}
        if precision == "float32" and not dtypes & set(_LOW):
            raise CannotReplayError("it is not in a lower precision")
        return raised(self._job.parts.modules, _DTYPES[precision])

    def _kept_inside(self) -> KeptInside:
        origin = self._origin
        if self._cause not in KEPT_FOR or origin.file is None or origin.line is None:
            raise CannotReplayError("there is no guard for it")
        return KeptInside(self._cause, file=origin.file, line=origin.line)

    def _earlier(self) -> list[Snapshot]:
        """The snapshots of steps before this one, the newest first."""
        ring, now = self._job.ring, self._job.good_steps
        kept = [snapshot for k in range(len(ring)) if (snapshot := ring.back(k)) is not None]
        return [snapshot for snapshot in kept if snapshot.step < now]

    def _is_compiled(self) -> bool:
        roots = self._job.parts.modules
        return any(isinstance(module, OptimizedModule) for r in roots for module in r.modules())


def _rates(job: Job) -> list[float]:
    return [float(group["lr"]) for group in job.parts.optimizer.param_groups]


def multiply_rates(job: Job, factor: float) -> None:
    """Another learning rate for a while; schedules begin from it, too."""
    for group in job.parts.optimizer.param_groups:
        group["lr"] *= factor
    for scheduler in job.parts.schedulers:
        known = getattr(scheduler, "base_lrs", None)
        if known is not None:
            scheduler.base_lrs = [rate * factor for rate in known]


def _known(incident: Incident) -> tuple[Origin, str]:
    origin = incident.origin if incident.origin is not None else Origin(phase="forward")
    return origin, incident.diagnosis.cause if incident.diagnosis else "unknown"


def _seen(found: Incident | None, change: Change) -> Seen:
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


def proven(
    guard: Guard, job: Job, incident: Incident, attempts: Attempts, batch: Any = NO_BATCH
) -> Incident:
    """The incident with what experiments showed; as it was if there is no time for any.

    The state is as before afterwards. An error of ours is logged and goes no further.
    """
    seconds, origin, diagnosis = guard.settings.prove_seconds, incident.origin, incident.diagnosis
    if not seconds or origin is None or diagnosis is None or job.is_distributed:
        return incident
    place = (origin.file, origin.line, diagnosis.cause)
    guard.examined = [*guard.examined, place]
    if guard.examined.count(place) > _MOST_TIMES:
        return incident
    try:
        is_diverging = guard.is_diverging(incident, job.parts.optimizer)
        with guard.evidence.kept():
            placed = dataclasses.replace(incident, origin=_absolute(origin, guard.settings.folder))
            replays = StepReplays(guard, job, placed, attempts, batch)
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
    delivery = (
        None if batch is NO_BATCH else guard.delivery_of(batch, exactly=not attempts.is_whole)
    )
    findings = [_named(each, delivery, replays.rows) for each in findings]
    judgement = judged(diagnosis, origin, findings, is_diverging=is_diverging)
    return dataclasses.replace(incident, diagnosis=_with_reason(judgement, replays))


def _named(finding: Finding, delivery: Delivery | None, rows: int) -> Finding:
    """The finding with the dataset's numbers of the rows that it names."""
    samples = delivery.indices if delivery is not None and finding.rows else None
    if delivery is None or samples is None or len(samples) != rows:
        return finding
    names = ", ".join(f"row {row} is sample {samples[row]}" for row in finding.rows)
    said = f"{finding.sentence} ({names} of the dataset {delivery.dataset})"
    return dataclasses.replace(finding, sentence=said)


def _with_reason(diagnosis: Diagnosis, replays: StepReplays) -> Diagnosis:
    why = replays.split.why_not if replays.split is not None else None
    if why is None:
        return diagnosis
    said = f"the batch was not searched for a guilty sample: {why}"
    return dataclasses.replace(diagnosis, evidence=(*diagnosis.evidence, said))


def _absolute(origin: Origin, folder: str | None) -> Origin:
    if origin.file is None or folder is None:
        return origin
    return dataclasses.replace(origin, file=os.path.join(folder, origin.file))
