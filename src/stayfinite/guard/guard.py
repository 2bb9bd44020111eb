"""Guard: the one place where detecting, locating, explaining and recovering meet.

It watches every backward pass and every update, until a bad value becomes an incident.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import math
import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from stayfinite.causes import cause_of
from stayfinite.detect.finite import all_finite, classify, finite_number, nonfinite
from stayfinite.detect.hooks import (
    Attachment,
    StepListener,
    together,
    watch_backward,
    watch_buffers,
    watch_first_call,
    watch_loading,
    watch_numbers,
    watch_scalers,
    watch_scaling,
    watch_steps,
)
from stayfinite.detect.memory import local
from stayfinite.detect.veto import LateFlag, is_muted
from stayfinite.distributed import BAD, FINE, SKIPPED, leave_word, rank, world_size
from stayfinite.errors import CapsuleError, ConfigError, TrainingAbortedError
from stayfinite.guard.answers import ANSWERS, Answer
from stayfinite.guard.by_hand import UpdatesByHand
from stayfinite.guard.evidence import (
    MOST_INCIDENTS,
    BadValues,
    Evidence,
    StepSeen,
    bad_gradients,
    bad_parameters,
    bad_running_statistics,
    bad_statistics,
    explain_incident,
    in_short,
    incident_of,
)
from stayfinite.guard.job import COMPUTED_AGAIN, Job
from stayfinite.guard.ranks import RankGroups, Ranks, is_inferring_shapes, note_lost_peer
from stayfinite.guard.step import GuardedStep
from stayfinite.living import Names, leaves_of
from stayfinite.locate.clock import Tracing
from stayfinite.locate.samples import failed_delivery
from stayfinite.locate.source import USER, Place, is_installed, kind_of, resolve
from stayfinite.nested import Named, named_tensors
from stayfinite.records import Aftermath, Forecast, Incident, NaNType, Origin, Outcome
from stayfinite.recover.advice import Recovery
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.replay.loop import loops_around, question_at, variables_of
from stayfinite.replay.moments import Moments, user_frames
from stayfinite.safely import Safely
from stayfinite.settings import GuardSettings
from stayfinite.syntax import is_call
from stayfinite.text import count, forecast_words, in_words, node_name
from stayfinite.training import Pairs, params_of

# What only a bad step needs is imported there: a healthy run starts without it.
if TYPE_CHECKING:
    from stayfinite.capsule.make import Redact
    from stayfinite.guard.capsule_step import Call, KeptStep
    from stayfinite.guard.loop_replay import ComputedStep, LoopReplay
    from stayfinite.guard.replay import Replay
    from stayfinite.prevent.forecast.forecaster import Forecaster
    from stayfinite.report.html.notebook import GuardReport


_TOO_LATE = "it was found when the script had ended, so nothing was undone"
_AFTER_LAST = "it was found after the last update, so nothing was undone"
_MOST_BEHIND = 10_000  # nodes of a graph that are looked through for a value that was read

Batch = TypeVar("Batch")
Result = TypeVar("Result")


class Guard(StepListener):
    """Watches training, and with on_nan="recover" answers a bad step as its jobs say.

    In a loop that is not ours a bad update is not applied; `step` can also run it again, exactly.

    >>> Guard(GuardSettings(on_nan="warn")).incidents
    []
    """

    def __init__(
        self,
        settings: GuardSettings,
        *,
        on_incident: Callable[[Incident], None] | None = None,
        only: Optimizer | None = None,
    ) -> None:
        self.settings = settings
        # Whether a bad step may be run again in place.
        self.notes_moments = settings.again == "auto" and settings.trace == "never"
        self.past = GuardPast(on_incident=on_incident)
        self.answer: Answer = ANSWERS[settings.on_nan](self)
        self.jobs: dict[int, Job] = {}
        self.own_step: GuardedStep | None = None  # once `step` is called
        self.replay: Replay | None = None
        self.was_harmed = False  # by the update that was attempted last
        self.leaves_moments = False  # to another guard, which may run the last step again
        self.examined: list[tuple[Any, ...]] = []  # the places that experiments were made for
        self.describe: Callable[[Incident], Incident] | None = None  # before it is told
        self._only = only
        self._attachment: Attachment | None = None
        self._leaves: list[Tensor] | None = None
        self._kept_step: KeptStep | None = None
        self._loop_replay: LoopReplay | None = None
        self._update_frame: FrameType | None = None  # while its weights are looked at
        self._passes = -1  # backward passes when the last batch was delivered
        self._judged: set[int] = set()  # nodes behind the bad loss of the last backward pass
        self._pending: Incident | None = None  # of a bad loss that was read, and may be left out
        self._pending_turn: object = None  # of the loop in which it was read
        self._pending_nodes: set[int] = set()  # that made it

    @property
    def incidents(self) -> list[Incident]:
        """What was found, oldest first."""
        return self.past.incidents

    @property
    def quarantine(self) -> dict[str, list[Any]]:
        """The samples that are not read again: their indices, by the class of their dataset."""
        return self.past.quarantine

    @property
    def forecasts(self) -> list[Forecast]:
        """What was foretold, oldest first."""
        return self.past.forecasts

    @property
    def evidence(self) -> Evidence:
        """What is kept of the last steps."""
        return self.past.evidence

    @property
    def scaler_skips(self) -> int:
        """How many updates a GradScaler has skipped because of its own scale."""
        return self.past.scaler_skips

    @property
    def stopped(self) -> bool:
        """Whether training was ended because of an incident."""
        return self.past.stopped

    @property
    def crashed(self) -> bool:
        """Whether the script ended itself because of a NaN."""
        return self.past.crashed

    @property
    def is_attached(self) -> bool:
        """Whether it watches this process now."""
        return self._attachment is not None

    @property
    def steps(self) -> int:
        """Updates attempted so far; without an optimizer, backward passes."""
        return self.past.evidence.steps

    @property
    def looks_at_loss(self) -> bool:
        """Whether the next backward pass begins with a look at the loss."""
        return self.settings.check_loss and self.is_looking

    @property
    def is_looking(self) -> bool:
        """Whether the step that is under way, or comes next, is looked at."""
        return self._is_due(self._only)

    def _is_due(self, optimizer: Optimizer | None) -> bool:
        every = self.settings.check_every
        if every == 1:
            return True
        count = self.steps if optimizer is None else self.past.evidence.count(optimizer)
        return count % every == 0

    @property
    def manager(self) -> NaNRecoveryManager:
        """Counts, history and recommendations of the recoveries."""
        return self._sole_job().manager

    def _sole_job(self) -> Job:
        if len(self.jobs) != 1:
            raise ConfigError(
                f"this guard watches {len(self.jobs)} optimizers; guard.step and guard.manager "
                "need one: make the guard with stayfinite.watch(model, optimizer)."
            )
        return next(iter(self.jobs.values()))

    def add(self, job: Job, *, at_most: int | None = None) -> None:
        """Recover bad steps of this job from now on; with `at_most`, the oldest has to go."""
        self.jobs[id(job.parts.optimizer)] = job
        job.watch_beginnings(self.begin_step)
        if at_most is not None and len(self.jobs) > at_most:
            self.jobs.pop(next(iter(self.jobs))).close()

    def replay_with(self, replay: Replay, *, only: Job | None = None) -> None:
        """Find the operation of a bad step, or one of `only`, by running it again."""
        owner = self if only is None else only
        owner.replay = replay

    def step(self, fn: Callable[[Batch], Result], batch: Batch) -> Result | None:
        """`fn(batch)`, or None when its update was bad and skipped.

        `fn` does what a loop does for one batch, all updates included; with accumulation some
        calls update. It may be called again with the same batch, so what it needs must be in
        there, a counter too. A bad step is undone, traced and answered as configured. Raises
        TrainingAbortedError when nothing helps; the weights are those of the last good step.
        """
        if self.own_step is None:
            self.own_step = GuardedStep(self, self._sole_job())
        return cast("Result | None", self.own_step.step(fn, batch))

    def begin_step(self, job: Job) -> None:
        """A step begins: mark its beginning."""
        if is_muted(self):
            return
        with self.past.aside:
            if not job.begin():
                self._check_parameters([job.parts.optimizer], everything=True)
                job.begin()

    def _entered(self, frame: FrameType, module: nn.Module) -> None:
        """The first module is called, or the first since there is another optimizer."""
        with self.past.aside:
            self.past.evidence.note_start(module)
        with self.past.aside:
            self.past.rank_groups.look_around()
            for job in self.jobs.values():
                job.ranks = self.past.rank_groups.of(job.parts.optimizer)
        if self.notes_moments:
            self.past.moments.entered(frame)

    def attach(self, *more: Attachment) -> None:
        """Watch this process from now on; what is attached `more` is removed with the rest."""
        # A flag that is read one step late would come too late to undo that step.
        may_defer = self.settings.on_nan != "recover" and torch.accelerator.is_available()
        past = self.past
        if self.notes_moments:
            past.tracing.on_delivery = self._delivered
            past.tracing.deliveries.on_left = self._loader_left
            more = (*more, watch_numbers(self._saw_number))
            if self._only is not None:
                more = (*more, Attachment(register_optimizer_step_post_hook(self._other).remove))
        self._attachment = together(
            *more,
            watch_first_call(self._entered),
            watch_backward(self._before_backward, self._after_backward),
            watch_scaling(self._after_scaling),
            watch_loading(self._before_loading),
            watch_scalers(self),
            watch_buffers(self._buffer_registered),
            past.tracing.watch_data(files=self.settings.hears_files),
            watch_steps(self, optimizer=self._only, defer=may_defer),
        )
        if self.settings.trace == "start" or self.settings.arm_at == 0:
            past.tracing.switch_on()

    def _buffer_registered(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        self.past.evidence.registered(module, name, buffer)
        self.past.tracing.buffers.note(module, name, buffer)
        if self.notes_moments:
            self.past.moments.registered(module)

    def _delivered(self, batch: Any, frame: FrameType | None) -> None:
        with self.past.aside:
            self._look_at_left_out(frame)
            self.past.moments.delivered(batch, frame)

    def _saw_number(self, tensor: Tensor, value: float, frame: FrameType) -> None:
        """The script reads a number that is not finite; if it is a loss, it may leave it out."""
        is_loss = tensor.grad_fn is not None and torch.is_grad_enabled()
        is_loss = is_loss and kind_of(frame.f_code) == USER  # not what torch and we read
        is_loss = is_loss and not self._was_judged(tensor)
        if not is_loss or is_muted(self) or self.past.stopped:
            return
        with self.past.aside:
            if self._pending is not None and not self._is_turn_over(frame):
                return
            self.record_unused_loss()
            did = "the script did not train on this loss"
            finding = self._with_harm(BadValues([("loss", tensor)], did=did, was_read=True))
            incident = incident_of(finding, self.past.evidence, strategy="script")
            self._pending = self._run_again(incident, finding, frame)
            self._pending_turn = self._turn_at(frame) if self._pending is not None else None
            self._pending_nodes = numbers_behind(tensor, most=1)

    def _loader_left(self, frame: FrameType | None) -> None:
        with self.past.aside:
            for each in itertools.islice(user_frames(frame), 1):
                loops = loops_around(each.f_code, each.f_lineno)
                if any(loop.is_left_at(each.f_lineno) for loop in loops):
                    self._look_at_left_out(frame)

    def _look_at_left_out(self, frame: FrameType | None) -> None:
        """A batch that no backward pass followed: had the script a bad loss, and went on?"""
        evidence, moments = self.past.evidence, self.past.moments
        newest = moments.newest
        passes, self._passes = self._passes, evidence.backward_passes
        if newest is None or newest.kind != "delivered" or passes != evidence.backward_passes:
            return
        if is_muted(self) or self.past.stopped or not torch.is_grad_enabled():
            return
        for each in itertools.islice(user_frames(frame), 3):
            if newest.line_in(each) is None:
                continue
            # A loader that reads ahead delivers before the loss of the batch before is gone.
            if bad := [pair for pair in bad_losses_in(each) if not self._was_judged(pair[1])]:
                self._pending = None  # it is the same one
                finding = BadValues(bad, did="the script did not train on this loss")
                self.tell(finding, strategy="script")
                return
        if self._pending is not None:
            self.record_unused_loss()
        elif statistics := bad_statistics(evidence.statistics()):
            found = bad_running_statistics(statistics, evidence.at_work())
            self._harmed(dataclasses.replace(found, is_in_turn=True))

    def _was_judged(self, loss: Tensor) -> bool:
        """Whether the last bad backward pass began from this loss, or from a multiple of it."""
        return not numbers_behind(loss, most=1).isdisjoint(self._judged)

    def _with_harm(self, finding: BadValues) -> BadValues:
        """A bad loss; or the weights, if the last update of an optimizer has made them bad."""
        for optimizer in self.past.evidence.optimizers():
            if self.past.evidence.count(optimizer) and not all_finite(params_of(optimizer)):
                return dataclasses.replace(bad_parameters(optimizer), did=finding.did)
        return finding

    def _turn_at(self, frame: FrameType | None) -> object:
        """What tells this turn of the running loop from the next; None if it has had an update."""
        from stayfinite.guard.loop_replay import standing_at

        replay = self._loop_replay
        turn = None if replay is None else next(replay.turns(standing_at(frame)), None)
        if turn is None or any(moment.kind == "updated" for moment in turn.since):
            return None
        held = variables_of(turn.frame)
        given = tuple(id(held.get(name)) for name in sorted(turn.loop.given))
        return (id(turn.frame), turn.loop.line, given) if given else None

    def _is_turn_over(self, frame: FrameType | None) -> bool:
        """Whether the turn in which a bad loss was read went by without training on it."""
        now = None if self._pending_turn is None else self._turn_at(frame)
        return now is not None and now != self._pending_turn

    def _is_pending_behind(self, roots: Sequence[Tensor]) -> bool:
        """Whether these were computed from the bad value that was read."""
        behind = (numbers_behind(root, most=_MOST_BEHIND) for root in roots)
        return any(not self._pending_nodes.isdisjoint(numbers) for numbers in behind)

    def record_unused_loss(self) -> None:
        """If the script read a bad loss and will not train on it, make it an incident."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.record(pending)

    def _other(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Another optimizer than the one that is watched has made its update."""
        if optimizer is not self._only and not is_muted(self) and not is_dynamo_compiling():
            with self.past.aside:
                self.past.moments.updated(optimizer, sys._getframe(1))

    def detach(self) -> None:
        """Leave torch as it was, with what is not finished yet left to another guard."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.flush()
            attachment.remove()

    def close(self) -> None:
        """Leave torch as it was; a step that was bad and unfinished is undone.

        Flags that are still on a device are read first.
        """
        past = self.past
        with contextlib.suppress(TrainingAbortedError), past.aside:
            for job in self.jobs.values():
                job.undo_unfinished()
                is_over = past.stopped or past.last_look.is_over
                if self.is_attached and past.incidents and not is_over:
                    self._check_parameters([job.parts.optimizer], everything=True)
            self._answer_unheard_harm()
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            with contextlib.suppress(TrainingAbortedError), past.aside:
                attachment.flush()
                if not past.incidents and not past.last_look.is_over:
                    self._check_parameters(past.evidence.optimizers(), everything=True)
                    self._answer_unheard_harm()
            with contextlib.suppress(TrainingAbortedError):
                attachment.remove()
            past.tracing.switch_off()
            if past.forecaster is not None:
                past.forecaster.close()
            if not self.leaves_moments:
                past.moments.forget()
                past.tracing.deliveries.forget()
            past.rank_groups.remove()
        for job in self.jobs.values():
            job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.script_crashed(error)
        self.close()

    def tell_ranks(self, error: BaseException) -> None:
        """This process ends by an error: the other ranks may want to know why."""
        if world_size() > 1:
            note_lost_peer(error)
            leave_word(error)

    def end(self, modules: Mapping[str, nn.Module]) -> None:
        """The script is over: look once at its weights, which nothing can put back any more.

        `modules` are those that it has left behind, by the names of their variables.
        """
        past = self.past
        look = past.last_look
        if self._attachment is None or look.is_over:
            return
        look.is_over = True
        with contextlib.suppress(TrainingAbortedError), past.aside:
            self._attachment.flush()
            for job in self.jobs.values():
                job.undo_unfinished()
        if past.stopped or past.crashed:
            return
        with past.aside:
            for finding in look.take(modules):
                if not past.incidents:
                    self._found_at_end(finding)
            for ranks in past.rank_groups.known():
                if ranks.loss is not None and not past.incidents:
                    self._found_at_end(ranks.loss)
            # A loss about which no update was asked.
            if any(map(bool, past.losses.far_flags())) and not past.incidents:  # host sync
                self._found_at_end(BadValues([("loss", torch.tensor(torch.nan))]))

    def _found_at_end(self, finding: BadValues) -> None:
        finding = dataclasses.replace(finding, did=_TOO_LATE)
        self.record(self.incident(finding, strategy="none"))
        self.past.stopped = self.settings.on_nan == "stop"

    def aftermath(self) -> Aftermath:
        """How training stands; reads what is still on a device."""
        past = self.past
        tally = past.evidence.worst_tally()
        return Aftermath(
            updates=tally.count,
            bad_updates=tally.bad,
            loss_before=_number(tally.loss_before),
            loss_after=_number(tally.loss),
            is_last_loss_bad=bool(past.losses.is_last_bad),  # host sync
            bad_at_end=tuple(past.last_look.bad),
            unseen=past.last_look.unseen,
            has_failed=past.aside.has_failed,
        )

    def after_fork(self) -> None:
        """Forget what the parent process has seen."""
        past = self.past
        past.incidents, past.scaler_skips, past.stopped = [], 0, False
        past.forecasts = []
        past.evidence.forget_counts()

    def script_crashed(self, error: BaseException) -> None:
        """The script dies of an error; an incident if it is its own and a NaN was behind it."""
        past = self.past
        self.tell_ranks(error)
        is_own = not isinstance(error, (TrainingAbortedError, KeyboardInterrupt))
        if past.incidents or self._attachment is None or not is_own:
            return
        with past.aside:
            did = f"the script ended itself with {type(error).__name__}"
            bad = bad_values_of(error)
            if (read := self._sample_of(error, bad, did)) is not None:
                past.crashed = True
                self.record(read)
            elif bad and (not past.tracing.is_on or past.tracing.was_computed(bad[0][1])):
                past.crashed = True
                finding = self._with_harm(BadValues(bad, did=did, error=error))
                self.tell(finding, strategy="none")

    def _sample_of(self, error: BaseException, bad: list[Named], did: str) -> Incident | None:
        """The incident of an error in the reading of a batch, by a sample that is read again."""
        delivery = failed_delivery(error) if bad or _TELLING.search(str(error)) else None
        if delivery is None or not self.notes_moments or world_size() > 1:
            return None
        from stayfinite.guard.sample_replay import sample_again

        outer = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        incident = incident_of(BadValues(bad, did=did), self.past.evidence, strategy="none")
        before = self.past.moments.newest
        found = sample_again(self, incident, delivery, (), before, outer[0])
        if found is None or found.incident.diagnosis is None:
            return None
        why = found.incident.diagnosis
        why = dataclasses.replace(why, evidence=(*why.evidence, found.said))
        return dataclasses.replace(found.incident, diagnosis=why)

    def judge_every_backward(self) -> None:
        """Look at all gradients after each backward pass, not only those an optimizer gets."""
        self._leaves = []

    def judge_values(self, named: list[Named]) -> None:
        """Make an incident of those values that were computed to be bad."""
        bad = [(name.lstrip("."), t) for name, t in named if self.past.tracing.was_computed(t)]
        if bad:
            self.answer.notice(BadValues(bad))

    def _before_backward(self, roots: Sequence[Tensor], gradients: Any) -> None:
        if is_muted(self):
            return
        if self._pending is not None:
            with self.past.aside:
                if self._is_turn_over(sys._getframe(1)) and not self._is_pending_behind(roots):
                    self.record_unused_loss()
            self._pending = None
        past = self.past
        if is_inferring_shapes(sys._getframe(1)):
            return
        if not past.evidence.has_stepped:
            with past.aside:
                past.by_hand.before_pass(roots)
        if self.own_step is None:
            for job in self.jobs.values():
                if job.trouble is not None:
                    with past.aside:
                        job.forget_trouble_if_gone()
        with past.aside:
            passes = past.evidence.backward_passes
            # None so far, or a power of two; or the script updates by itself.
            if not passes & (passes - 1) or not past.evidence.has_stepped:
                self._early_pass(roots)
            if self.notes_moments:
                past.moments.before_backward()
            past.tracing.tick_for_backward(roots, arm_at=self.settings.arm_at)
            if self._leaves is not None:
                self._leaves = leaves_of(roots)
            # Other roots may hold an Inf on purpose; their gradients are judged all the same.
            for root in roots:
                if root.numel() == 1:
                    self._judge_loss(root)

    def _early_pass(self, roots: Sequence[Tensor]) -> None:
        """Before any update: who is trained here, should there be no optimizer to ask."""
        past = self.past
        if not past.evidence.backward_passes and past.on_begin is not None:
            past.on_begin()
        if not past.evidence.has_stepped:
            with past.aside:
                leaves = leaves_of(roots)
                # What is wrapped cannot be read once its transform is over.
                real = [each for each in leaves if not is_functorch_wrapped_tensor(each)]
                past.evidence.trained.update(dict.fromkeys(real, True))

    def _after_backward(self, result: Any) -> None:
        if is_muted(self):
            return
        if self._leaves is not None:
            with self.past.aside:
                gradients = [(leaf, leaf.grad) for leaf in self._leaves if leaf.grad is not None]
                self._leaves = []
                if not all_finite(gradient for _, gradient in gradients):
                    self.answer.notice(bad_gradients(gradients, None))
        elif not self.past.evidence.has_stepped:
            with self.past.aside:
                self._judge_by_hand()
        self.past.evidence.backward_passes += 1
        if self.past.on_pass is not None and not self.past.evidence.has_stepped:
            self.past.on_pass(self.past.evidence)
        if self.notes_moments and self.past.moments.counts_pass():
            with self.past.aside:
                self.past.moments.passed(sys._getframe(1), self.past.evidence.trained)

    def _judge_by_hand(self) -> None:
        """Where no torch optimizer makes the update, nobody asks about it: look before it comes."""
        past = self.past
        if past.evidence.uses_scaler or world_size() > 1:  # or each rank would answer for itself
            return
        pairs = past.by_hand.after_pass(past.evidence.trained)
        if past.by_hand.is_dropped:
            past.by_hand.drop(pairs)
        elif self.settings.check_gradients and pairs and past.by_hand.are_bad(pairs):
            past.evidence.passes.was_bad_pass(past.evidence.loss)
            self.answer.bad_pass(pairs)

    def _judge_loss(self, root: Tensor) -> None:
        past = self.past
        if self.looks_at_loss and (bad := past.losses.bad_one(root)) is not None:
            self._judged = numbers_behind(root)
            past.evidence.passes.was_bad_pass(past.evidence.loss)
            if past.on_bad_loss is not None:
                past.on_bad_loss(bad)
            self.answer.bad_loss(bad)

    def _after_scaling(self, scaler: Any, losses: Any, scaled: Any) -> None:
        if is_muted(self):
            return
        with self.past.aside:
            if scaler.is_enabled():
                self.past.evidence.scaler = scaler
                self.past.losses.scaled(losses, scaled)

    def _before_loading(self, target: Any, state: Mapping[str, Any]) -> None:
        with self.past.aside:
            for path, tensor in named_tensors(state, "state"):
                if not all_finite([tensor]):
                    name = path.removeprefix("state.")
                    self.past.evidence.bad_keys.append(name)
                    self.past.tracing.label(tensor, name)

    def begins(self, optimizer: Optimizer) -> None:
        """A step with a closure begins; an optimizer of one's own may move the weights first."""
        is_own = not type(optimizer).step.__module__.startswith("torch.optim")
        if is_own and self.notes_moments:
            with self.past.aside:
                self.past.moments.keep_weights(optimizer)

    def judge(
        self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool
    ) -> Tensor | None:
        """True on the device where this update must not happen; None where it may."""
        past, flag, job = self.past, None, self.jobs.get(id(optimizer))
        ranks = past.rank_groups.at_update(optimizer)
        with past.aside:
            past.tracing.tick(arm_at=self.settings.arm_at)
            past.evidence.first_look(optimizer)
            if not self.settings.check_gradients or not self._is_due(optimizer):
                gradients = []
            if ranks is not None:
                gradients = [local(gradient) for gradient in gradients]
            far = past.losses.far_flags()
            if on_device or far or not past.evidence.saw_finite(optimizer, gradients):
                flag = nonfinite([*gradients, *far], exact_on_device=on_device)
            if job is not None:
                flag = self._verdict(job, flag)
                job.precaution.skipped = False
                if flag is None and job.config.on_spike == "skip":
                    self._skips_spike(job, optimizer)
                job.precaution.before_update(flag)
        if ranks is None:
            return flag
        return self._verdict_of_all(ranks, optimizer, job, flag)

    def _verdict(self, job: Job, flag: Tensor | None) -> Tensor | None:
        if job.trouble is None:
            job.trouble = job.bad_rates()
        is_bad = job.trouble is not None or job.manager.batches_to_skip > 0
        is_bad = is_bad or (self.own_step is not None and self.own_step.vetoes_all)
        return torch.tensor(True) if is_bad else flag

    def _verdict_of_all(
        self, ranks: Ranks, optimizer: Optimizer, job: Job | None, flag: Tensor | None
    ) -> Tensor:
        """All ranks give one answer; whatever fails here, each of them has to ask."""
        if self.own_step is not None and self.own_step.vetoes_all:
            return torch.tensor(True)  # all ranks only look at this one
        is_bad, is_harmed = True, ranks.harm is not None
        with self.past.aside:
            is_bad = flag is not None and bool(flag)  # host sync
            is_bad = is_bad or (job is None and ranks.loss is not None)
            if is_bad and not is_harmed and not all_finite(params_of(optimizer)):
                ranks.harm, is_harmed = bad_parameters(optimizer), True
        word = ranks.ask(verdict=BAD if is_bad else FINE, is_harmed=is_harmed)
        if job is not None:
            job.ranks = ranks
            job.confirm_snapshot(is_good=not word.is_harmed)
        return torch.tensor(not word.is_fine)

    def refused(self, optimizer: Optimizer, gradients: Pairs, *, late: bool) -> bool:
        """A bad update is at hand: make it an incident; true: it is not applied."""
        with self.past.aside:
            ranks = self.past.rank_groups.of(optimizer)
            if ranks is not None:
                if ranks.word.verdict == SKIPPED and not ranks.word.is_harmed:
                    self._absorbed(optimizer, None)  # by the scaler of another rank
                    return True
                if ranks.word.is_harmed and self.own_step is None:
                    self._answer_harm(ranks, optimizer)
                    return self.settings.on_nan != "warn"
            is_vetoed = self.answer.refused(optimizer, gradients)
            job = self.jobs.get(id(optimizer))
            if job is not None and not is_vetoed and not late:
                job.precaution.before_update()
            return is_vetoed
        return self.settings.on_nan != "warn"

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        """An update was attempted."""
        past, own, job = self.past, self.own_step, self.jobs.get(id(optimizer))
        is_good = not vetoed and not past.was_skipped
        if job is not None:
            with past.aside:
                job.precaution.after_update()
        if job is not None and own is not None and own.is_repeated:
            own.attempted(is_good=is_good)
            past.was_skipped = False
            return
        self.was_harmed = False
        evidence = past.evidence
        if job is not None:
            job.seen = evidence.seen(optimizer)
        with past.aside:
            looks = self.settings.check_parameters and self._is_due(optimizer)
            if past.forecaster is not None:
                self._look_ahead(past.forecaster, optimizer, job, vetoed=bool(vetoed))
            evidence.stepped(optimizer, skipped=bool(vetoed) or past.was_skipped)
            past.tracing.stepped(evidence.steps, of=optimizer, count=evidence.count(optimizer))
            if not past.was_skipped:
                evidence.skips_in_a_row = 0
                if looks and not vetoed:
                    self._update_frame = sys._getframe(1)
                    try:
                        self._look_after_update(optimizer, job)
                    finally:
                        self._update_frame = None
            past.was_skipped = False
            if self.notes_moments:
                past.moments.updated(optimizer, sys._getframe(1))
            if vetoed or (evidence.saw_bad and not past.has_trained()):
                evidence.was_bad(optimizer)
            evidence.saw_bad = False
        if job is not None:
            is_good = is_good and not self.was_harmed
            self.answer.ended(job, is_good=is_good, was_vetoed=bool(vetoed))
        past.later_traces.stepped()

    def _look_ahead(
        self, forecaster: Forecaster, optimizer: Optimizer, job: Job | None, *, vetoed: bool
    ) -> None:
        """Tell what is going to overflow or diverge, and do about it what the job says."""
        evidence, was_skipped = self.past.evidence, self.past.was_skipped
        told = forecaster.stepped(
            optimizer,
            loss=evidence.loss if evidence.bad_loss is None else None,
            norm=evidence.grad_norm,
            scale=evidence.scale if was_skipped else None,
            skipped=was_skipped or vetoed,
            rate=None if job is None else job.precaution.rate(),
        )
        for forecast in told:
            self.foretell(forecast if job is None else job.precaution.answered(forecast))
        if job is not None and job.precaution.is_at_work:
            later = job.precaution.stepped(
                evidence.count(optimizer),
                room=forecaster.room(optimizer),
                is_rising=forecaster.is_rising(optimizer),
            )
            if later is not None:
                self.foretell(later)

    def _skips_spike(self, job: Job, optimizer: Optimizer) -> None:
        """Leave out the update of a step with a spike, where that is asked for."""
        forecaster, loss = self.past.forecaster, self.past.evidence.loss
        if forecaster is None or isinstance(loss, Tensor) or job.is_distributed:
            return
        if forecaster.is_spike(optimizer, loss):
            job.precaution.skip()

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: Any) -> None:
        """A GradScaler absorbed an overflow; an incident only when it goes on and on.

        With a bad loss it was not its scale that was at fault.
        """
        past, job = self.past, self.jobs.get(id(optimizer))
        has_trouble = job is not None and job.trouble is not None
        ranks = past.rank_groups.at_update(optimizer)
        is_looking = self.own_step is not None and self.own_step.vetoes_all
        if ranks is not None and scaler is not None and not is_looking:  # else `judge` has asked
            is_bad = has_trouble or (job is None and ranks.loss is not None)
            word = ranks.ask(verdict=BAD if is_bad else SKIPPED, is_harmed=ranks.harm is not None)
            has_trouble = word.verdict == BAD
            if job is not None:
                job.confirm_snapshot(is_good=not word.is_harmed)
            if word.is_harmed and self.own_step is None:
                with past.aside:
                    past.was_skipped = True
                    self._answer_harm(ranks, optimizer)
                return
        with past.aside:
            if has_trouble:
                past.was_skipped = True
                self.answer.skipped(optimizer)
            else:
                self._absorbed(optimizer, scaler)

    def _absorbed(self, optimizer: Optimizer, scaler: Any) -> None:
        """An update that a scaler has skipped, for a reason that is its own."""
        past = self.past
        past.was_skipped = True
        past.tracing.tick(arm_at=self.settings.arm_at)
        past.scaler_skips += 1
        evidence = past.evidence
        evidence.skips_in_a_row += 1
        evidence.scale = scaler.get_scale() if scaler is not None else None
        hopeless = evidence.scale is not None and evidence.scale <= 1.0
        if evidence.skips_in_a_row > (1 if hopeless else self.settings.max_scaler_skips):
            self.answer.skipped(optimizer)  # no loss scale is small enough

    def _look_after_update(self, optimizer: Optimizer, job: Job | None) -> None:
        past = self.past
        if job is None and not past.tracing.is_on and _is_on_cuda(optimizer):
            self._check_parameters_late(optimizer)
        elif job is None:
            self._check_parameters([optimizer], everything=past.tracing.is_on)
        elif not job.is_finite_after_update(past.evidence.due):
            self._harmed(bad_parameters(optimizer))
        elif past.tracing.is_on or past.evidence.statistics_are_due(optimizer):
            self._check_statistics(optimizer)

    def _check_parameters(self, optimizers: list[Optimizer], *, everything: bool) -> None:
        """Look at those parameters whose turn it is after the update, or at all of them."""
        evidence = self.past.evidence
        for optimizer in optimizers:
            params = params_of(optimizer) if everything else evidence.due(optimizer)
            if not all_finite(params):
                self._harmed(bad_parameters(optimizer))
            if everything or evidence.statistics_are_due(optimizer):
                self._check_statistics(optimizer)

    def _check_parameters_late(self, optimizer: Optimizer) -> None:
        """Look at those whose turn it is; the answer is read when the update after it is over.

        So nothing waits for the device.
        """
        evidence, waiting = self.past.evidence, self.past.late_parameters
        late = waiting.pop(optimizer, None)
        if late is not None and late.read():
            found = bad_parameters(optimizer)
            if found.named:
                self._harmed(dataclasses.replace(found, is_late=True))
            self._check_statistics(optimizer)
        due: list[Tensor] = list(evidence.due(optimizer))
        if evidence.statistics_are_due(optimizer):
            due += evidence.statistics()
        if due:
            waiting[optimizer] = LateFlag(nonfinite(due, exact_on_device=True))

    def _check_statistics(self, optimizer: Optimizer) -> None:
        bad = bad_statistics(self.past.evidence.statistics())
        if bad:
            self._harmed(bad_running_statistics(bad, optimizer))

    def _harmed(self, finding: BadValues) -> None:
        """The state of training has taken bad values; all ranks are told with the next update."""
        optimizer = finding.optimizer
        ranks = None if optimizer is None else self.past.rank_groups.of(optimizer)
        if ranks is None:
            self.answer.harmed(finding)
        elif ranks.harm is None:
            ranks.harm = finding

    def _answer_harm(self, ranks: Ranks, optimizer: Optimizer) -> None:
        """All ranks know by now that the update before has made something bad on one of them."""
        found = ranks.had_harm if ranks.had_harm is not None else bad_parameters(optimizer)
        self.answer.harmed(dataclasses.replace(found, is_after_update=True))

    def _answer_unheard_harm(self) -> None:
        """No update will come with which the other ranks could be told of the last one.

        Where all have the same weights, each goes back by itself.
        """
        for ranks in self.past.rank_groups.known():
            finding, ranks.harm = ranks.harm, None
            if finding is None:
                continue
            job = self.jobs.get(id(finding.optimizer)) if ranks.is_replicated else None
            done = None if job is None else job.roll_back()
            found = dataclasses.replace(finding, did=done or _AFTER_LAST)
            self.tell(found, strategy="none" if done is None else "reset")
            self.past.stopped = self.past.stopped or self.settings.on_nan == "stop"

    def shared(self, incident: Incident, optimizer: Optimizer | None) -> Incident:
        """The incident as the rank where it began tells it, if several train together."""
        ranks = None if optimizer is None else self.past.rank_groups.of(optimizer)
        return incident if ranks is None else ranks.shared(incident)

    def mend_harm(self, job: Job, *, was_counted: bool = True) -> bool:
        """Whether parameters were bad, on any rank; they have been put back then."""
        optimizer = job.parts.optimizer
        ranks = self.past.rank_groups.of(optimizer)
        if not (ranks.word.is_harmed if ranks is not None else not job.is_finite()):
            return False
        found = None if ranks is None else ranks.had_harm
        found = bad_parameters(optimizer) if found is None else found
        is_late = was_counted and ranks is not None
        self.answer.harmed(dataclasses.replace(found, is_after_update=was_counted, is_late=is_late))
        return True

    def incident(self, finding: BadValues, *, strategy: str, explain: bool = True) -> Incident:
        """What was found; where and why as far as that can be known here and now."""
        past = self.past
        if not explain:
            return incident_of(finding, past.evidence, strategy=strategy)
        if past.incident_clock is None:
            past.incident_clock = past.tracing.clock
        incident = incident_of(finding, past.evidence, strategy=strategy)
        with past.aside:
            located = finding.located
            if located is None:
                located = self._run_again(incident, finding, sys._getframe(1))
            if located is not None and located.origin is not None:
                origin, diagnosis = located.origin, located.diagnosis
                step = incident.step if finding.located is not None else located.step
                return dataclasses.replace(incident, step=step, origin=origin, diagnosis=diagnosis)
            found = explain_incident(incident, finding, past.evidence, past.tracing, self.settings)
            if located is not None:  # it was finite this time
                found = dataclasses.replace(found, diagnosis=located.diagnosis)
            if finding.error is not None and (found.origin is None or found.origin.file is None):
                found = self._at_error(found, finding.error)
            return found
        return incident

    def _at_error(self, incident: Incident, error: BaseException) -> Incident:
        """The incident at the line of the user's own through which the error has come last."""
        entries: list[TracebackType] = []
        entry = error.__traceback__
        while entry is not None:
            entries.insert(0, entry)
            entry = entry.tb_next
        users = [each for each in entries if kind_of(each.tb_frame.f_code) == USER]
        own = [each for each in users if not is_installed(each.tb_frame.f_code.co_filename)]
        for each in (own or users)[:1]:
            place = Place(each.tb_frame.f_code, each.tb_lasti, each.tb_lineno)
            span = resolve(place, folder=self.settings.folder)._asdict()
            span.pop("expression")
            before = Origin(phase="forward") if incident.origin is None else incident.origin
            origin = dataclasses.replace(before, exact=False, **span)
            return dataclasses.replace(incident, origin=origin)
        return incident

    def as_before(self, incident: Incident) -> Incident:
        """One that was not run again as the last in which the same values went bad, if any was."""
        cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
        if cause != "unknown" or (incident.origin is not None and incident.origin.file is not None):
            return incident
        from stayfinite.explain.experiments import alike

        bare = dataclasses.replace(incident, origin=None, diagnosis=None)
        for known in reversed(self.past.incidents):
            if (taken := alike(bare, known, known)) is not bare:
                return taken
        return incident

    def with_place(self, finding: BadValues) -> BadValues:
        """A bad loss that is answered later, with what a replay shows of it now.

        When its update comes, the batch may have gone from the loop's variables.
        """
        incident = incident_of(finding, self.past.evidence, strategy="recover")
        if incident.world > 1:  # ranks run it again together
            return finding
        with self.past.aside:
            located = self._run_again(incident, finding, sys._getframe(1))
            return dataclasses.replace(finding, located=located)
        return finding

    @property
    def _can_run_loop_again(self) -> bool:
        """Whether it is the loop's body that is run again, and not a step that is ours to call."""
        is_ours = self.own_step is not None or self.replay is not None
        is_ours = is_ours or any(job.replay is not None for job in self.jobs.values())
        return self.notes_moments and not self.past.tracing.is_on and not is_ours

    def _run_again(
        self, incident: Incident, finding: BadValues, frame: FrameType | None
    ) -> Incident | None:
        """The incident as it shows when the running loop's body is run again; None if not."""
        if not self._can_run_loop_again:
            return None
        optimizer, groups = finding.optimizer, self.past.rank_groups
        ranks = None if optimizer is None else groups.of(optimizer)
        is_together = ranks is not None and not ranks.is_replicated
        if incident.world > 1 and not is_together and not groups.may_run_apart(optimizer):
            return None
        from stayfinite.guard.loop_replay import LoopReplay, standing_at, standing_in

        if self._loop_replay is None:
            self._loop_replay = LoopReplay(self, self.past.moments)
        if ranks is not None and is_together:
            if finding.is_after_update:
                return None
            return self._loop_replay.locate_together(incident, finding, standing_at(frame), ranks)
        is_over = finding.is_after_update and not self.past.moments.has_weights
        if is_over and not finding.is_in_turn:
            return self._loop_replay.locate_update(incident, finding, self._update_frame)
        if finding.is_of_rates:
            return self._loop_replay.locate_update(incident, finding, frame)
        error = finding.error
        standing = standing_at(frame) if error is None else standing_in(error)
        return self._loop_replay.locate(incident, finding, standing)

    def computed_again(self, job: Job, incident: Incident, gradients: Pairs) -> ComputedStep | None:
        """A step that was finite when it was run again, to be put in the place of the bad one.

        None where that cannot be; all ranks must ask together.
        """
        from stayfinite.guard.replay import is_passing

        ranks, replay = job.ranks, self._loop_replay
        if job.any_rank(not is_passing(incident)) or (ranks is not None and ranks.may_miss_some()):
            return None
        computed = None
        if replay is not None:
            computed, replay.computed = replay.computed, None
        if ranks is not None and ranks.is_replicated:
            computed = self._computed_by_all(job, incident, gradients, ranks)
        moments = self.past.moments
        fits = computed is not None and computed.fits(
            gradients,
            passes=moments.passes_since_update,
            had_gradients=any(moments.has_gradients.values()),
        )
        return None if job.any_rank(not fits) else computed

    def _computed_by_all(
        self, job: Job, incident: Incident, gradients: Pairs, ranks: Ranks
    ) -> ComputedStep | None:
        """The step of replicas, of which one has run it again by itself so far."""
        from stayfinite.guard.loop_replay import LoopReplay, standing_at

        if job.any_rank(not self._can_run_loop_again):
            return None
        if self._loop_replay is None:
            self._loop_replay = LoopReplay(self, self.past.moments)
        finding = bad_gradients(gradients, job.parts.optimizer)
        standing = standing_at(sys._getframe(1))
        return self._loop_replay.compute_together(incident, finding, standing, ranks)

    def tell(self, finding: BadValues, *, strategy: str) -> Incident | None:
        """Make an incident of bad values and record it; None if there are very many already."""
        self.past.evidence.saw_bad = True
        if len(self.past.incidents) >= MOST_INCIDENTS:
            return None
        return self.record(self.incident(finding, strategy=strategy))

    def tell_together(self, finding: BadValues, *, strategy: str) -> Incident | None:
        """The same where all ranks do so: the incident is that of the rank where it began."""
        self.past.evidence.saw_bad = True
        if len(self.past.incidents) >= MOST_INCIDENTS:
            return None
        incident = self.incident(finding, strategy=strategy)
        return self.record(self.shared(incident, finding.optimizer))

    def record(self, incident: Incident) -> Incident:
        """Keep it, and notify the sinks."""
        past = self.past
        if self.describe is not None:
            incident = self.describe(incident)
        incident = with_announcement(incident, past.forecasts)
        past.evidence.saw_bad = True
        past.incidents.append(incident)
        if past.on_incident is not None:
            past.on_incident(incident)
        return incident

    def foretell(self, forecast: Forecast) -> None:
        """Keep a forecast or a spike, and notify the sinks."""
        past = self.past
        past.forecasts.append(forecast)
        if past.on_forecast is not None:
            past.on_forecast(forecast)

    def conclude(self, job: Job, incident: Incident, recovery: Recovery) -> None:
        """Record the incident with what was done; raise if that was to give up."""
        detail = recovery.detail
        if job.config.quarantine and recovery.succeeded:
            with self.past.aside:
                detail = "; ".join(filter(None, (detail, self._set_aside(incident))))
        outcome = Outcome(strategy=recovery.strategy.value, detail=detail)
        incident = dataclasses.replace(incident, outcome=outcome)
        self.record(incident)
        if not recovery.succeeded:
            self.past.stopped = True
            what = in_short(incident)
            raise TrainingAbortedError(
                f"Training aborted due to NaN at step {incident.step}: {what}; {recovery.detail}",
                incident=incident,
            )

    def _set_aside(self, incident: Incident) -> str:
        """Take the bad samples out of the batches to come, where they are known; says which.

        One that is bad itself at once, and one whose value is finite but has no derivative: it lies
        at one exact point, which is no accident. One that met another singular value, when it does
        so again.
        """
        origin = incident.origin
        cause = None if incident.diagnosis is None else incident.diagnosis.cause
        if origin is None or incident.rank not in (rank(), -1):
            return ""
        if cause_of(cause).sort != "sample":
            return ""
        past, is_data = self.past, cause_of(cause).kind == "data"
        samples, dataset = guilty_samples(origin, is_data=is_data)
        if is_data and not samples:  # it was not run again
            samples, dataset = past.tracing.deliveries.bad_samples()
        is_sure = is_data or origin.phase == "backward"
        chosen = [each for each in samples if is_sure or (dataset, each) in past.suspects]
        past.suspects.update((dataset, each) for each in samples)
        if not chosen or not past.tracing.deliveries.set_aside(chosen, dataset):
            return ""
        known = self.quarantine.setdefault(dataset, [])
        known += [each for each in chosen if each not in known]
        noun = "sample" if len(chosen) == 1 else "samples"
        are = "is" if len(chosen) == 1 else "are"
        return f"{noun} {in_words(list(map(str, chosen)))} of {dataset} {are} not read again"

    def arm_at(self) -> int:
        """The tick from which a second run has to be traced: two steps before the incident."""
        past = self.past
        end = past.tracing.clock if past.incident_clock is None else past.incident_clock
        return past.tracing.clock_before(end, steps=2)

    def is_diverging(self, incident: Incident, optimizer: Optimizer | None = None) -> bool:
        """Whether training was running away before the incident; by default by the busiest."""
        from stayfinite.explain.clue import Clue

        context = self.past.evidence.context(optimizer, step=incident.step)
        origin = incident.origin if incident.origin is not None else Origin(phase="forward")
        return Clue(origin, context).is_diverging

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """A time in which every operation is looked at."""
        tracing = self.past.tracing
        was_on = tracing.is_on
        if not was_on:
            tracing.switch_on(is_brief=True)
        try:
            yield
        finally:
            if not was_on:
                tracing.switch_off()

    def keep_operations(self) -> None:
        """Keep what the bad operation was given, in steps that are traced from now on."""
        self.past.tracing.keeps = True

    def keep_step(self, job: Job, calls: list[Call], *, step: int) -> None:
        """Remember a bad step whose beginning has just been put back."""
        with self.past.aside:
            from stayfinite.guard.capsule_step import keep_step

            self._kept_step = keep_step(job, calls, self.past.tracing.kept, step=step)

    def report(self) -> GuardReport:
        """The incidents so far, shown inline in a notebook and as text when printed."""
        from stayfinite.report.html.notebook import GuardReport

        folder = Path(self.settings.folder) if self.settings.folder else None
        return GuardReport(self.incidents, steps=self.steps, folder=folder)

    def capsule(
        self,
        path: str | os.PathLike[str],
        *,
        with_batch: bool = False,
        with_source: bool = True,
        redact: Redact | None = None,
    ) -> Path:
        """Write the last bad step that `step` ran into one file, which `stayfinite replay` runs.

        It has the state before the step, the generators, the bad operation, versions, and your
        own source files. `with_batch` adds the batch, as `redact(batch)` gives it; without it
        only statistics of what was computed from data are in the file. Nothing is pickled.
        """
        from stayfinite.capsule.file import write_capsule
        from stayfinite.capsule.make import check_redaction

        check_redaction(redact, with_batch=with_batch)
        kept = self._kept_step
        same = [each for each in self.incidents if kept is not None and each.step == kept.step]
        if kept is None or not same:
            raise CapsuleError(
                "there is no bad step to put into a capsule: guard.step has to have run one. For "
                "a script as it is: stayfinite run --capsule FILE."
            )
        if same[-1].rank not in (rank(), -1):
            raise CapsuleError(
                f"the step went bad on rank {same[-1].rank}: call guard.capsule there."
            )
        made = kept.capsule(same[-1], with_batch=with_batch, with_source=with_source, redact=redact)
        return write_capsule(path, made)


