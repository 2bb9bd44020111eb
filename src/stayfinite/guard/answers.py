"""What follows a bad step: stop, warn or recover."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.optim import Optimizer

from stayfinite.detect.finite import all_finite
from stayfinite.errors import TrainingAbortedError
from stayfinite.guard.evidence import (
    MOST_INCIDENTS,
    BadValues,
    after_bad_update,
    bad_gradients,
    bad_parameters,
    in_short,
    noticed_step,
    optimizer_behind,
)
from stayfinite.guard.job import COMPUTED_AGAIN, Job, finding_of
from stayfinite.living import leaves_of, one_look
from stayfinite.records import Incident, Outcome
from stayfinite.recover.config import RecoveryStrategy
from stayfinite.snapshot import RandomState
from stayfinite.training import Pairs, pairs_of, params_of, put_gradients

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard


class Answer(Protocol):
    """What a guard does about what it has found."""

    def notice(self, finding: BadValues) -> None:
        """There are bad values, about which nothing but telling can be done."""

    def bad_loss(self, loss: Tensor) -> None:
        """A backward pass is about to begin from it."""

    def bad_pass(self, gradients: Pairs) -> None:
        """A backward pass has left bad gradients to an update that no torch optimizer makes."""

    def refused(self, optimizer: Optimizer, gradients: Pairs) -> bool:
        """A bad update is at hand: true vetoes it."""

    def skipped(self, optimizer: Optimizer) -> None:
        """A scaler has skipped the update, and no other scale would have helped."""

    def harmed(self, finding: BadValues) -> None:
        """The state of training has taken bad values."""

    def ended(self, job: Job, *, is_good: bool, was_vetoed: bool) -> None:
        """The update of a step was attempted."""


class _Tell:
    """Nothing is undone."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._noticed: tuple[int, int] | None = None  # optimizer and step, while training goes on

    def notice(self, finding: BadValues) -> None:
        raise NotImplementedError

    @one_look()
    def bad_loss(self, loss: Tensor) -> None:
        optimizer = optimizer_behind(loss, self._guard.evidence)
        if ranks := self._guard.past.rank_groups.behind(optimizer):
            # The others are about to enter the collectives of the backward pass.
            for each in ranks:
                each.saw_bad_loss(BadValues([("loss", loss)], optimizer))
        elif optimizer is not None and self._has_harmed(optimizer):
            self.notice(bad_parameters(optimizer))
        else:
            self.notice(BadValues([("loss", loss)], optimizer, did="the backward pass was not run"))

    def bad_pass(self, gradients: Pairs) -> None:
        self.notice(bad_gradients(gradients, None))

    def _has_harmed(self, optimizer: Optimizer) -> bool:
        """Whether its last update has made the parameters bad, and nobody has told of it."""
        count = self._guard.evidence.count(optimizer)
        whose, step = self._noticed or (0, 0)
        if not count or (whose == id(optimizer) and step >= count - 1):
            return False
        return not all_finite(params_of(optimizer))

    def refused(self, optimizer: Optimizer, gradients: Pairs) -> bool:
        found = bad_gradients(gradients, optimizer)
        ranks = self._guard.past.rank_groups.of(optimizer)
        if ranks is not None:
            loss = [] if ranks.had_loss is None else ranks.had_loss.named
            found = dataclasses.replace(found, named=[*loss, *found.named])
        self.notice(found)
        return True

    def skipped(self, optimizer: Optimizer) -> None:
        self.refused(optimizer, pairs_of(optimizer))

    def harmed(self, finding: BadValues) -> None:
        self.notice(finding)

    def ended(self, job: Job, *, is_good: bool, was_vetoed: bool) -> None:
        job.end(is_good=is_good)


class Stop(_Tell):
    """Training ends before the update."""

    @one_look()
    def notice(self, finding: BadValues) -> None:
        incident = self._guard.tell_together(finding, strategy="stop")
        if incident is not None:
            self._guard.past.stopped = True
            said = f"stopped at step {incident.step}: {in_short(incident)}"
            raise TrainingAbortedError(said, incident=incident)


