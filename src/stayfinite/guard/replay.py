"""A bad step run once more, to see which operation made it bad and to experiment on it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stayfinite.detect.finite import largest
from stayfinite.detect.hooks import run_again
from stayfinite.detect.memory import local
from stayfinite.domains import HALVES
from stayfinite.errors import NonFiniteError, TrainingAbortedError
from stayfinite.explain.clue import LARGEST
from stayfinite.explain.experiments import (
    CannotReplayError,
    Change,
    Lab,
    Replays,
    Seen,
    experiment,
    judge_findings,
    with_reason,
    with_samples,
)
from stayfinite.guard.conditions import (
    Split,
    changed_conditions,
    clip_updates,
    multiply_scale,
    terms_of,
)
from stayfinite.guard.evidence import bad_gradients
from stayfinite.guard.job import Job, finding_of
from stayfinite.living import has_compiled_module, living
from stayfinite.locate.samples import Delivery
from stayfinite.records import Diagnosis, Incident, Origin, Phase
from stayfinite.recover.actions import lower_rates
from stayfinite.snapshot import RandomState, Snapshot
from stayfinite.snapshot.walk import PARTS, WEIGHTS
from stayfinite.training import Pairs, pairs_of, params_of, put_gradients

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard


logger = logging.getLogger("stayfinite")
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


class KnownStep:
    """What experiments can change of one bad step: its batch, and the weights that it began with.

    `batch` is NO_BATCH where whoever runs it keeps it to himself, or has several; without a `job`
    no earlier weights are kept.
    """

    def __init__(self, guard: Guard, job: Job | None, incident: Incident, batch: Any) -> None:
        self._guard, self._earlier_of, self._batch = guard, job, batch
        self._origin = incident.origin if incident.origin is not None else Origin(phase="forward")
        self._cause = incident.diagnosis.cause if incident.diagnosis else "unknown"
        self.split = None if batch is NO_BATCH else Split(batch)

    @property
    def rows(self) -> int:
        return 0 if self.split is None else self.split.rows

    @property
    def values(self) -> int:
        return 0 if self.split is None else self.split.values

    @property
    def snapshots(self) -> int:
        return len(self._earlier())

    def _earlier(self) -> list[Snapshot]:
        """The snapshots of steps before this one, the newest first."""
        if self._earlier_of is None:
            return []
        ring, now = self._earlier_of.ring, self._earlier_of.good_steps
        kept = [snapshot for k in range(len(ring)) if (snapshot := ring.back(k)) is not None]
        return [snapshot for snapshot in kept if snapshot.step < now]


class StepReplays(KnownStep):
    """One bad step under changed conditions."""

    def __init__(
        self, guard: Guard, job: Job, incident: Incident, reruns: Reruns, batch: Any
    ) -> None:
        super().__init__(guard, job, incident, batch)
        self._job, self._reruns = job, reruns
        self._whole: Snapshot = job.state.capture()

    @property
    def terms(self) -> tuple[str, ...]:
        return terms_of(self._origin, self._job.parts.scaler)

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
        if self.split is None:
            if change.rows is not None:
                raise CannotReplayError("the batch cannot be split")
            return NO_BATCH
        return self.split.changed(change)

    @contextlib.contextmanager
    def _conditions(self, change: Change) -> Iterator[None]:
        if change.steps:
            self._come_again(change)
        modules = self._job.parts.modules
        with changed_conditions(
            self._guard, change, cause=self._cause, origin=self._origin, modules=modules
        ):
            if change.snapshot is not None:
                self._earlier()[change.snapshot].restore(parts=WEIGHTS)
            yield

    def samples(self) -> tuple[list[Any] | None, str]:
        """The dataset's numbers of the rows, if they are known, and its name."""
        if self._batch is NO_BATCH:
            return None, ""
        deliveries, is_alone = self._guard.past.tracing.deliveries, not self._reruns.is_whole
        return samples_of(deliveries.of(self._batch, exactly=is_alone), self.rows)

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
            raise CannotReplayError("the steps before it took a different path")