def with_announcement(incident: Incident, forecasts: Sequence[Forecast]) -> Incident:
    """The incident, which says how long before it was foretold if it was.

    That training diverges announces no bad sample and no fault in the script.
    """
    diagnosis = incident.diagnosis
    if diagnosis is None:
        return incident
    is_end_of_training = cause_of(diagnosis.cause).sort in ("divergence", "precision")
    for forecast in forecasts:
        ahead = incident.step - forecast.step
        is_about = forecast.steps_high is not None and 0 <= ahead <= forecast.steps_high
        is_meant = forecast.signal != "divergence" or is_end_of_training
        if is_about and is_meant and forecast.outcome is None:
            said = f"announced {count(ahead, 'step')} before: {forecast_words(forecast)}"
            evidence = (said, *diagnosis.evidence)
            return dataclasses.replace(
                incident, diagnosis=dataclasses.replace(diagnosis, evidence=evidence)
            )
    return incident


def guilty_samples(origin: Origin, *, is_data: bool) -> tuple[list[Any], str]:
    """The indices of the samples whose rows are bad, with the class of their dataset.

    None where every row of a larger batch is bad, which is not the doing of samples, or where they
    are more than are kept.
    """
    facts = origin.facts.get("samples") or {}
    samples, rows, size = facts.get("samples"), facts.get("row_count"), facts.get("size")
    if not samples or not rows or not size or len(samples) != rows:
        return [], ""
    is_some = rows < size or (is_data and size == 1)
    return (list(samples), facts.get("dataset", "")) if is_some else ([], "")