class Warn(_Tell):
    """Training goes on as it would; there is one incident for a bad step and what follows it."""

    def __init__(self, guard: Guard) -> None:
        super().__init__(guard)
        self._applied: Incident | None = None  # the one with whose update the bad steps began

    @one_look()
    def notice(self, finding: BadValues) -> None:
        guard, evidence = self._guard, self._guard.evidence
        evidence.saw_bad = True
        before, now = self._noticed, (id(finding.optimizer), noticed_step(finding, evidence))
        self._noticed = now
        if before == now:
            return
        first = self._applied
        if first is not None and before is not None and self._follows(finding, before, now):
            if len(guard.incidents) < MOST_INCIDENTS:
                bare = guard.incident(finding, strategy="warn", explain=False)
                guard.record(after_bad_update(bare, first))
            return
        self._applied = guard.tell_together(finding, strategy="warn")

    def _follows(self, finding: BadValues, before: tuple[int, int], now: tuple[int, int]) -> bool:
        """Whether the bad update of the step before, which was applied, is why this step is bad."""
        optimizer = finding.optimizer
        if optimizer is None or self._guard.past.rank_groups.behind(optimizer):
            return False
        is_next = before[0] == now[0] and now[1] - before[1] == 1
        return is_next and not all_finite(params_of(optimizer))

    def refused(self, optimizer: Optimizer, gradients: Pairs) -> bool:
        super().refused(optimizer, gradients)
        return False


_SET_TO_ZERO = Outcome(
    strategy="skip",
    detail="no torch optimizer makes this update, so it was given gradients of 0",
)
_NO_VETO = Outcome(
    strategy="warn",
    detail="no torch optimizer makes this update, so it cannot be skipped; the script goes on",
)