def samples_of(delivery: Delivery | None, rows: int) -> tuple[list[Any] | None, str]:
    """The dataset's numbers of the rows of a batch, if they are known, and its name."""
    if delivery is None or len(delivery.indices or ()) != rows:
        return None, ""
    return delivery.indices, delivery.dataset


def seen_of(found: Incident | None, change: Change) -> Seen:
    """What the incident of a replay shows; CannotReplayError if the change did not take."""
    if found is None:
        return Seen(is_finite=True)
    kind = found.reports[0].nan_type
    origin = found.origin
    if origin is None:
        return Seen(is_finite=False, kind=kind)
    dtypes = {each.dtype for each in origin.outputs}
    if change.precision is not None and dtypes & {*HALVES, "float32"} - {change.precision}:
        raise CannotReplayError("the step goes back to a lower precision by itself")
    return Seen(
        is_finite=False,
        op=origin.op,
        file=origin.file,
        line=origin.line,
        kind=kind,
        node=origin.node,
    )


class Experiments(Replays, Protocol):
    """A step on which experiments can be made here and now."""

    split: Split | None

    @property
    def steps(self) -> int:
        """How many steps before it can be run again."""

    def samples(self) -> tuple[list[Any] | None, str]:
        """The dataset's numbers of the rows, if they are known, and its name."""


def prove(
    guard: Guard,
    incident: Incident,
    experiments_on: Callable[[Incident], Experiments],
    optimizer: Optimizer | None,
) -> Incident:
    """The incident with what experiments showed; as it was if there is no time for any.

    The state is as before afterwards. An error of ours is logged and goes no further.
    """
    seconds, origin, diagnosis = guard.settings.prove_seconds, incident.origin, incident.diagnosis
    if not seconds or origin is None or diagnosis is None or incident.world > 1:
        return incident
    place = (origin.file, origin.line, diagnosis.cause)
    guard.examined.append(place)
    if guard.examined.count(place) > _MOST_TIMES:
        return incident
    try:
        is_diverging = guard.is_diverging(incident, optimizer)
        with guard.evidence.kept():
            placed = dataclasses.replace(incident, origin=absolute(origin, guard.settings.folder))
            replays = experiments_on(placed)
            lab, steps = Lab(replays, seconds=seconds), replays.steps
            findings = experiment(lab, diagnosis, origin, steps=steps, is_diverging=is_diverging)
    except NonFiniteError:
        return incident  # the state was bad before the step: there is nothing to go back to
    except TrainingAbortedError:
        raise
    except Exception:
        logger.warning("the experiments on a bad step failed", exc_info=True)
        return incident
    findings = [with_samples(each, *replays.samples()) for each in findings]
    judgement = judge_findings(diagnosis, origin, findings, is_diverging=is_diverging)
    why_not = replays.split.why_not if replays.split is not None else None
    return dataclasses.replace(incident, diagnosis=with_reason(judgement, why_not))


def prove_step(
    guard: Guard, job: Job, incident: Incident, reruns: Reruns, batch: Any = NO_BATCH
) -> Incident:
    """The incident with what experiments on a step showed that somebody can run again."""
    if job.is_distributed:
        return incident
    return prove(
        guard,
        incident,
        lambda placed: StepReplays(guard, job, placed, reruns, batch),
        job.parts.optimizer,
    )


def absolute(origin: Origin, folder: str | None) -> Origin:
    """With the whole path of its file."""
    if origin.file is None or folder is None:
        return origin
    return dataclasses.replace(origin, file=os.path.join(folder, origin.file))


Values = list[Tensor]
"""What a run of a step has computed: a copy of each gradient, of the local shard of a DTensor."""


def values_of(pairs: Pairs) -> Values:
    return [local(gradient).detach().clone() for _, gradient in pairs]