def _number(loss: Any) -> float | None:
    """A loss that may still be on a device; None if there is none, or it is not finite."""
    if loss is None:
        return None
    value = float(loss)  # host sync
    return value if math.isfinite(value) else None


class GuardPast:
    """What a guard has seen and told. Guards that watch a process by turns have the same one."""

    def __init__(
        self,
        *,
        on_incident: Callable[[Incident], None] | None = None,
        on_step: StepSeen | None = None,  # told of each attempted update
        on_pass: Callable[[Evidence], None] | None = None,  # of each backward pass before any
        on_begin: Callable[[], None] | None = None,  # of the first backward pass
        on_bad_loss: Callable[[Tensor], None] | None = None,
        on_located: Callable[[Incident], None] | None = None,  # before anything is proven
        on_forecast: Callable[[Forecast], None] | None = None,
    ) -> None:
        self.on_incident, self.on_begin, self.on_bad_loss = on_incident, on_begin, on_bad_loss
        self.on_located, self.on_forecast, self.on_pass = on_located, on_forecast, on_pass
        self.incidents: list[Incident] = []
        self.forecasts: list[Forecast] = []
        self.quarantine: dict[str, list[Any]] = {}
        self.suspects: set[tuple[str, Any]] = set()  # samples that met a singular value
        self.forecaster: Forecaster | None = None
        self.scaler_skips = 0
        self.stopped = self.crashed = False
        self.was_skipped = False  # the update that is under way, by a scaler
        self.incident_clock: int | None = None  # when the first was noticed
        self.evidence = Evidence(on_step)
        self.moments = Moments()
        self.tracing = Tracing(self.evidence.entered)
        self.aside = Safely(
            "stayfinite failed inside a step; training goes on without it",
            pause=self.tracing.pause,
        )
        self.rank_groups = RankGroups()
        self.losses = LossJudge(self.evidence)
        self.by_hand = UpdatesByHand()
        self.last_look = LastLook(self.evidence)
        self.later_traces = LaterTraces(self.tracing)
        self.late_parameters: weakref.WeakKeyDictionary[Optimizer, LateFlag] = (
            weakref.WeakKeyDictionary()
        )

    def has_trained(self) -> bool:
        """Whether the last bad step was used all the same: what was finite in it, or a new try."""
        outcome = self.incidents[-1].outcome if self.incidents else None
        return outcome is not None and (
            outcome.strategy == "clip" or outcome.detail == COMPUTED_AGAIN
        )


