"""NaNRecoveryManager: counts bad steps, chooses what to do about each, does it, and remembers."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.causes import Sort
from stayfinite.errors import NonFiniteError
from stayfinite.records import NaNReport
from stayfinite.recover.actions import (
    Answer,
    Cannot,
    Done,
    Situation,
    Trouble,
    act,
    changed_at,
    current_scale,
    drop_gradients,
    rates_of,
    way_back,
)
from stayfinite.recover.advice import Past, Recovery, recommendations
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.recover.policy import PolicyState, choose, sort_of
from stayfinite.snapshot import Snapshot, SnapshotRing, TrainingState
from stayfinite.snapshot.copies import same
from stayfinite.snapshot.walk import PARTS
from stayfinite.text import count
from stayfinite.training import params_of

logger = logging.getLogger("stayfinite")

_ALL_BUT_LOADER = tuple(part for part in PARTS if part != "loader")
_KEPT = 1000  # values of good steps


class NaNRecoveryManager:
    """Counts bad steps, chooses what to do about each, does it, and remembers.

    After recover() has returned True go on with the step: without gradients the optimizer
    changes nothing. False means stop; the weights are those of the last good step, or snapshot.

    >>> import torch
    >>> from stayfinite.detect.detector import NaNDetector
    >>> detector = NaNDetector()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> manager = NaNRecoveryManager(RecoveryConfig(primary_strategy=RecoveryStrategy.SKIP_STEP))
    >>> for step, x in enumerate([1.0, float("nan"), 1.0]):
    ...     optimizer.zero_grad()
    ...     model(torch.full((1, 2), x)).sum().backward()
    ...     if bad := detector.check_model(model):
    ...         if not manager.recover(bad[0], model, optimizer, step=step):
    ...             break
    ...     else:
    ...         manager.record_good_step()
    ...     optimizer.step()
    >>> [(recovery.step, recovery.detail) for recovery in manager.get_recovery_history()]
    [(1, 'the step was skipped')]
    >>> bool(model.weight.isfinite().all())
    True
    """

    def __init__(self, config: RecoveryConfig | None = None) -> None:
        self.config = RecoveryConfig() if config is None else config
        self.batches_to_skip = 0
        self._before = PolicyState()  # as of the last bad step
        self._good_since = 0
        # Of good steps; tensors are read only when they are asked for.
        self._norms, self._losses, self._rates = (deque[Any](maxlen=_KEPT) for _ in range(3))
        self._recoveries: list[Recovery] = []
        self._farthest = FarthestState()
        self._ring: SnapshotRing | None = None
        self._given: tuple[Any, ...] = ()  # whom the ring is for
        self._state: TrainingState | None = None
        self._raised = ExitStack()
        self._effects = RecoveryEffects()
        self._loads: list[int] = []  # what was loaded was last written then

    def recover(
        self,
        nan_report: NaNReport | None,
        model: nn.Module | None,
        optimizer: Optimizer,
        scaler: Any = None,
        step: int = 0,
    ) -> bool:
        """Do something about a bad step; True means that training can go on.

        A report that all is well is no bad step.
        """
        if nan_report is not None and not nan_report.has_nan:
            return True
        situation = Situation(model=model, optimizer=optimizer, scaler=scaler)
        if self._state is not None and self._given[1] is optimizer:
            situation = dataclasses.replace(
                situation,
                schedulers=self._state.members.schedulers,
                averages=self._state.members.averages,
                snapshots=self._ring,
            )
        reports = () if nan_report is None else (nan_report,)
        return self.respond(reports, situation, step=step).succeeded

    def respond(
        self,
        reports: Sequence[NaNReport],
        situation: Situation,
        *,
        step: int,
        cause: str | None = None,
    ) -> Recovery:
        """Record a bad step, and do what the policy chooses; falls back while it cannot help."""
        trouble = Trouble(reports=tuple(reports), step=step, cause=cause)
        # Numbers that a recommendation needs, as the bad step found them.
        rate = max(rates_of(situation.optimizer), default=None)
        scale = current_scale(situation.scaler)
        dtypes = {param.dtype for param in params_of(situation.optimizer)}
        lowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=None)
        news = self._effects.look(situation, cause, had_good=self._good_since > 0)
        self._before, self._good_since = self._history().after_bad_step(), 0
        tried: dict[RecoveryStrategy, str] = dict(self._effects.futile)
        sort = sort_of(cause, bad_in_a_row=self._before.bad_in_a_row)
        while True:
            strategy = choose(self.config, self._before, cannot=tried.keys(), sort=sort)
            answer = self._circle(strategy, situation) or self._act(strategy, situation, trouble)
            if isinstance(answer, Done):
                break
            tried[strategy] = answer.reason
        self._remember(strategy, answer, sort)
        self._effects.note(strategy, situation, cause, before=rate)
        recovery = Recovery(
            step=step,
            location=trouble.report.location if trouble.report else "",
            strategy=strategy,
            succeeded=strategy is not RecoveryStrategy.ABORT,
            detail="; ".join((answer.detail, *news)),
            tried=tuple(tried.items()),
            cause=cause,
            module=situation.module,
            bad_in_a_row=self._before.bad_in_a_row,
            back_at=answer.went_back_to,
            checkpoint=answer.loaded_from,
            lr=rate,
            scale=scale,
            dtype=None if lowest is None else str(lowest).removeprefix("torch."),
        )
        self._recoveries.append(recovery)
        if not recovery.succeeded:
            detail = "; ".join((recovery.detail, *self._last_words()))
            recovery = self._recoveries[-1] = dataclasses.replace(recovery, detail=detail)
        # Whoever watches reports it; at INFO a script's own log would have it once more.
        logger.debug("stayfinite: step %d: %s: %s", step, strategy.value, recovery.detail)
        return recovery

    def _last_words(self) -> list[str]:
        """How many steps were bad, of which cause, and what to do next."""
        history = self._history()
        share = f"{history.bad} of {count(history.steps, 'step')} ({history.share:.0%}) were bad"
        causes = Counter(bad.cause for bad in self._recoveries)
        cause, times = causes.most_common(1)[0]
        most = "" if cause in (None, "unknown") else f", {times} of them by {cause}"
        advice = self.get_recommendations()[:1]
        return [share + most, *(f"next: {each.rstrip('.')}" for each in advice)]

    def record_good_step(
        self,
        *,
        grad_norm: float | Tensor | None = None,
        loss: float | Tensor | None = None,
        lr: float | Tensor | None = None,
    ) -> None:
        """A step went well: the streak of bad ones is over.

        What is known of it makes get_recommendations() more concrete.
        """
        self._good_since += 1  # the rest is worked out when it matters
        values = ((self._norms, grad_norm), (self._losses, loss), (self._rates, lr))
        for kept, value in values:
            if value is not None:
                # A loss must not keep its graph alive.
                kept.append(value.detach() if isinstance(value, Tensor) else value)

    def should_abort(self) -> bool:
        """Whether the last bad step has used up what was allowed; a good step takes it back."""
        return self._history().is_aborted

    def get_recovery_history(self) -> list[Recovery]:
        """One record for each bad step, oldest first."""
        return list(self._recoveries)

    def get_recommendations(self) -> list[str]:
        """What to change, from the history: concrete, the most promising first."""
        return recommendations(
            Past(
                recoveries=self._recoveries,
                config=self.config,
                norms=_finite(self._norms),
                losses=_finite(self._losses),
                rates=_finite(self._rates),
                is_streak_over=self._good_since > 0,
            )
        )

    def snapshot(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        step: int | None = None,
    ) -> Snapshot:
        """Keep this state for RESET_MODEL and REWIND; NonFiniteError if it is not finite.

        `step` is by default the number of good steps so far.
        """
        given = (model, optimizer, scheduler, scaler, ema)
        if self._ring is None or not same(given, self._given):
            state = TrainingState(model, optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
            self._ring = SnapshotRing(state, slots=self.config.snapshot_slots)
            self._given, self._state = given, state
        return self._ring.take(step=self._history().good if step is None else step)

    def take_skipped_batch(self) -> bool:
        """Whether the next batch is to be skipped after REWIND; counts it."""
        if self.batches_to_skip <= 0:
            return False
        self.batches_to_skip -= 1
        return True

    def undo_raised_precision(self) -> None:
        """Every module runs in its own precision again."""
        self._raised.close()

    def _history(self) -> PolicyState:
        if not self._good_since:
            return self._before
        return self._before.after_good_steps(self.config, self._good_since)

    def _act(self, strategy: RecoveryStrategy, situation: Situation, trouble: Trouble) -> Answer:
        good, step = self._before.good, trouble.step
        if way_back(strategy, situation, self.config) is not None:
            self._farthest.leave(situation, step=step, good=good)
        answer = act(strategy, situation, self.config, trouble)
        # What is bad on one rank only keeps the others from it too.
        if situation.any_rank is not None and strategy is not RecoveryStrategy.ABORT:
            cannot = isinstance(answer, Cannot)
            if situation.any_rank(cannot) and not cannot:
                answer = Cannot("another rank cannot do it")
        if strategy is RecoveryStrategy.ABORT:  # if it failed, there is nothing beyond it
            done = Done(answer.reason) if isinstance(answer, Cannot) else answer
            return self._farthest.give_up(done, situation, step=step, good=good)
        if isinstance(answer, Done) and answer.went_back_to is not None:
            self._farthest.note_return(answer.went_back_to, good=good)
        return answer

    def _circle(self, strategy: RecoveryStrategy, situation: Situation) -> Cannot | None:
        """Why going back would not help; None when it may, or where there is no way back."""
        snapshot = way_back(strategy, situation, self.config)
        history, place = self._before, self.config.checkpoint_path
        if snapshot is None and strategy is RecoveryStrategy.RESET_MODEL and place is not None:
            most = self.config.max_consecutive_nans
            if self._loads[-most:] == [changed_at(place)] * most:
                return Cannot(f"{place} was loaded {most} times, and nothing newer is there")
            return None
        if snapshot is None or not history.goes_in_circles(self.config, back_at=snapshot.step):
            return None
        return Cannot(f"it went back {history.returns} times without getting any farther")

    def _remember(self, strategy: RecoveryStrategy, done: Done, sort: Sort) -> None:
        self._before = self._before.after_use(
            self.config, strategy, sort=sort, back_at=done.went_back_to
        )
        if done.loaded_from is not None:
            self._loads.append(changed_at(str(self.config.checkpoint_path)))
        if done.undo is not None:
            self._raised.callback(done.undo)
        if strategy is RecoveryStrategy.REWIND:
            self.batches_to_skip = self.config.rewind_skip_batches


def _finite(values: Iterable[Any]) -> list[float]:
    return [number for number in map(float, values) if math.isfinite(number)]


_LASTING = (RecoveryStrategy.LOWER_LR, RecoveryStrategy.REWIND, RecoveryStrategy.RESET_MODEL)


class RecoveryEffects:
    """Whether what was done lasts: a strategy that had no effect is not used again.

    `futile` are those, each with its reason: for good where a learning rate was set back, else up
    to the next good step.
    """

    def __init__(self) -> None:
        self._last: tuple[RecoveryStrategy, str | None] | None = None
        self._cut: tuple[float, float] | None = None  # the learning rate before and after
        self._of_streak: dict[RecoveryStrategy, str] = {}
        self._for_good: dict[RecoveryStrategy, str] = {}

    @property
    def futile(self) -> dict[RecoveryStrategy, str]:
        return {**self._of_streak, **self._for_good}

    def look(self, situation: Situation, cause: str | None, *, had_good: bool) -> list[str]:
        """Before a bad step is answered: what is new about the answer to the one before."""
        known = self.futile
        if had_good:
            self._of_streak.clear()
        elif self._last is not None and self._last[1] == cause:
            said = "the same step was bad again right after it"
            self._of_streak[self._last[0]] = said
        self._last = None
        if self._cut is not None:
            (before, after), self._cut = self._cut, None
            now = max(rates_of(situation.optimizer), default=0.0)
            if now > math.sqrt(before * after):
                said = f"the script or its scheduler has set the learning rate back to {now:g}"
                self._for_good[RecoveryStrategy.LOWER_LR] = said
        new = {each: why for each, why in self.futile.items() if each not in known}
        return [f"{each.value} is not repeated, because {why}" for each, why in new.items()]

    def note(
        self,
        strategy: RecoveryStrategy,
        situation: Situation,
        cause: str | None,
        *,
        before: float | None,
    ) -> None:
        """A strategy was used, for this cause; the learning rate was `before`."""
        self._last = (strategy, cause) if strategy in _LASTING else None
        after = max(rates_of(situation.optimizer), default=0.0)
        if strategy is RecoveryStrategy.LOWER_LR and before and after < before:
            self._cut = before, after


class FarthestState:
    """The good state that training left to go back, until it has come as far again.

    It is kept in the host's memory. Who gives up on the way gets it back: going back did not
    help, and the steps that it cost were good ones.
    """

    def __init__(self) -> None:
        self._kept: Snapshot | None = None
        self._returned: tuple[int, int] | None = None  # to which step, after how many good ones

    def leave(self, situation: Situation, *, step: int, good: int) -> None:
        """Before going back at `step`; `good` counts all good steps, also those of detours."""
        here = self._position(situation, step=step, good=good)
        if situation.snapshots is None or (self._kept is not None and here < self._kept.step):
            return
        self._kept = None
        try:
            self._kept = situation.snapshots.apart(step=here)
        except NonFiniteError:
            pass
        except Exception:
            logger.warning("the state before going back could not be kept", exc_info=True)

    def note_return(self, step: int, *, good: int) -> None:
        """A snapshot of `step` was restored."""
        self._returned = step, good

    def give_up(self, done: Done, situation: Situation, *, step: int, good: int) -> Done:
        """What giving up has come to: with the weights that were left, if those are farther."""
        if self._returned is None:
            return done
        here = self._position(situation, step=step, good=good)
        if self._kept is not None and here < self._kept.step:
            try:
                self._kept.restore(parts=_ALL_BUT_LOADER)
            except Exception:
                logger.warning("the state before going back could not be restored", exc_info=True)
            else:
                drop_gradients(situation)
                put_back = "training stops here, with the weights from before it went back"
                return Done(put_back, went_back_to=self._kept.step)
        back_at, before = self._returned
        if self._kept is not None or done.went_back_to is not None or good > before:
            return done
        return Done(f"training stops here; the weights are those of the snapshot of step {back_at}")

    def _position(self, situation: Situation, *, step: int, good: int) -> int:
        """How many steps the weights have come, in the count of the snapshots."""
        if situation.good_steps is not None:
            return situation.good_steps
        if self._returned is None:
            return step
        return self._returned[0] + good - self._returned[1]