def same_values(first: Values, again: Values) -> bool | None:
    """Whether what was finite the first time is the same again, bit by bit; None if nothing was.

    Zeros do not count: clipping by an infinite norm makes them of all that is finite.
    """
    if len(first) != len(again):
        return None
    compared = 0
    for one, two in zip(first, again, strict=True):
        if one.shape != two.shape or one.dtype != two.dtype or one.layout is not torch.strided:
            return None
        was_finite = one.isfinite() & (one != 0)
        compared += int(was_finite.sum())  # host sync
        if not torch.equal(one[was_finite], two[was_finite]):
            return False
    return True if compared else None


def passing_fault(first: Values, again: Values, once_more: Values) -> Diagnosis | None:
    """What to say of a bad step that was finite when it was run again, and then once more.

    None where the replay was another step: what was finite the first time was different then.
    """
    if same_values(again, once_more) is False:
        return NOT_REPEATABLE
    if has_compiled_module():
        return FINITE_IN_EAGER
    same = same_values(first, again)
    if same is False:
        return None
    if same is None:
        return dataclasses.replace(CLEAN_AGAIN, confidence="possible")
    said = "what was finite in its gradients the first time came out the same, bit for bit"
    return dataclasses.replace(CLEAN_AGAIN, evidence=(*CLEAN_AGAIN.evidence, said))


def is_passing(incident: Incident) -> bool:
    """Whether the step was finite when it was run again."""
    return incident.diagnosis is not None and incident.diagnosis.cause == CLEAN_AGAIN.cause


def after_exchange(
    fault: Diagnosis, gradients: Mapping[str, Tensor], part: float, *, world: int
) -> tuple[Diagnosis, Phase] | None:
    """What to say, and of which phase, of gradients that are finite on a rank by itself.

    Those that were bad had been exchanged with the other ranks, which was not done again; `part` is
    the largest magnitude that it gave to a sum in float16. None where the fault is that of
    something else.
    """
    if fault.cause != CLEAN_AGAIN.cause:
        return None
    if part * world > LARGEST["float16"]:
        return Diagnosis(
            cause="low_precision_overflow",
            why=f"The gradients of this rank are finite. It gives up to {part:.4g} to a sum over "
            f"{world} ranks in float16, which ends at 65504; with parts of this size the sum "
            "overflows.",
            fix="Divide by the number of ranks before the sum, or exchange float32 or bfloat16.",
            confidence="likely",
            evidence=fault.evidence,
        ), "distributed"
    sizes = {name: largest(tensor) for name, tensor in gradients.items() if tensor.numel()}
    name = max(sizes, key=lambda each: sizes[each], default=None)
    hook = _half_precision_hook()
    if name is not None and hook and sizes[name] > LARGEST["float16"]:
        return Diagnosis(
            cause="low_precision_overflow",
            why=f"The gradients of this rank are finite and reach {sizes[name]:.4g} "
            f"({name.removeprefix('gradients.')}); the "
            f"communication hook {hook} sends them as float16, which ends at 65504.",
            fix="Register bf16_compress_hook, which has float32's range, or no hook; or divide the "
            "loss, so that the gradients stay below 65504.",
            confidence="likely",
            evidence=fault.evidence,
        ), "backward"
    between = f" in the communication hook {hook}" if hook else ""
    return Diagnosis(
        cause="unknown",
        why="The step of this rank, run again by itself, gave finite gradients. Those that were "
        "bad came from the exchange between the ranks, which was not done again: another rank "
        f"brought the value, their sum overflowed{between}, or it is a fault that does not repeat.",
        fix="Look at what the other ranks report, and print the largest gradient of each rank "
        "before the exchange.",
        confidence="possible",
        evidence=fault.evidence,
    ), "distributed"