class LaterTraces:
    """Switches the tracer on for some steps after an incident whose operation is not known."""

    STEPS, TIMES = 3, 3

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._steps_left, self._times_left = 0, self.TIMES

    def begin(self, incident: Incident) -> None:
        known = incident.origin is not None and incident.origin.exact
        if not known and not self._tracing.is_on and self._times_left:
            self._times_left -= 1
            self._steps_left = self.STEPS + 1  # this one is still to be counted
            self._tracing.switch_on()

    def stepped(self) -> None:
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._tracing.switch_off()


_MOST_FAR = 64


class LossJudge:
    """Judges losses as they were before a scaler multiplied them.

    One that is on another device is judged there; `far_flags` tells of it at the update.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._unscaled: Any = WeakIdKeyDictionary()
        self._far: list[Tensor] = []
        self.is_last_bad: bool | Tensor = False  # that of the last backward pass

    def scaled(self, losses: Any, results: Any) -> None:
        """A scaler has made `results` of `losses`."""
        self._evidence.uses_scaler = True
        before, after = named_tensors(losses, ""), named_tensors(results, "")
        for (_, loss), (_, result) in zip(before, after, strict=False):
            self._unscaled[result] = loss

    def bad_one(self, root: Tensor) -> Tensor | None:
        """The loss behind the root of a backward pass, if it is known to be bad."""
        loss: Tensor = self._unscaled.get(root, root) if self._evidence.uses_scaler else root
        value = finite_number(loss)
        if value is not None:
            self.is_last_bad = False
            self._evidence.saw_loss(value)
        elif loss.device.type != "cpu":
            self._saw_far(loss)
        elif not all_finite([loss]):
            self.is_last_bad = True
            self._evidence.bad_loss = loss.detach()
            return loss
        return None

    def _saw_far(self, loss: Tensor) -> None:
        flag = self.is_last_bad = nonfinite([loss], exact_on_device=True)
        if len(self._far) >= _MOST_FAR:  # no optimizer asks for them, so they are not all kept
            flag = torch.stack([*self._far, flag]).any()
            self._far.clear()
        self._far.append(flag)
        self._evidence.saw_loss(loss.detach())

    def far_flags(self) -> list[Tensor]:
        """One for each loss that was far away: NaN where it was bad, else 0. Each is told once."""
        if not self._far:
            return []
        far, self._far = self._far, []
        return [torch.where(flag, float("nan"), 0.0) for flag in far]


_MOST_NAMED = 8


class LastLook:
    """What is not finite among the parameters and buffers that are still alive.

    `bad` names it. There is no collective: of a DTensor the local shard is looked at.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.is_over = False
        self.bad: list[str] = []
        self.unseen: str | None = None

    def take(self, modules: Mapping[str, nn.Module]) -> Iterator[BadValues]:
        """A finding for each optimizer, and for what was trained without one, that is bad."""
        trained = {id(p) for each in self._evidence.optimizers() for p in params_of(each)}
        try:
            for finding in self._bad_in_training(trained):
                self._note(name for name, tensor in finding.named if not all_finite([tensor]))
                yield finding
            if not self.bad:
                self._look_at_others(modules, trained | set(map(id, self._evidence.trained)))
        except Exception as error:
            self.unseen = f"{type(error).__name__}: {error}"

    def _bad_in_training(self, optimized: set[int]) -> Iterator[BadValues]:
        evidence = self._evidence
        for optimizer in evidence.optimizers():
            if not all_finite(params_of(optimizer)):
                yield bad_parameters(optimizer)
        by_hand = [leaf for leaf in evidence.trained if id(leaf) not in optimized]
        if bad := [leaf for leaf in by_hand if not all_finite([leaf])]:
            names = Names()
            named = [(f"parameters.{names.tensor(t) or number}", t) for number, t in enumerate(bad)]
            yield BadValues(named, did="the bad values are already in the weights")
        if statistics := bad_statistics(evidence.statistics()):
            yield bad_running_statistics(statistics, evidence.at_work())

    def _note(self, names: Iterator[str]) -> None:
        for name in names:
            if name not in self.bad and len(self.bad) < _MOST_NAMED:
                self.bad.append(name)

    def _look_at_others(self, modules: Mapping[str, nn.Module], trained: set[int]) -> None:
        """Averaged weights, a target network; buffers that training may have poisoned."""
        for name, module in modules.items():
            params = list(module.named_parameters())
            self._note(f"{name}.{path}" for path, param in params if not all_finite([param]))
            if any(id(param) in trained for _, param in params):
                bad = [
                    (path, each) for path, each in module.named_buffers() if not all_finite([each])
                ]
                # A mask may hold an Inf on purpose.
                self._note(f"{name}.{path}" for path, each in bad if classify(each) is NaNType.NAN)


