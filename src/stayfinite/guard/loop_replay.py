"""The bad step run again in place: the body of the running loop, under the tracer.

The loop is still there when a value turns out bad, with the batch in its variables and the update
not applied. Its body is run once more from the state of the turn's beginning, and ends where the
bad value was noticed. Afterwards everything is as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from stayfinite.detect.finite import all_finite
from stayfinite.detect.hooks import (
    StepListener,
    listening_alone,
    run_again,
    together,
    watch_backward,
    watch_numbers,
    watch_scalers,
    watch_scaling,
    watch_steps,
)
from stayfinite.detect.memory import local, unwrap
from stayfinite.distributed import is_lost_peer
from stayfinite.errors import TrainingAbortedError
from stayfinite.guard.evidence import (
    BadValues,
    bad_gradients,
    bad_parameters,
    explain_incident,
)
from stayfinite.guard.ranks import Ranks, lost_peer
from stayfinite.living import Names, has_compiled_module, living, one_look
from stayfinite.locate.source import (
    Place,
    call_at,
    is_installed,
    positions,
    relative,
    resolve,
    user_places,
)
from stayfinite.nested import named_tensors
from stayfinite.records import Incident, Origin, Phase
from stayfinite.replay.loop import (
    Body,
    CannotRunError,
    Loop,
    asks_for_rank,
    attributes_assigned,
    body_of,
    function_around,
    loops_around,
    variables_of,
)
from stayfinite.replay.moments import GONE, ITERATORS, Moment, Moments, user_frames
from stayfinite.replay.protection import HalfSum, ReplayEnded, call_within, protected
from stayfinite.replay.target import replaced_in, taken_in, values_at_start
from stayfinite.snapshot import Mark
from stayfinite.snapshot.copies import same
from stayfinite.training import Pairs, gradients_of, pairs_of, params_of, put_gradients

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard

logger = logging.getLogger("stayfinite")
_MOST_SECONDS = 20.0
_MOST_TIMES = 8  # in one training
_MOST_FUNCTIONS = 3  # further out they are no steps any more


@dataclass(frozen=True)
class Turn:
    """The turn of a loop that is under way in a frame.

    `began` is the moment from which it is run again, `since` are those that came after it. `first`
    is the line to begin at where the turn began before anything was noted. Between the moment and
    the turn's beginning the script may change its objects: `newer` are the attributes that are
    taken as they are now, `later` is a moment that shows others so.
    """

    frame: FrameType
    loop: Loop
    line: int | None  # None: its body is over
    began: Moment
    since: tuple[Moment, ...]
    first: int = 0
    newer: Container[str] = ()
    later: Moment | None = None
    instead: tuple[Any, Any] | None = None  # a batch, and another in its place
    put_weights: Callable[[], None] | None = None  # others, to begin with
    is_update: bool = False  # it is the end of the turn before, with the weights of then

    @property
    def batch(self) -> Any:
        """The batch of this turn; GONE if there is none, or several, or it is not known."""
        handed = [each for each in self.since if each.kind == "delivered"]
        handed += [self.began] if self.is_start else []
        return handed[0].batch if len(handed) == 1 else GONE

    @property
    def is_start(self) -> bool:
        """Whether it began as a loader handed its batch to the loop."""
        line = self.began.line_in(self.frame)
        is_header = line is not None and self.loop.statement(line) < 0
        return is_header and self.began.kind == "delivered"

    def ways(self) -> Iterator[Turn]:
        """It, and then with objects as they were later, in case that they were changed since."""
        yield self
        if self.began.kind == "passed" and self.since:
            yield dataclasses.replace(self, later=self.since[0])
        elif self.began.attributes and not (self.is_start or self.first):
            yield dataclasses.replace(self, newer=_Everything())

    def carried(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Tensors that earlier turns have computed, in variables and in attributes of modules."""
        now = {**variables_of(self.frame), **values}
        for name in self.loop.recurrent & now.keys():
            yield from named_tensors(now[name], name)
        for ref, name, value in self.began.attributes:
            if isinstance(owner := ref(), nn.Module) and isinstance(value, Tensor):
                yield f"{type(owner).__name__}.{name}", value

    def taken(self) -> dict[int, Any]:
        """What generators have given in it."""
        return taken_in(self.loop, self.frame, since=self.first, until=self.line)

    def values(self) -> dict[str, Any]:
        """The variables that had other values as it began; CannotRunError if some are unknown."""
        values = self.began.values_in(self.frame)
        assigned = self.loop.assigned_between(self.first, self.line)
        values = {n: v for n, v in values.items() if n in assigned or type(v) in ITERATORS}
        if self.first:
            return values
        is_known = self.is_start and self.began.batch is not GONE
        delivered = [self.began.batch] if is_known else []
        given = values_at_start(self.loop, self.frame, delivered)
        names = self.loop.given
        values = {n: v for n, v in values.items() if n not in names} | given
        if self.instead is not None and is_known:
            variables = variables_of(self.frame)
            now = {n: values.get(n, variables.get(n)) for n in names}
            values |= {n: replaced_in(value, *self.instead) for n, value in now.items()}
        return values


