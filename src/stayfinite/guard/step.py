"""A step that is ours to call: it can be undone, looked at again, and tried again."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stayfinite.detect.hooks import run_again
from stayfinite.guard.evidence import BadValues
from stayfinite.guard.job import COMPUTED_AGAIN, Job, finding_of
from stayfinite.living import one_look
from stayfinite.records import Incident
from stayfinite.recover.advice import Recovery
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.snapshot import KeptBatch, RandomState, RecentBatches
from stayfinite.training import Pairs

if TYPE_CHECKING:
    from stayfinite.capsule.file import Capsule
    from stayfinite.checkpoint.modules import Members
    from stayfinite.guard.capsule_step import Call
    from stayfinite.guard.guard import Guard
    from stayfinite.guard.replay import Values


# Experiments and replays are imported late: a step that is good does not need them.

_MOST_TRACES = 20


class Mode(enum.Enum):
    """Why the calls of a step are run."""

    FIRST = enum.auto()
    TRACED = enum.auto()  # only looked at: no update may happen
    CLIP = enum.auto()  # once more, without what is bad in the gradients
    AGAIN = enum.auto()


@dataclass
class StepRun:
    """One run of the calls, and what became of it."""

    mode: Mode
    incident: Incident | None = None  # made of the first bad value
    is_good: bool | None = None  # its update; None before that was attempted
    values: Values = dataclasses.field(default_factory=list)  # the gradients of a vetoed update


class GuardedStep:
    """The calls up to one attempted update, of one job, and their runs."""

    is_whole = True  # for experiments: its calls are the step

    def __init__(self, guard: Guard, job: Job) -> None:
        self._guard, self._job = guard, job
        job.repeats_steps = True
        self.is_running = False
        self._run = StepRun(Mode.FIRST)  # the one that is under way, or was the last
        self._calls: list[Call] = []
        self._recent = RecentBatches()
        self._traces = 0
        self._known: tuple[Incident, Incident] | None = None  # as it was noticed, and located

    @property
    def is_repeated(self) -> bool:
        """Whether calls are running, and not for the first time."""
        return self.is_running and self._run.mode is not Mode.FIRST

    @property
    def vetoes_all(self) -> bool:
        """While it is only looked at, no update may happen."""
        return self.is_running and self._run.mode is Mode.TRACED

    def attempted(self, *, is_good: bool) -> None:
        """The update of this step was attempted."""
        self._run.is_good = self._job.was_good = is_good

    def step(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """The call's result, or None when the step that it ends was left out."""
        job = self._job
        if _waiting:
            carry_out(
                _waiting.pop(), job, lambda given: self.step(fn, given), self._guard.incidents
            )
        if not job.has_begun:
            self._calls.clear()
            if job.manager.take_skipped_batch():
                return None
            self._begin()
            self._recent.forget(before=job.snapshot_step)
        number = job.good_steps
        self._calls.append((fn, batch))
        self._recent.keep(self._calls[-1], step=number)
        result = self._call(self._calls[-1:], Mode.FIRST)
        run = self._run
        if job.went_back:  # the batches since are not on its way any more
            self._recent.take_back(job.good_steps)
        if run.is_good is None:
            return result
        if run.incident is not None:
            return self._recover(run.incident, number)
        if not self._guard.was_harmed:
            self._end(is_good=run.is_good)
            return result
        job.roll_back()  # once more: what `fn` did after its update was done to the old state
        before = self._recent.since(number)
        self._catch_up(number)
        if before:
            before[0].restore_random()
        self._end(is_good=False)
        return None

    def saw(self, finding: BadValues) -> None:
        """A bad value in this step; the first one counts."""
        run, is_traced = self._run, self.vetoes_all
        if run.incident is None:
            run.incident = self._guard.incident(finding, strategy="recover", explain=is_traced)
            self._job.hold()
        elif not is_traced:
            more = self._guard.incident(finding, strategy="recover", explain=False)
            run.incident = dataclasses.replace(run.incident, reports=more.reports)

    def refused(self, gradients: Pairs) -> bool:
        """Whether the update is vetoed."""
        run = self._run
        if run.mode is Mode.CLIP and self._job.clip():
            run.incident = self._job.trouble = None
            return False
        from stayfinite.guard.replay import values_of

        run.values = values_of(gradients)
        finding = finding_of(self._job, gradients)
        if finding.named or run.mode is not Mode.TRACED:
            self.saw(finding)
        return True

    def _begin_run(self, mode: Mode) -> StepRun:
        """A run in which nothing is bad so far; a first one goes on from the calls before."""
        if mode is Mode.FIRST and self._run.mode is Mode.FIRST:
            self._run.is_good = None
        else:
            self._run, self._job.trouble = StepRun(mode), None
        self.is_running = True
        return self._run

    def _call(self, calls: list[Call], mode: Mode) -> Any:
        """The result of the last call; `_run` says what became of them."""
        self._begin_run(mode)
        try:
            with contextlib.nullcontext() if mode is Mode.FIRST else run_again():
                return [fn(batch) for fn, batch in calls][-1]
        except BaseException:
            # The user's own code raised: leave the state as it is, and forget the step.
            self._job.forget_held()
            self._end(is_good=False)
            raise
        finally:
            self.is_running = False

    @one_look()
    def _recover(self, incident: Incident | None, number: int) -> Any:
        """Undo, locate, let the policy choose; again and again while a new try is bad too."""
        job, guard = self._job, self._guard
        tries, step = 0, incident.step if incident is not None else 0
        result = None
        while incident is not None:
            self.put_back()
            if guard.mend_harm(job):
                self._catch_up(number)
                mode = next_try(RecoveryStrategy.RESET_MODEL, job.config, tries)
                job.begin()
            else:
                mode = self._answer(dataclasses.replace(incident, step=step), tries)
            if mode is None:
                self._recent.take_back(job.good_steps)
                self._end(is_good=False)
                return None
            tries += 1
            job.mark_again()
            result = self._call(self._calls, mode)
            incident = self._run.incident
        job.forget_held()
        self._end(is_good=True)
        return result

    def _answer(self, noticed: Incident, tries: int) -> Mode | None:
        """Locate, let the policy choose; how the calls are run once more."""
        located = self._prove(self._locate(noticed))
        incident = self._guard.shared(located, self._job.parts.optimizer)
        recovery = self._job.respond(incident, will_rerun=True)
        if recovery.back_at is not None or recovery.checkpoint is not None:
            # Training went back: the batches since are not on its way any more, but for these.
            self._recent.take_back(self._job.good_steps)
            for call in self._calls:
                self._recent.keep(call, step=self._job.good_steps)
        if not recovery.succeeded:
            self._end(is_good=False)
        mode = next_try(recovery.strategy, self._job.config, tries)
        if mode is None and self._is_to_be_computed_again(incident, recovery, tries):
            mode = Mode.AGAIN
            recovery = dataclasses.replace(recovery, detail=COMPUTED_AGAIN)
        self._guard.conclude(self._job, incident, recovery)
        return mode

    def _is_to_be_computed_again(self, incident: Incident, recovery: Recovery, tries: int) -> bool:
        """Whether nothing is wrong with the step itself, so that its batch need not be lost."""
        from stayfinite.guard.replay import is_passing

        is_lost = recovery.strategy is RecoveryStrategy.SKIP_STEP and not tries
        return is_lost and not self._job.any_rank(not is_passing(incident))

    def _locate(self, noticed: Incident) -> Incident:
        """The incident with origin and diagnosis, by running the calls again under the tracer."""
        if self._traces >= _MOST_TRACES:
            from stayfinite.explain.experiments import alike

            return noticed if self._known is None else alike(noticed, *self._known)
        self._traces += 1
        first = self._run.values
        self._job.hold()
        with self._guard.traced():
            self._call(self._calls, Mode.TRACED)
        found = self._run.incident
        self.put_back()
        self._guard.keep_step(self._job, self._calls, step=noticed.step)
        is_bad_again = self._job.any_rank(found is not None)
        if not is_bad_again:
            return self._with_passing_fault(noticed, first)
        if found is None:  # it is bad on another rank
            return noticed
        known = dataclasses.replace(noticed, origin=found.origin, diagnosis=found.diagnosis)
        self._known = noticed, known
        return known

    def _with_passing_fault(self, noticed: Incident, first: Values) -> Incident:
        """A bad step was finite when it was run again: does it repeat at all?"""
        from stayfinite.guard.replay import passing_fault

        again = self._run.values
        self._job.hold()
        with self._guard.traced():  # what is compiled runs in eager mode, as it did the last time
            self._call(self._calls, Mode.TRACED)
        self.put_back()
        fault = passing_fault(first, again, self._run.values)
        return noticed if fault is None else dataclasses.replace(noticed, diagnosis=fault)

    def _prove(self, incident: Incident) -> Incident:
        """The incident with what experiments on these calls showed."""
        if not self._guard.settings.prove_seconds:
            return incident
        from stayfinite.guard.replay import NO_BATCH, prove_step

        batch = self._calls[-1][1] if len(self._calls) == 1 else NO_BATCH
        return prove_step(self._guard, self._job, incident, self, batch)

    def run(self, batch: Any, *, traced: bool) -> Incident | None:
        """What is bad when the calls run with this batch; no update happens."""
        from stayfinite.guard.replay import NO_BATCH

        calls = self._calls if batch is NO_BATCH else [(self._calls[-1][0], batch)]
        self._job.hold()
        tracing = self._guard.traced() if traced else contextlib.nullcontext()
        return self._found_in(calls, Mode.TRACED, tracing)

    def _found_in(
        self, calls: list[Call], mode: Mode, around: contextlib.AbstractContextManager[None]
    ) -> Incident | None:
        """What is bad in a run that is an experiment: nothing is known of it afterwards."""
        run = self._begin_run(mode)
        try:
            with run_again(), around:
                for fn, batch in calls:
                    fn(batch)
            return run.incident
        finally:
            self.is_running = False
            self._run, self._job.trouble = StepRun(Mode.FIRST), None

    def run_before(self, since: int) -> bool:
        """Run the steps before this one again, with their updates; whether all were good.

        `since` is the number of the first; CannotReplayError if their batches are gone.
        """
        kept = self._recent.since(since)
        earlier = [each for each in kept or () if each.step < self._job.good_steps]
        if not earlier:
            from stayfinite.explain.experiments import CannotReplayError

            raise CannotReplayError("the batches before it are not there any more")
        random = RandomState.capture()
        try:
            return all(self._is_good_again(each) for each in earlier)
        finally:
            random.restore()

    def _is_good_again(self, kept: KeptBatch) -> bool:
        kept.restore_random()
        return self._found_in([kept.value()], Mode.AGAIN, contextlib.nullcontext()) is None

    def put_back(self) -> None:
        """Everything as at the beginning of the step that is under way."""
        self._job.settle()
        self._job.undo()
        if self._job.ranks is not None:
            self._job.ranks.forget_step()

    def _begin(self) -> None:
        """Begin a step; weights that turn out to be bad are those of the last snapshot then."""
        number = self._job.good_steps
        self._guard.begin_step(self._job)
        if self._job.good_steps < number:
            self._catch_up(number)
            self._guard.begin_step(self._job)

    def _catch_up(self, number: int) -> None:
        """From the snapshot that was put back, run the good steps before this one again.

        One that makes the weights bad again is left out; those after it keep their random numbers.
        """
        job = self._job
        random = RandomState.capture()
        ours, self._calls = self._calls, []
        again = [each for each in self._take_back() if each.step < number]
        while (rest := self._run_until_harm(again)) is not None:
            harmful = job.good_steps
            job.roll_back()
            again = [each for each in self._take_back() if each.step != harmful] + rest
        self._calls = ours
        random.restore()

    def _take_back(self) -> list[KeptBatch]:
        """The batches since the state that was put back; none unless all are there."""
        kept = self._recent.take_back(self._job.good_steps)
        return [] if self._job.any_rank(kept is None) else kept or []

    def _run_until_harm(self, kept: list[KeptBatch]) -> list[KeptBatch] | None:
        """Run good steps again; what is left when one makes the weights bad, None if none does."""
        job = self._job
        for done, each in enumerate(kept, start=1):
            job.begin()
            each.restore_random()
            call = each.value()
            self._recent.keep(call, step=job.good_steps)
            self._call([call], Mode.AGAIN)
            if self._run.incident is not None:
                break  # it is not the same again
            if self._run.is_good:
                if job.any_rank(not job.is_finite()):
                    return kept[done:]
                job.end(is_good=True, is_new=False)
        return None

    def _end(self, *, is_good: bool) -> None:
        self._run = StepRun(Mode.FIRST)
        self._calls.clear()
        self._guard.evidence.saw_bad = False  # the vetoed try has been counted
        self._job.end(is_good=is_good)