def _is_on_cuda(optimizer: Optimizer) -> bool:
    params = optimizer.param_groups[0]["params"] if optimizer.param_groups else []
    return bool(params) and params[0].is_cuda


# What torch and careful scripts say when they meet one.
_TELLING = re.compile(
    r"\bnan\b|\binf(inite|inity)?\b|non-?finite|not finite|invalid values|within the support"
    r"|positive-?definite|singular|converge|diverg|probability tensor|(under|over)flow",
    re.IGNORECASE,
)
_ASKS = re.compile(r"is_?nan|is_?inf|is_?finite|\bnan\b", re.IGNORECASE)
_MAKES_INF = re.compile(r"(Div|Reciprocal|Rsqrt|Log(1p|2|10)?|Exp(m1)?|Pow|Atanh|Tan)$")
_ABOUT_SHAPE = ("shape", "dtype", "device", "ndim", "dim", "size", "numel", "requires_grad")
_FRAMES = 8
_MOST = 500


def bad_values_of(error: BaseException) -> list[Named]:
    """NaN tensors in the variables around the error, innermost frame first; mostly none.

    A loss, which is a number with a graph, counts whatever the message says. Else only where that
    speaks of one, where the `assert` or `if` before the error asks about one, or where the script
    left by sys.exit() with a NaN number at hand: an ordinary bug beside NaN-padded data is no
    incident.
    """
    left = isinstance(error, SystemExit)
    stack = [each for each in traceback.walk_tb(error.__traceback__) if not _is_ours(each[0])][::-1]
    if left:  # trackers put a function of theirs in the place of sys.exit
        stack = [(frame, line) for frame, line in stack if frame.f_code.co_name != "exit"]
    frames = [frame for frame, _ in stack]
    if losses := _first(bad_losses_in, frames[:_FRAMES]):
        return losses
    asked = question_at(frames[0].f_code, stack[0][1]) if stack else None
    asks = asked is not None and _ASKS.search(ast.unparse(asked)) is not None
    if asked is not None and (found := _bad_in_question(asked, frames[0], is_any=asks)):
        return found
    is_telling = asks or (not left and _TELLING.search(str(error)) is not None)
    if not left and not is_telling:
        return []
    for frame in frames[: _FRAMES if is_telling else 1]:
        held = itertools.chain.from_iterable(
            itertools.starmap(_inside, variables_of(frame).items())
        )
        found = [
            (name, value)
            for name, value in itertools.islice(held, _MOST)
            if isinstance(value, Tensor) and classify(value) is NaNType.NAN
        ]
        found = found if is_telling else [pair for pair in found if pair[1].numel() == 1]
        if found:
            return found
    return _first(_computed_infinities, frames[:_FRAMES]) if is_telling else []