@dataclass(frozen=True)
class ComputedStep:
    """A step that was finite when it was run again, as it stood just before its update."""

    params: Sequence[Tensor]
    gradients: Sequence[Tensor]  # copies, of the local shards of DTensors
    state: Mark  # buffers and generators, say
    passes: int  # backward passes in it

    def fits(self, pairs: Pairs, *, passes: int, had_gradients: bool) -> bool:
        """Whether it can take the place of a step with these gradients and so many passes.

        What it gave is not that step's where gradients were there before it, of unknown values.
        """
        from stayfinite.guard.replay import same_values

        params = [param for param, _ in pairs]
        if passes != self.passes or not same(params, self.params):
            return False
        first = [local(gradient) for _, gradient in pairs]
        kinds = [(each.shape, each.dtype, each.layout) for each in first]
        if kinds != [(each.shape, each.dtype, torch.strided) for each in self.gradients]:
            return False
        is_same = same_values(first, [*self.gradients])
        return not had_gradients if is_same is None else is_same

    @torch.no_grad()
    def put(self, pairs: Pairs) -> None:
        """Put it in the place of the step with these gradients, whose update comes now."""
        self.state.restore()
        put_gradients(pairs)
        for (_, gradient), again in zip(pairs, self.gradients, strict=True):
            local(gradient).copy_(again)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of one run: the incident, if it went bad, and whether it was the same step."""

    incident: Incident | None = None
    is_same: bool = False
    reason: str | None = None
    loss: float | None = None  # of its last backward pass, if that was finite
    came_to_end: bool = False
    gradients: Mapping[str, Tensor] | None = None  # copies, if it came to its update and was finite
    computed: ComputedStep | None = None  # if it is then the whole step that the update is for
    was_bad: bool = False  # whether or not the operation was seen
    has_bad_gradients: bool = False  # it came to its end without an update, and left these
    error: BaseException | None = None  # with which it ended, if that came out of the user's code
    is_over: bool = False  # it came to its end, or to where it was bad
    has_passed: bool = False  # there was a backward pass in it
    passed_at: Place | None = None  # where the last one was begun
    sums: Sequence[HalfSum] = ()  # over the ranks, which it did not take part in
    took: float = 0.0  # seconds


@dataclass(frozen=True)
class StepAgain:
    """A bad step that a turn of a loop has shown, and shows as often as it is run again."""

    replay: LoopReplay
    turn: Turn
    incident: Incident
    finding: BadValues
    standing: Sequence[tuple[FrameType, int]]

    def run(self, *, is_traced: bool = True, **changed: Any) -> Replayed:
        """Run it again, with these fields of its turn changed; in eager mode if it is traced."""
        turn = dataclasses.replace(self.turn, **changed)
        return self.replay.run(
            turn, self.incident, self.finding, self.standing, is_traced=is_traced
        )


class LoopReplay:
    """Runs the turn of the loop that is under way again, for one guard."""

    def __init__(self, guard: Guard, moments: Moments) -> None:
        self._guard, self._moments = guard, moments
        self._left = _MOST_TIMES
        self._tried: set[object] = set()  # places for which changes and experiments were made
        self.reasons: list[str] = []  # why the last search found nothing
        self.computed: ComputedStep | None = None  # the last step, if it was finite this time

    @one_look()
    def locate(
        self, incident: Incident, finding: BadValues, standing: Sequence[tuple[FrameType, int]]
    ) -> Incident | None:
        """The incident with origin and diagnosis; None if no loop's body showed it.

        `standing` are the user's frames with their lines, innermost first.
        """
        self.reasons, self.computed = [], None
        if not self._left:
            return None
        self._left -= 1
        until = time.monotonic() + _MOST_SECONDS
        best: tuple[Turn, Replayed] | None = None
        finite: tuple[Turn, Replayed] | None = None
        for turn, found in self._replays(incident, finding, standing, until=until):
            if _was_computed_before(found.incident):
                self.reasons.append(f"line {turn.loop.line}: the value was computed before it")
                continue
            if found.incident is None:
                self.reasons.append(f"line {turn.loop.line}: {found.reason or 'it was finite'}")
                is_whole = found.gradients is not None or (found.came_to_end and found.has_passed)
                if is_whole and finite is None:
                    finite = turn, found
                continue
            # What was there before the turn may have been made in a turn further out.
            is_old = _is_foreign(found.incident) and _place(found.incident) not in self._tried
            is_final = found.is_same and not is_old
            if best is None or is_final or (found.is_same and not best[1].is_same):
                best = turn, found
            if is_final:
                break
        is_old = best is None or _is_foreign(best[1].incident)
        if is_old and (updated := self._update_by_hand(incident, standing)) is not None:
            return updated
        if best is None and finite is not None:
            turn, found = finite
            once_more = self.run(turn, incident, finding, standing)
            return self._with_passing_fault(incident, finding, standing, turn, found, once_more)
        if best is None or best[1].incident is None:
            if time.monotonic() >= until:
                logger.warning(
                    "the bad step was run again to find its line, but %g s were too short for that",
                    _MOST_SECONDS,
                )
            return None
        its_turn, found = best
        if finding.error is not None and _is_nobodys(best[1].incident, its_turn):
            self.reasons.append(f"line {its_turn.loop.line}: the value was there before")
            return None
        if (ended := self._end_of_turn_before(its_turn, best[1].incident, standing)) is not None:
            return ended
        if (read := self._sample_again(its_turn, best[1].incident)) is not None:
            return read
        similar = _said(best[1].incident, its_turn, self.folder, is_same=found.is_same)
        on_located = self._guard.past.on_located
        if on_located is not None and not finding.was_read:  # one that is read may be trained on
            on_located(similar)
        place = _place(similar)
        if self._guard.past.rank_groups.known() or place in self._tried:
            return similar  # the other ranks wait for it; or it was examined before
        self._tried.add(place)
        step = StepAgain(self, its_turn, similar, finding, standing)
        return self._with_proof(step, self._with_change(step, similar))

    def _with_passing_fault(
        self,
        incident: Incident,
        finding: BadValues,
        standing: Sequence[tuple[FrameType, int]],
        turn: Turn,
        again: Replayed,
        once_more: Replayed,
        *,
        is_together: bool = False,
    ) -> Incident | None:
        """The incident of a step that was finite when it was run again; None if nothing is sure."""
        from stayfinite.guard.replay import (
            BAD_WHEN_COMPILED,
            FINITE_IN_EAGER,
            NOT_REPEATABLE,
            after_exchange,
            passing_fault,
        )

        if has_compiled_module() and not is_together:
            # While it is traced, a step runs in eager mode.
            compiled = self.run(turn, incident, finding, standing, is_traced=False)
            if compiled.was_bad:
                return dataclasses.replace(incident, diagnosis=BAD_WHEN_COMPILED)
        if again.gradients is None or once_more.gradients is None:
            is_repeated = again.loss is not None and again.loss == once_more.loss
            is_compiled = is_repeated and has_compiled_module()
            return dataclasses.replace(incident, diagnosis=FINITE_IN_EAGER) if is_compiled else None
        # One that runs apart has its own gradients; those that were noticed are of all ranks.
        is_apart = incident.world > 1 and not is_together
        named = [] if is_apart else [(n, t) for n, t in finding.named if n in again.gradients]
        first = [local(tensor) for _, tensor in named]
        names = [name for name, _ in named] or list(again.gradients)
        fault = passing_fault(
            first,
            [again.gradients[name] for name in names],
            [once_more.gradients[name] for name in names],
        )
        if not is_apart and fault is not NOT_REPEATABLE:
            self.computed = once_more.computed
        evidence = self._guard.evidence
        is_same_loss = evidence.bad_loss is None and again.loss == evidence.loss is not None
        if fault is not None and fault.confidence == "possible" and is_same_loss:
            said = "its loss came out the same, bit for bit"
            fault = dataclasses.replace(
                fault, confidence="likely", evidence=(*fault.evidence, said)
            )
        is_sure = fault is not None and (fault.confidence != "possible" or turn.batch is not GONE)
        if fault is None or not is_sure:
            return None
        worst = max(again.sums, key=lambda each: each.size, default=None)
        exchanged = None
        if is_apart:
            part = 0.0 if worst is None else worst.size
            exchanged = after_exchange(fault, again.gradients, part, world=incident.world)
        # Recovery computes the step once more with all ranks, which tells whether it repeats.
        is_open = exchanged is not None and exchanged[0].cause == "unknown"
        if exchanged is not None and not (is_open and self._guard.settings.on_nan == "recover"):
            fault, phase = exchanged
            place = again.passed_at if worst is None else worst.place
            origin = _begun_at(place, phase, self.folder)
            incident = dataclasses.replace(incident, origin=origin)
        return _with_evidence(
            dataclasses.replace(incident, diagnosis=fault),
            f"This step was run again twice from its beginning (the loop at {self._where(turn)}).",
        )

    @one_look()
    def compute_together(
        self,
        incident: Incident,
        finding: BadValues,
        standing: Sequence[tuple[FrameType, int]],
        ranks: Ranks,
    ) -> ComputedStep | None:
        """The step of replicas as all compute it once more; each must come here.

        Each runs it by itself first: who gave up in the midst of the others would end the run.
        """
        before, found = self._left, Replayed()
        turn: Turn | None = None
        for turn in self.turns(standing):
            found = self.run(turn, incident, finding, standing)
            if found.incident is not None or found.computed is not None:
                break
        self._left = before
        if ranks.agree(turn is None or found.computed is None) or turn is None:
            return None
        found = self.run(turn, incident, finding, standing, ranks=ranks)
        self._meet(ranks, found)
        return found.computed

    def _update_by_hand(
        self, incident: Incident, standing: Sequence[tuple[FrameType, int]]
    ) -> Incident | None:
        """The incident of weights that the script's own update made bad in the turn before."""
        passed = [each for each in self._moments if each.kind == "passed" and each.weights]
        then = passed[-1].weights if passed else []
        bad = [leaf for leaf, value, _ in then if all_finite([value]) and not all_finite([leaf])]
        names = Names() if bad else None
        finding = BadValues(
            [(f"parameters.{names and names.tensor(leaf)}", leaf) for leaf in bad],
            is_after_update=True,
        )
        for frame, _ in standing if bad else ():
            path = passed[-1].path_from(frame)
            for loop in loops_around(*path[0]) if len(path) == 1 else ():
                if (first := loop.line_after(path[0][1])) is None:
                    continue
                gradients = [(leaf, leaf.grad) for leaf, *_ in then]
                turn = Turn(frame, loop, None, passed[-1], (), first, is_update=True)
                found = self.run(turn, incident, finding, standing)
                put_gradients(gradients)
                if found.incident is not None:
                    said = (
                        f"What follows line {path[0][1]} in the loop at {self._where(turn)} was "
                        "run again with the weights and gradients of the step before: they went "
                        "bad."
                    )
                    return _with_evidence(found.incident, said)
                self.reasons.append(f"the update: {found.reason or 'it was finite'}")
        return None

    def _end_of_turn_before(
        self, turn: Turn, incident: Incident, standing: Sequence[tuple[FrameType, int]]
    ) -> Incident | None:
        """Of what was bad as the turn began: where the end of the one before made it so.

        That is a carried variable, or parameters that no optimizer updates (of an average, say).
        """
        facts = {} if incident.origin is None else incident.origin.facts
        name = facts.get("carried", "")
        value = {**variables_of(turn.frame), **turn.began.values_in(turn.frame)}.get(name)
        named = [(name, value)] if isinstance(value, Tensor) else []
        if facts.get("is_parameter") and incident.world == 1:
            named = _bad_parameters_of_nobody()
        updated = [each for each in self._moments if each.kind == "updated"]
        line = updated[-1].line_in(turn.frame) if updated else None
        first = None if line is None else turn.loop.line_after(line)
        if not named or first is None:
            return None
        before, how = Turn(turn.frame, turn.loop, None, updated[-1], (), first), ""
        if not name:  # what they were is not known
            tensors = [local(tensor) for _, tensor in named]
            put_weights = functools.partial(_make_finite, tensors)
            before = dataclasses.replace(before, put_weights=put_weights)
            how = ", with small values in the place of the bad ones"
        found = self.run(before, incident, BadValues(named), standing)
        if found.incident is None or _is_foreign(found.incident):
            self.reasons.append(f"the end of the turn before: {found.reason or 'it was finite'}")
            return None
        said = (
            f"What follows line {line} in the loop at {self._where(turn)} was run again, as at the "
            f"end of the step before{how}: it made `{named[0][0].removeprefix('parameters.')}` bad."
        )
        return _with_evidence(found.incident, said)

    def _sample_again(self, turn: Turn, incident: Incident) -> Incident | None:
        """Of a batch that came in bad: where its dataset made a sample so; None if it did not."""
        origin, batch = incident.origin, turn.batch
        is_data = origin is not None and origin.phase == "data" and _is_foreign(incident)
        if not is_data or batch is GONE or incident.world > 1:
            return None
        delivery = self._guard.past.tracing.deliveries.of(batch, exactly=True)
        moments = list(self._moments)
        at = next((n for n, each in enumerate(moments) if each.batch is batch), 0)
        if delivery is None:
            return None
        from stayfinite.guard.sample_replay import sample_again

        before = moments[at - 1] if at else None
        found = sample_again(self._guard, incident, delivery, batch, before, turn.frame)
        return None if found is None else _with_evidence(found.incident, found.said)

    def _where(self, turn: Turn) -> str:
        return f"{relative(turn.loop.file, self.folder)}:{turn.loop.line}"

    def _replays(
        self,
        incident: Incident,
        finding: BadValues,
        standing: Sequence[tuple[FrameType, int]],
        *,
        until: float,
    ) -> Iterator[tuple[Turn, Replayed]]:
        """Each turn that may be run again with what came of it, as long as there is time."""
        for turn in self.turns(standing):
            for way in turn.ways():
                seconds = until - time.monotonic()
                if seconds <= 0:
                    return
                found = self.run(way, incident, finding, standing, seconds=seconds)
                yield way, found
                if found.incident is not None:
                    break

    @one_look()
    def locate_together(
        self,
        incident: Incident,
        finding: BadValues,
        standing: Sequence[tuple[FrameType, int]],
        ranks: Ranks,
    ) -> Incident | None:
        """The same where a step needs all ranks, as sharded parameters do: each must come here.

        They run it from its beginning to its update, bad or not, so that nobody is waited for.
        """
        self.reasons, self.computed = [], None
        turns = self.turns(standing) if self._left else iter(())
        for turn in (next(turns, None) for _ in range(_MOST_FUNCTIONS)):
            if ranks.agree(turn is None or not self._is_able(turn, ranks)) or turn is None:
                return None
            self._left -= 1
            found = self.run(turn, incident, finding, standing, ranks=ranks)
            self._meet(ranks, found)
            has_passed = found.has_passed or ranks.is_pipeline  # whose passes are not seen
            if not has_passed:  # what is bad in it was so before
                found = dataclasses.replace(found, incident=None)
            if ranks.agree(found.incident is not None):
                break
            self.reasons.append(f"line {turn.loop.line}: {found.reason or 'it was finite'}")
            if not ranks.agree(found.gradients is None):
                once_more = self.run(turn, incident, finding, standing, ranks=ranks)
                self._meet(ranks, once_more)
                return self._with_passing_fault(
                    incident, finding, standing, turn, found, once_more, is_together=True
                )
            if ranks.agree(has_passed):
                return None
            # The loop was one over optimizers, say: the pass is in a loop further out.
        if turn is None or found.incident is None:
            return None
        return _said(found.incident, turn, self.folder, is_same=found.is_same, is_together=True)

    def _is_able(self, turn: Turn, ranks: Ranks) -> bool:
        """Whether this rank can run the turn again with the others, as far as its source tells.

        Whoever gives up midway leaves the others waiting, and the run ends; with "stop" it does.
        """
        is_sure = ranks.is_pipeline or self._guard.settings.on_nan == "stop"
        if not is_sure and asks_for_rank(turn.loop, until=turn.line):
            return False
        try:
            body_of(turn.frame, turn.loop, since=turn.first, until=turn.line)
            turn.values()
        except (CannotRunError, SyntaxError, ValueError) as error:
            self.reasons.append(str(error))
            return False
        return True

    def _meet(self, ranks: Ranks, found: Replayed) -> None:
        """See that nobody was left behind in a step that all have run again.

        Whoever has given up too has come as far in the time that this rank took; the others are in
        a collective that this one has not entered, until it ends.
        """
        if found.error is not None and is_lost_peer(found.error):
            raise lost_peer(found.error) from found.error
        is_waited_for = found.error is not None or not found.is_over
        seconds = 3.0 + 4 * found.took if is_waited_for else math.inf
        if not ranks.have_all_come(seconds=seconds):
            said = f"a step could not be run again on all ranks ({found.reason})"
            raise TrainingAbortedError(f"{said}, and the others wait for this one.")

    @property
    def folder(self) -> str | None:
        """What files in incidents are named relative to."""
        return self._guard.settings.folder

    def _with_change(self, step: StepAgain, incident: Incident) -> Incident:
        seconds = self._guard.settings.change_seconds
        if not seconds:
            return incident
        from stayfinite.guard.loop_trials import with_change

        losses = self._guard.evidence.recent_losses(step.finding.optimizer)
        return with_change(step, incident, seconds=seconds, losses=losses)

    def _with_proof(self, step: StepAgain, incident: Incident) -> Incident:
        if not self._guard.settings.prove_seconds:
            return incident
        from stayfinite.guard.loop_trials import LoopExperiments
        from stayfinite.guard.replay import prove

        return prove(
            self._guard,
            incident,
            lambda placed: LoopExperiments(self._guard, step, placed),
            step.finding.optimizer,
        )

    def turns(self, standing: Sequence[tuple[FrameType, int]]) -> Iterator[Turn]:
        """What may be run again, most likely first: loops from the innermost, then functions."""
        moments = list(self._moments)
        paths = [[(f.f_code, line) for f, line in standing[n::-1]] for n in range(len(standing))]
        places = [(f, p) for (f, _), p in zip(standing, paths, strict=True)]
        loops = [(f, each, p) for f, p in places for each in loops_around(*p[0])]
        inner = places[:_MOST_FUNCTIONS]
        functions = [(f, each, p) for f, p in inner if (each := function_around(p[0][0]))]
        has_begun_before = False  # anything was noted; once is enough
        for frame, loop, path in (*loops, *functions):
            turn = turn_of(frame, loop, moments, path)
            if turn is None:
                continue
            updated = {each.optimizer for each in turn.since if each.kind == "updated"}
            if updated and updated >= self._moments.optimizers:
                continue  # no step but an epoch, say: all optimizers have stepped inside
            if turn.first and has_begun_before:
                continue
            has_begun_before = has_begun_before or turn.first > 0
            yield turn

    @one_look()
    def locate_update(
        self, incident: Incident, finding: BadValues, frame: FrameType | None
    ) -> Incident | None:
        """The incident of an update that makes weights bad, by making it once more; None if not.

        What it started from is gone, so it starts from what it left, with the same gradients.
        `frame` is where it is under way; None if it is the last one that was made.
        """
        optimizer = finding.optimizer
        if not self._left or optimizer is None:
            return None
        if frame is not None:
            made = [self._moments.of_update(optimizer, frame)]
        else:
            made = [m for m in self._moments if m.optimizer == id(optimizer) and m.gradients]
        if not made or not made[-1].spots:
            return None
        self._left -= 1
        try:
            return self._update_again(optimizer, made[-1], incident)
        except ReplayEnded as end:
            self.reasons.append(f"the update: {end.reason}")
            return None

    def _update_again(
        self, optimizer: Optimizer, moment: Moment, incident: Incident
    ) -> Incident | None:
        guard, at, probe = self._guard, moment.spots[0].place, _UpdateProbe()
        with contextlib.ExitStack() as all_of_them:
            all_of_them.enter_context(_hooks_aside())
            all_of_them.enter_context(protected([]))
            all_of_them.enter_context(listening_alone(probe))
            all_of_them.enter_context(guard.evidence.kept())
            for group, rate in zip(optimizer.param_groups, moment.rates, strict=False):
                group["lr"] = rate
            _begin_update_again(optimizer, moment.gradients or [])
            all_of_them.enter_context(guard.traced())
            try:
                call_within(_MOST_SECONDS, call_at, at, optimizer.step)
            except Exception as error:
                self.reasons.append(f"the update: {error}")
                return None
            with guard.past.tracing.paused():
                if all_finite(params_of(optimizer)):
                    self.reasons.append("the update: it was finite")
                    return None
                found = bad_parameters(optimizer)
                explained = explain_incident(
                    incident, found, guard.evidence, guard.past.tracing, guard.settings
                )
        if explained.origin is None or not explained.origin.exact:
            return None
        said = (
            "The update was repeated with the same gradients, from the state that it left: "
            "it went bad again."
        )
        return _with_evidence(dataclasses.replace(explained, step=incident.step), said)

    def run(
        self,
        turn: Turn,
        noticed: Incident,
        finding: BadValues,
        standing: Sequence[tuple[FrameType, int]],
        *,
        seconds: float | None = None,
        ranks: Ranks | None = None,
        is_traced: bool = True,
    ) -> Replayed:
        """Run the turn again, with all `ranks` if given; everything is as before afterwards."""
        seconds = _MOST_SECONDS if seconds is None else seconds
        try:
            return self._run(turn, noticed, finding, standing, seconds, ranks, is_traced)
        except ReplayEnded as end:  # by something of ours; it must not reach the user's code
            return Replayed(reason=end.reason)

    def _run(
        self,
        turn: Turn,
        noticed: Incident,
        finding: BadValues,
        standing: Sequence[tuple[FrameType, int]],
        seconds: float,
        ranks: Ranks | None,
        is_traced: bool,
    ) -> Replayed:
        try:
            body = body_of(turn.frame, turn.loop, since=turn.first, until=turn.line)
            values = turn.values()
        except (CannotRunError, SyntaxError, ValueError) as error:
            return Replayed(reason=str(error))
        guard = self._guard
        probe = _Probe(guard, noticed, finding, turn, body, is_together=ranks is not None)
        frames = [frame for frame, _ in standing]
        sums: list[HalfSum] = []
        with contextlib.ExitStack() as all_of_them:
            # Private: the loop is not inside torch.func's transform in which the value was noticed.
            all_of_them.enter_context(temporarily_clear_interpreter_stack())
            is_last = guard.settings.on_nan == "stop"
            is_apart = noticed.world > 1 and ranks is None
            all_of_them.enter_context(_hooks_aside())
            all_of_them.enter_context(
                protected(frames, taken=turn.taken(), is_last=is_last, is_apart=is_apart, sums=sums)
            )
            all_of_them.enter_context(listening_alone(probe))
            all_of_them.enter_context(run_again())
            all_of_them.enter_context(guard.evidence.kept())
            all_of_them.enter_context(torch.enable_grad())
            self._put_beginning(turn, body, values)
            all_of_them.enter_context(_gradients_of_zero(finding.params))
            if is_traced:
                all_of_them.enter_context(guard.traced())
            for name, tensor in turn.carried(values):
                guard.past.tracing.note_carried(name, tensor)
            all_of_them.enter_context(probe.attached())
            found = probe.run(body, values, seconds=seconds, caller=_caller(turn, standing))
        return dataclasses.replace(found, sums=tuple(sums))

    def _put_beginning(self, turn: Turn, body: Body, values: Mapping[str, Any]) -> None:
        """Everything as it was when the turn began; weights have not changed since."""
        moment, newer = turn.began, turn.newer
        for later in reversed(turn.since):  # objects that are newer than the beginning
            later.restore_attributes(newer=newer)
        moment.restore(newer=newer)
        if turn.later is not None:
            turn.later.restore_attributes()
        if body.shared:
            turn.frame.f_globals.update(values)
        self._moments.restore_weights()
        if turn.is_update:
            moment.restore_weights()
        if turn.put_weights is not None:
            turn.put_weights()
        for scaler in living(GradScaler):
            # Its notes on the step that is under way; a second unscale_() would raise.
            getattr(scaler, "_per_optimizer_states", {}).clear()
        for optimizer in living(Optimizer):
            had = self._moments.has_gradients.get(id(optimizer), False)
            for param in params_of(optimizer):
                if param.grad is not None:
                    param.grad = torch.zeros_like(param.grad) if had else None  # no collective