def next_try(strategy: RecoveryStrategy, config: RecoveryConfig, tries: int) -> Mode | None:
    """How the calls are run once more after so many tries; None: they are left out."""
    if strategy is RecoveryStrategy.REWIND:
        return None
    if strategy is RecoveryStrategy.CLIP_GRADIENTS:
        return Mode.CLIP
    if config.skip_batch_after_nan:
        return None
    return None if strategy is RecoveryStrategy.SKIP_STEP and tries else Mode.AGAIN


# Capsules are imported late: without an order there is no need of them.


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to run, and who is told the incident that comes of it, or None."""

    capsule: Capsule
    tell: Callable[[Incident | None], None]


_waiting: list[Order] = []


def give(order: Order) -> None:
    """Have the next `guard.step` of this process carry it out, which ends the script."""
    _waiting.append(order)


def members_of(job: Job) -> Members:
    """The parts of a job, as a capsule holds them."""
    from stayfinite.checkpoint.modules import Members

    parts = job.parts
    return Members(
        models=parts.modules,
        optimizers=(parts.optimizer,),
        schedulers=parts.schedulers,
        scaler=parts.scaler,
        averages=parts.emas,
    )


def carry_out(order: Order, job: Job, step: Callable[[Any], Any], incidents: list[Any]) -> None:
    """Run the capsule's batches by `step(batch)` from the state before, tell, and leave."""
    from stayfinite.capsule.make import put_random, put_state

    if order.capsule.state is not None:
        put_state(order.capsule.state, members_of(job))
    if order.capsule.random is not None:
        put_random(order.capsule.random)
    before = len(incidents)
    for batch in order.capsule.batch:
        step(batch)
    order.tell(incidents[before] if len(incidents) > before else None)
    raise SystemExit(0)