def _half_precision_hook() -> str:
    """The hook of torch's that sends gradients as float16, if a living DDP has one."""
    for module in living(DistributedDataParallel):
        for hook, _ in getattr(module, "_comm_hooks", ()):  # private: nothing else names them
            place, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
            if place.startswith("torch.distributed.") and "fp16" in name:
                return str(name)
    return ""


_MOST = 20
NOT_REPEATABLE = Diagnosis(
    cause="unknown",
    why="The step is not reproducible: run twice more from the same state, it was finite and "
    "gave other values each time. Whether the code is at fault cannot be decided.",
    fix="Call torch.use_deterministic_algorithms(True), or look for what the step depends on "
    "besides its batch, the weights and the generators.",
    evidence=("the step was replayed twice with the same batch, weights and random state",),
)
FINITE_IN_EAGER = Diagnosis(
    cause="unknown",
    why="Something in this step is compiled by torch.compile. The same step, run again in eager "
    "mode from the same state, was finite twice: the compiled code computes something else, or a "
    "fault that does not repeat was the cause.",
    fix="Train some steps without torch.compile, or with torch.compile(..., backend='aot_eager'). "
    "If they are finite, the compiler is the cause: torch.compiler.disable on the function that "
    "goes bad helps, and torch._inductor.config.emulate_precision_casts = True where it is fp16 "
    "or bf16.",
    confidence="possible",
    evidence=("the step was replayed in eager mode with the same batch, weights and random state",),
)
BAD_WHEN_COMPILED = dataclasses.replace(
    FINITE_IN_EAGER,
    why="Something in this step is compiled by torch.compile, and its code is the cause: run again "
    "from the same state, the step was bad as compiled code, and finite twice in eager mode.",
    fix="Put torch.compiler.disable on the function that goes bad, or train without torch.compile. "
    "If torch.compile(..., backend='aot_eager') is finite, Inductor's code is at fault; where it "
    "is fp16 or bf16, torch._inductor.config.emulate_precision_casts = True may help.",
    confidence="proven",
    evidence=(
        *FINITE_IN_EAGER.evidence,
        "the step was replayed as compiled code, with the same batch, weights and random state",
    ),
)
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
        """The incident with origin and diagnosis; the state is that of the step's beginning.

        All ranks come here, and run it together.
        """
        is_known = noticed.origin is not None and noticed.origin.exact
        if job.any_rank(is_known or not self._left):
            return noticed
        self._left -= 1
        found, could_run = None, True
        try:
            found = self.find(job)
        except CannotReplayError:
            could_run = False
        except Exception:
            could_run = False
            logger.warning(
                "a step could not be replayed; the operation was not found", exc_info=True
            )
        finally:
            job.undo()
        if job.any_rank(not could_run):
            return noticed
        if not job.any_rank(found is not None):
            return dataclasses.replace(noticed, diagnosis=CLEAN_AGAIN) if self.is_whole else noticed
        if found is None:  # it is bad on another rank
            return noticed
        known = dataclasses.replace(noticed, origin=found.origin, diagnosis=found.diagnosis)
        return prove_step(self._guard, job, known, _ReplayReruns(self, job), self._batch())

    def find(self, job: Job, batch: Any = NO_BATCH) -> Incident | None:
        """What is bad this time."""
        params = params_of(job.parts.optimizer)
        before, trouble = [(param, param.grad) for param in params], job.trouble
        job.trouble = None
        try:
            with run_again(), self._guard.traced():
                job.undo()
                self._again(batch)
                pairs = pairs_of(job.parts.optimizer)
                finding = finding_of(job, pairs)
                if finding.named:
                    return self._guard.incident(finding, strategy="recover")
                if job.ranks is None or job.ranks.is_replicated:
                    return None
                # What was born here may have gone to the shard of another rank.
                finding = bad_gradients(pairs, job.parts.optimizer)
                found = self._guard.incident(finding, strategy="recover")
                return found if found.origin is not None and found.origin.exact else None
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
        raise CannotReplayError("the steps before it were not recorded")