@contextlib.contextmanager
def _gradients_of_zero(params: Sequence[Tensor]) -> Iterator[None]:
    """As scripts that update by hand leave them, who make them 0 or None."""
    kept = [(param, param.grad) for param in params]
    for param, gradient in kept:
        param.grad = None if gradient is None else torch.zeros_like(gradient)
    try:
        yield
    finally:
        put_gradients(kept)


@contextlib.contextmanager
def _hooks_aside() -> Iterator[None]:
    """Let hooks be added to optimizers in the block: one of them is going through its own just now.

    Private: torch calls what is in this dictionary, and gives up if it changes meanwhile.
    """
    name = "_optimizer_step_pre_hooks"
    # A wrapper, as Accelerate's, has none of its own.
    kept = [(held, held[name]) for each in living(Optimizer) if name in (held := vars(each))]
    for held, hooks in kept:
        held[name] = hooks.copy()
    try:
        yield
    finally:
        for held, hooks in kept:
            held[name] = hooks


Path = list[tuple[CodeType, int]]
"""Functions with their lines, from that of a loop inwards."""


def turn_of(frame: FrameType, loop: Loop, moments: Sequence[Moment], path: Path) -> Turn | None:
    """The turn of the loop that is under way in the frame; None if nothing was noted of it."""
    line, standing, variables = path[0][1], path, variables_of(frame)
    since: list[Moment] = []
    until = line if loop.statement(line) >= 0 else None  # at the header the turn before is over
    for moment in reversed(moments):
        then = moment.path_from(frame)
        if not then or not (loop.is_function or loop in loops_around(*then[0])):
            return Turn(frame, loop, until, moment, tuple(since))
        is_start = loop.statement(then[0][1]) < 0 and moment.kind == "delivered"
        if is_start:
            return Turn(frame, loop, until, moment, tuple(since))
        is_same = loop.is_function or _is_same_turn(loop, then, path)
        if not is_same or _is_other_item(loop, moment.values_in(frame), variables):
            newer = _newer_attributes(loop, then, standing)
            return Turn(frame, loop, until, moment, tuple(since), newer=newer)
        path = then
        since.insert(0, moment)
    if not since:
        return None
    # Nothing was noted before this turn: it is run from the first thing that was.
    return Turn(frame, loop, until, since[0], tuple(since[1:]), since[0].line_in(frame) or 0)