def _computed_infinities(frame: FrameType) -> list[Named]:
    """Variables that an operation made infinite; a mask of -Inf is written, and not computed."""
    held = ((n, v) for n, v in variables_of(frame).items() if isinstance(v, Tensor))
    return [
        (name, value)
        for name, value in itertools.islice(held, _MOST)
        if _MAKES_INF.match(node_name(value.grad_fn.name() if value.grad_fn else None))
        and not all_finite([value])  # host sync
    ]


def _first(look: Callable[[FrameType], list[Named]], frames: list[FrameType]) -> list[Named]:
    return next((found for frame in frames if (found := look(frame))), [])


def _is_ours(frame: FrameType) -> bool:
    """Whether it is a frame of a replay, which holds what was bad before."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "stayfinite"


def _bad_in_question(asked: ast.expr, frame: FrameType, *, is_any: bool) -> list[Named]:
    """The variables that the question is about which are NaN, or with `is_any` not finite."""
    variables, waiting, names = variables_of(frame), [asked], dict[str, None]()
    while waiting:  # what asks for a shape asks for no values
        node = waiting.pop()
        is_about_shape = isinstance(node, ast.Attribute) and node.attr in _ABOUT_SHAPE
        if is_about_shape or is_call(node, "len", "isinstance", "type", "is_tensor", "hasattr"):
            continue
        if isinstance(node, ast.Name):
            names[node.id] = None
        waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
    held = [(name, variables[name]) for name in names if isinstance(variables.get(name), Tensor)]
    if is_any:
        return [(name, value) for name, value in held if not all_finite([value])]
    return [(name, value) for name, value in held if classify(value) is NaNType.NAN]


def numbers_behind(loss: Tensor, *, most: int = 32) -> set[int]:
    """The numbers of the nodes that made it, the nearest first: what it was scaled or summed from.

    Private: torch numbers nodes in the order in which they are made, and tells it nowhere else.
    """
    found: set[int] = set()
    waiting = [loss.grad_fn]
    while waiting and len(found) < most:
        node = waiting.pop(0)
        if node is not None:
            found.add(node._sequence_nr())
            waiting += [each for each, _ in node.next_functions]
    return found


def bad_losses_in(frame: FrameType) -> list[Named]:
    """Variables of the frame that hold a single number with a graph which is not finite."""
    return [
        (name, value)
        for name, value in variables_of(frame).items()
        if isinstance(value, Tensor)
        and value.grad_fn is not None
        and value.numel() == 1
        and not all_finite([value])  # host sync
    ]


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """A variable, and what is one level inside it."""
    if isinstance(value, dict):
        return [(f"{name}.{key}", item) for key, item in list(value.items())[:50]]
    if isinstance(value, (list, tuple)):
        return [(f"{name}.{index}", item) for index, item in enumerate(value[:50])]
    return [(name, value)]