class Recover:
    """A bad update is left out, or what the policy of its job chooses; a step of ours is rerun."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def notice(self, finding: BadValues) -> None:
        self._guard.tell(finding, strategy="recover")

    def bad_loss(self, loss: Tensor) -> None:
        guard, finding, leaves = self._guard, BadValues([("loss", loss)]), leaves_of([loss])
        owners = [job for job in guard.jobs.values() if job.owns(leaves)]
        for ranks in filter(None, (job.ranks for job in owners)):
            ranks.saw_bad_loss(finding)
        if guard.own_step is None and any(job.trouble is None for job in owners):
            finding = guard.with_place(finding)
        for job in owners:
            if job.trouble is None:
                job.trouble = finding
                if guard.own_step is not None:
                    guard.own_step.saw(finding)
        if owners or guard.own_step is not None or len(guard.incidents) >= MOST_INCIDENTS:
            return
        ours = set(map(id, leaves))
        optimized = (p for each in guard.evidence.optimizers() for p in params_of(each))
        if not any(id(param) in ours for param in optimized):
            # No update will be asked about that could be vetoed.
            by_hand = guard.past.by_hand
            by_hand.is_dropped = by_hand.is_known
            incident = guard.incident(finding, strategy="warn")
            if by_hand.is_dropped:
                incident = dataclasses.replace(incident, outcome=_SET_TO_ZERO)
            elif not any(each.outcome == _NO_VETO for each in guard.incidents):
                incident = dataclasses.replace(incident, outcome=_NO_VETO)
            guard.record(incident)

    def bad_pass(self, gradients: Pairs) -> None:
        guard = self._guard
        if len(guard.incidents) < MOST_INCIDENTS:
            incident = guard.incident(bad_gradients(gradients, None), strategy="recover")
            incident = guard.as_before(incident)
            guard.record(dataclasses.replace(incident, outcome=_SET_TO_ZERO))
        guard.past.by_hand.drop(gradients)

    def refused(self, optimizer: Optimizer, gradients: Pairs) -> bool:
        guard = self._guard
        job = guard.jobs.get(id(optimizer))
        if guard.own_step is not None and guard.own_step.is_running:
            return guard.own_step.refused(gradients)
        if job is None:
            self.notice(bad_gradients(gradients, optimizer))
        elif job.trouble is None and job.manager.take_skipped_batch():
            job.undo()
        else:
            return self._respond(job, gradients)
        return True

    @one_look()
    def _respond(self, job: Job, gradients: Pairs) -> bool:
        """Recover in a loop that is not ours; whether the update is vetoed."""
        guard = self._guard
        if guard.mend_harm(job, was_counted=False):  # the update is still to come
            return True
        incident = guard.incident(finding_of(job, gradients), strategy="recover")
        job.undo()
        if (replay := job.replay or guard.replay) is not None:
            incident = replay.locate(job, incident)
        incident = guard.as_before(incident)
        incident = guard.shared(incident, job.parts.optimizer)
        if not job.is_distributed and job.state.bad_buffers():
            # An earlier step has left them so: to skip this one would not help the next.
            self._put_back(job, incident)
            return True
        random = RandomState.capture()
        left = [(param, param.grad) for param, _ in gradients]
        put_gradients(gradients)
        recovery, again = job.respond(incident), None
        random.restore()  # an older state would deliver the same batches once more
        if recovery.strategy is RecoveryStrategy.SKIP_STEP and not guard.past.was_skipped:
            again = guard.computed_again(job, incident, gradients)
        if again is not None:
            recovery = dataclasses.replace(recovery, detail=COMPUTED_AGAIN)
        guard.conclude(job, incident, recovery)
        if again is not None:
            again.put(gradients)
            return False
        if recovery.strategy is RecoveryStrategy.CLIP_GRADIENTS:
            return False
        put_gradients(left)
        job.hold()
        guard.past.later_traces.begin(incident)
        return True

    def skipped(self, optimizer: Optimizer) -> None:
        guard, gradients = self._guard, pairs_of(optimizer)
        job = guard.jobs.get(id(optimizer))
        if job is None:
            self.notice(bad_gradients(gradients, optimizer))
        elif guard.own_step is not None and guard.own_step.is_running:
            guard.own_step.saw(finding_of(job, gradients))
        else:  # the update was skipped already, so there is nothing to clip
            put_gradients([(param, None) for param, _ in gradients])
            self._respond(job, gradients)

    def harmed(self, finding: BadValues) -> None:
        guard = self._guard
        job = guard.jobs.get(id(finding.optimizer))
        if job is None:
            self.notice(finding)
            return
        incident = guard.incident(finding, strategy="recover")
        self._put_back(job, guard.shared(incident, finding.optimizer))

    def _put_back(self, job: Job, incident: Incident) -> None:
        """The state of training is bad: go back to the newest snapshot, or give up."""
        guard = self._guard
        guard.was_harmed = True
        random = RandomState.capture()
        done = job.roll_back(is_in_step=guard.own_step is None) or job.initialise_anew()
        recovery = job.respond(incident)
        random.restore()
        has_loaded = recovery.checkpoint is not None
        succeeded = recovery.succeeded and (done is not None or has_loaded)
        then = recovery.detail
        if not recovery.succeeded and recovery.back_at is None and not has_loaded:
            then = "training stops here"  # at what was put back, not at the last good step
        detail = "; ".join(filter(None, (done, then)))
        if done is None and not has_loaded:
            detail = "there is no snapshot to go back to"
        recovery = dataclasses.replace(recovery, succeeded=succeeded, detail=detail)
        guard.conclude(job, incident, recovery)
        if guard.own_step is None:  # what the loop does after its update is taken back
            job.hold()

    def ended(self, job: Job, *, is_good: bool, was_vetoed: bool) -> None:
        own = self._guard.own_step
        if own is not None and own.is_running:
            own.attempted(is_good=is_good)
        else:
            job.end(is_good=is_good)


ANSWERS: dict[str, Callable[[Guard], Answer]] = {"stop": Stop, "warn": Warn, "recover": Recover}