class _Everything(Container[str]):
    """Whatever one asks for is in it."""

    def __contains__(self, name: object) -> bool:
        return True


def _is_other_item(loop: Loop, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a count or a name that the loop gives to its variables has changed since."""
    changed = loop.given - loop.carried
    return any(
        n in then and type(then[n]) is type(now.get(n)) and then[n] != now[n] for n in changed
    )


def _newer_attributes(loop: Loop, then: Path, now: Path) -> set[str]:
    """Attributes that were assigned after `then`, in the turn before, and not again up to `now`."""
    newer = {name for code, line in then for name in attributes_assigned(code, after=line)}
    newer -= loop.attributes_until(now[0][1])
    for code, line in now[1:]:
        newer -= attributes_assigned(code, until=line)
    return newer


def _is_same_turn(loop: Loop, then: Path, now: Path) -> bool:
    """Whether one comes to `now` from `then` without passing the loop's header.

    Lines count from the loop inwards; in functions whose lines are passed more than once that is
    not sure.
    """
    before, after = (loop.statement(path[0][1]) for path in (then, now))
    if after < 0:  # the whole turn is over
        return before >= 0
    if before != after:
        return before < after
    if loop.repeats(before):
        return True
    for (code, line), (other, other_line) in zip(then[1:], now[1:], strict=False):
        if code is not other:
            return False
        if line != other_line:
            return line < other_line
    return False


def standing_at(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """The user's frames from this one outwards, with the lines they are at."""
    return _up_to_module((each, each.f_lineno) for each in user_frames(frame))


def _up_to_module(frames: Iterable[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    """Whoever runs a whole module, as a test of its examples does, has no part in training."""
    found = []
    for frame, line in frames:
        found.append((frame, line))
        if frame.f_code.co_name == "<module>":
            break
    return found


def _place(incident: Incident) -> tuple[str | None, int | None, str | None] | None:
    origin = incident.origin
    return None if origin is None else (origin.file, origin.line, origin.op)


def standing_in(error: BaseException) -> list[tuple[FrameType, int]]:
    """The user's frames that an error has gone through, innermost first."""
    stack = list(traceback.walk_tb(error.__traceback__))
    users = {id(frame) for frame, _ in stack for frame in user_frames(frame)}
    return _up_to_module((f, line) for f, line in reversed(stack) if id(f) in users)


class _Probe(StepListener):
    """Hears of the steps of a replay, and ends it where the bad value was noticed."""

    def __init__(
        self,
        guard: Guard,
        noticed: Incident,
        finding: BadValues,
        turn: Turn,
        body: Body,
        *,
        is_together: bool = False,
    ) -> None:
        self._is_together = is_together  # all ranks run it, up to the update
        self._bad_loss: BadValues | None = None
        self._guard, self._noticed, self._finding, self._turn = guard, noticed, finding, turn
        self._body = body
        self._moments = deque(turn.since)
        self._unscaled: list[tuple[Any, Any]] = []
        self._found: Incident | None = None
        self._is_same = self._is_ending = self._has_bad_gradients = False
        self._reason: str | None = None
        self._loss: float | None = None
        self._came_to_end = False
        self._error: BaseException | None = None
        self._old: list[Any] = []  # what was in the variables before
        self._passes = 0
        self._passed_at: Place | None = None
        self._gradients: dict[str, Tensor] | None = None
        self._computed: ComputedStep | None = None
        # What the replay is compared with.
        self._before = [(p, p.grad) for p in _params(finding)]
        self._values = {name: (t, unwrap(t).detach().clone()) for name, t in finding.named}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        deliveries = self._guard.past.tracing.deliveries
        attachment = together(
            watch_backward(self._before_backward, self._after_backward),
            watch_scaling(self._scaled),
            watch_scalers(self),
            watch_steps(self, defer=False),
            *([watch_numbers(self._saw_number)] if self._finding.was_read else []),
        )
        deliveries.again = self._deliver
        try:
            yield
        finally:
            deliveries.again = None
            attachment.remove()

    def run(
        self, body: Body, values: Mapping[str, Any], *, seconds: float, caller: Place | None
    ) -> Replayed:
        began, self._old = time.monotonic(), list(values.values())
        run = body.run if caller is None else functools.partial(call_at, caller, body.run)
        try:
            # Together nobody may leave the others alone.
            results = run(values) if self._is_together else call_within(seconds, run, values)
            self._reason = "it did not reach the place where the value was noticed"
            self._look_at(results)
            self._came_to_end = True
            left = (grad for each in living(Optimizer) for grad in gradients_of(each))
            self._has_bad_gradients = not all_finite(left)
        except ReplayEnded as end:
            self._reason = end.reason
            self._came_to_end = end.reason is None
        except (Exception, SystemExit) as error:
            self._crashed(error)
        return Replayed(
            incident=self._found,
            is_same=self._is_same,
            reason=self._reason,
            loss=self._loss,
            came_to_end=self._came_to_end,
            gradients=self._gradients,
            computed=self._computed,
            was_bad=self._is_ending,
            has_bad_gradients=self._has_bad_gradients,
            error=self._error,
            is_over=self._is_ending or self._came_to_end,
            has_passed=self._passes > 0,
            passed_at=self._passed_at,
            took=time.monotonic() - began,
        )

    def _deliver(self) -> Any:
        """The batch that was delivered then, with the generators as they were after it."""
        while self._moments:
            moment = self._moments.popleft()
            if moment.kind == "delivered":
                if moment.batch is GONE:
                    break
                moment.restore_random()
                instead = self._turn.instead
                is_other = instead is not None and instead[0] is moment.batch
                return instead[1] if instead is not None and is_other else moment.batch
        raise ReplayEnded("it asks for a batch that is not there any more")

    def _saw_number(self, tensor: Tensor, value: float, frame: FrameType) -> None:
        if tensor.grad_fn is not None and not self._is_ending:  # else it is we who read it
            self._end(BadValues([("loss", tensor)], self._finding.optimizer))

    def _scaled(self, scaler: Any, losses: Any, results: Any) -> None:
        self._unscaled.append((results, losses))

    def _before_backward(self, roots: Sequence[Tensor], gradients: Any) -> None:
        self._passes += 1
        self._passed_at = next(iter(user_places(sys._getframe(1), limit=1)), None)
        for root in roots:
            if root.numel() == 1:
                loss = next((loss for scaled, loss in self._unscaled if scaled is root), root)
                if not all_finite([loss]):
                    bad = BadValues([("loss", loss)], self._finding.optimizer)
                    if not self._is_together:
                        self._end(bad)
                    self._bad_loss = self._bad_loss or bad
                    continue
                self._loss = float(unwrap(loss).detach().mean())  # host sync
        self._guard.past.tracing.begin_backward(roots)

    def _after_backward(self, result: Any) -> None:
        """Gradients that no optimizer asks about are looked at as soon as they are there."""
        params = self._finding.params
        if not params or self._is_together:
            return
        pairs = [(param, param.grad) for param in params if param.grad is not None]
        if not all_finite(gradient for _, gradient in pairs):
            self._end(bad_gradients(pairs, None))
        if self._passes > sum(moment.kind == "passed" for moment in self._turn.since):
            raise ReplayEnded

    def judge(
        self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool
    ) -> Tensor | bool | None:
        if any(moment.kind == "updated" for moment in self._moments):
            return True  # it has happened: the weights are those after it
        self._look_at_gradients(optimizer)
        raise ReplayEnded

    def refused(self, optimizer: Optimizer, gradients: Pairs, *, late: bool) -> bool:
        return True

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        while self._moments:
            moment = self._moments.popleft()
            if moment.kind == "updated":
                moment.restore()
                return

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: Any) -> None:
        if not any(moment.kind == "updated" for moment in self._moments):
            self._look_at_gradients(optimizer)
            raise ReplayEnded

    def _look_at_gradients(self, optimizer: Optimizer) -> None:
        if self._bad_loss is not None:
            self._end(self._bad_loss)
        found = bad_gradients(pairs_of(optimizer), optimizer)
        is_finite = all_finite(gradients_of(optimizer))
        if is_finite and self._passes and found.named:
            self._gradients = {n: local(each).detach().clone() for n, each in found.named}
            self._computed = self._as_computed(optimizer)
        # What was born here may have gone to the shard of another rank.
        if self._is_together or not is_finite:
            self._end(found)

    def _as_computed(self, optimizer: Optimizer) -> ComputedStep | None:
        """The step before its update; None where the weights are those after another one."""
        guard, job = self._guard, self._guard.jobs.get(id(optimizer))
        if job is None or any(each.kind == "updated" for each in self._turn.since):
            return None
        with guard.past.tracing.paused():
            pairs = pairs_of(optimizer)
            gradients = [local(gradient).detach().clone() for _, gradient in pairs]
            # A state of its own: the marks of the job know nothing of what is put back after this.
            state = job.parts.state().mark()
            return ComputedStep([p for p, _ in pairs], gradients, state, self._passes)

    def _look_at(self, values: Mapping[str, Any]) -> None:
        """The body is over: are the variables bad in which the value was noticed?"""
        named = [(name, values.get(name, value)) for name, value in self._finding.named]
        bad = [(n, v) for n, v in named if isinstance(v, Tensor) and not all_finite([v])]
        is_new = any(n in values or n.startswith(("buffers.", "parameters.")) for n, _ in bad)
        bad = bad if is_new else []
        if bad:
            self._end(BadValues(bad, self._finding.optimizer))

    def _crashed(self, error: BaseException) -> None:
        """The user's own code raised, as it may have done before."""
        from stayfinite.guard.guard import bad_values_of

        self._error = error
        # Variables that the body has not come to have the values of the first time.
        bad = [(n, v) for n, v in bad_values_of(error) if not any(v is o for o in self._old)]
        self._reason = f"it raised {type(error).__name__}: {error}"
        with contextlib.suppress(ReplayEnded):
            if bad:
                self._end(BadValues(bad, self._finding.optimizer))
            held = self._turn.frame.f_globals  # the variables of a body at module level
            self._look_at({name: held.get(name) for name in self._body.shared})

    def _end(self, found: BadValues) -> None:
        """The replay is bad here: say where it began, and go no further."""
        past, self._is_ending = self._guard.past, True
        with past.tracing.paused():
            self._is_same = self._is_as_noticed(found)
            explained = explain_incident(
                self._noticed, found, past.evidence, past.tracing, self._guard.settings
            )
        if explained.origin is not None and explained.origin.exact:
            self._found = explained
        raise ReplayEnded("the operation was not seen")

    def _is_as_noticed(self, found: BadValues) -> bool:
        """Whether the values are those that were noticed, bit by bit."""
        if self._noticed.world > 1:  # gradients were those of all ranks
            losses = [(n, v) for n, v in found.named if n in self._values and "." not in n]
            return all(_same_bits(v, self._values[name][1]) for name, v in losses)
        pairs = [(v, self._values[name][1]) for name, v in found.named if name in self._values]
        if not pairs:  # weights and statistics, which are where they were
            pairs = list(self._values.values())
        pairs += [(p.grad, g) for p, g in self._before if p.grad is not None and g is not None]
        for now, then in self._body.changes(sys._getframe()):
            if isinstance(now, Tensor) and isinstance(then, Tensor):
                pairs.append((now, then))
        return bool(pairs) and all(_same_bits(one, two) for one, two in pairs)


class _UpdateProbe(StepListener):
    """Lets an update happen."""

    def judge(
        self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool
    ) -> Tensor | bool | None:
        return None

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        return None

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: Any) -> None:
        return None


@torch.no_grad()
def _begin_update_again(optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> None:
    """Put the gradients back, and small values in the place of what the update has made bad."""
    params = params_of(optimizer)
    for param, gradient in zip(params, gradients, strict=False):
        param.grad = gradient
        held = optimizer.state[param].values() if param in optimizer.state else ()
        for tensor in (local(value) for value in held if isinstance(value, Tensor)):
            if tensor.is_floating_point() and not all_finite([tensor]):
                torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
    _make_finite([local(param) for param in params[: len(gradients)]])


@torch.no_grad()
def _make_finite(tensors: Iterable[Tensor]) -> None:
    """Small values, always the same, in the place of those that are not finite."""
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        if not all_finite([tensor]):
            noise = torch.randn(tensor.shape, generator=generator).mul_(0.02).to(tensor)
            tensor.copy_(torch.where(tensor.isfinite(), tensor, noise))


def _bad_parameters_of_nobody() -> list[tuple[str, Tensor]]:
    """Parameters that are not finite, and that no optimizer updates."""
    optimized = {id(param) for optimizer in living(Optimizer) for param in params_of(optimizer)}
    held = (param for module in living(nn.Module) for param in module._parameters.values())
    bad = {id(p): p for p in held if p is not None and id(p) not in optimized}
    names = Names()
    return [
        (f"parameters.{names.tensor(param)}", param)
        for param in bad.values()
        if not param.is_meta and not all_finite([param])
    ]


def _params(finding: BadValues) -> list[Tensor]:
    """Of the optimizer whose gradients were noticed to be bad."""
    has_gradients = any(name.startswith("gradients.") for name, _ in finding.named)
    if finding.optimizer and has_gradients:
        return params_of(finding.optimizer)
    return list(finding.params)


def _is_foreign(incident: Incident | None) -> bool:
    """Whether the value was there before the replay began."""
    origin = None if incident is None else incident.origin
    return origin is not None and bool(origin.facts.get("foreign"))


def _was_computed_before(incident: Incident | None) -> bool:
    """Whether the value was there before the replay and has a graph: a turn further out made it."""
    origin = None if incident is None else incident.origin
    if origin is None or origin.phase != "data" or not _is_foreign(incident):
        return False
    return bool(origin.facts.get("computed"))


def _is_nobodys(incident: Incident, turn: Turn) -> bool:
    """Whether a value was there before the turn of a library's loop: nothing was found out.

    One that a loader handed over is the data's.
    """
    samples = {} if incident.origin is None else incident.origin.facts.get("samples", {})
    is_known = "batch" in samples
    return _is_foreign(incident) and is_installed(turn.loop.file) and not is_known


def _caller(turn: Turn, standing: Sequence[tuple[FrameType, int]]) -> Place | None:
    """The user's line that called the package whose loop it is; None where it is the user's own.

    After an error the functions further out are not running any more.
    """
    if not is_installed(turn.loop.file):
        return None
    inside = next((n for n, (frame, _) in enumerate(standing) if frame is turn.frame), 0)
    for frame, line in standing[inside:]:
        if not is_installed(frame.f_code.co_filename):
            place = Place(frame.f_code, frame.f_lasti, line)
            return place if positions(place)[0] == line else place._replace(lasti=-2)
    return None


def _same_bits(one: Tensor, two: Tensor) -> bool:
    one, two = unwrap(one), unwrap(two)
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.layout is not torch.strided:
        return True  # as far as can be told
    return bool(torch.equal(_bits(one), _bits(two)))  # host sync


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _said(
    incident: Incident,
    turn: Turn,
    folder: str | None,
    *,
    is_same: bool,
    is_together: bool = False,
) -> Incident:
    """The incident with a line on how it was found."""
    where = f"{relative(turn.loop.file, folder)}:{turn.loop.line}"
    how = "gave the same bad values, bit for bit" if is_same else "was bad again"
    how = "was bad again" if incident.world > 1 else how  # gradients were those of all ranks
    by = ""
    if incident.world > 1:
        by = " on all ranks together" if is_together else " on this rank alone"
    said = f"This step was run again{by} from its beginning (the loop at {where}), and {how}."
    if not is_same:
        said += " Some values were not the same as the first time."
    return _with_evidence(incident, said)


def _begun_at(place: Place | None, phase: Phase, folder: str | None) -> Origin:
    """An origin that nobody saw, at the line that began the exchange between the ranks."""
    if place is None:
        return Origin(phase=phase)
    span = resolve(place, folder=folder)
    names = ("file", "line", "end_line", "columns", "code", "function")
    return Origin(phase=phase, **{name: getattr(span, name) for name in names})


def _with_evidence(incident: Incident, said: str) -> Incident:
    diagnosis = incident.diagnosis
    if diagnosis is None:
        return incident
    diagnosis = dataclasses.replace(diagnosis, evidence=(*diagnosis.evidence, said))
    return dataclasses.replace(incident, diagnosis=diagnosis)
