"""NaNRecoveryManager: counts bad steps, chooses what to do about each, does it, and remembers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

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
from stayfinite.recover.advice import Observed, Past, Recovery, recommendations
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.recover.policy import History, choose
from stayfinite.snapshot import Snapshot, SnapshotRing, TrainingState
from stayfinite.snapshot.walk import PARTS
from stayfinite.training import params_of

logger = logging.getLogger("stayfinite")

Tried = list[tuple[RecoveryStrategy, str]]


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
        self._before = History()  # as of the last bad step
        self._good_since = 0
        self._norms, self._losses, self._rates = Observed(), Observed(), Observed()
        self._recoveries: list[Recovery] = []
        self._reached = Reached()
        self._ring: SnapshotRing | None = None
        self._members: tuple[Any, ...] = ()
        self._undo: list[Callable[[], None]] = []
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
        is_known = bool(self._members) and self._members[1] is optimizer
        situation = Situation(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            schedulers=self._several(2) if is_known else (),
            averages=self._several(4) if is_known else (),
            snapshots=self._ring if is_known else None,
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
        facts = _facts(situation)
        self._before, self._good_since = self._history().after_bad_step(), 0
        tried: Tried = []
        strategy, done = self._first_that_helps(situation, trouble, tried)
        self._remember(strategy, done)
        recovery = Recovery(
            step=step,
            location=trouble.report.location if trouble.report else "",
            strategy=strategy,
            succeeded=strategy is not RecoveryStrategy.ABORT,
            detail=done.detail,
            tried=tuple(tried),
            cause=cause,
            module=situation.module,
            bad_in_a_row=self._before.bad_in_a_row,
            back_at=done.went_back_to,
            checkpoint=done.loaded_from,
            **facts,
        )
        self._recoveries.append(recovery)
        logger.info("step %d: %s: %s", step, strategy.value, done.detail)
        return recovery

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
        for kept, value in (
            (self._norms, grad_norm),
            (self._losses, loss),
            (self._rates, lr),
        ):
            if value is not None:
                kept.add(value)

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
                norms=self._norms.values(),
                losses=self._losses.values(),
                rates=self._rates.values(),
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
        members = (model, optimizer, scheduler, scaler, ema)
        if self._ring is None or [*map(id, members)] != [*map(id, self._members)]:
            state = TrainingState(model, optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
            self._ring = SnapshotRing(state, slots=self.config.snapshot_slots)
            self._members = members
        return self._ring.take(step=self._history().good if step is None else step)

    def take_skipped_batch(self) -> bool:
        """Whether the next batch is to be left out after REWIND; counts it."""
        if self.batches_to_skip <= 0:
            return False
        self.batches_to_skip -= 1
        return True

    def undo_raised_precision(self) -> None:
        """Every module runs in its own precision again."""
        while self._undo:
            self._undo.pop()()

    def _history(self) -> History:
        if not self._good_since:
            return self._before
        return self._before.after_good_steps(self.config, self._good_since)

    def _first_that_helps(
        self, situation: Situation, trouble: Trouble, tried: Tried
    ) -> tuple[RecoveryStrategy, Done]:
        while True:
            cannot = frozenset(strategy for strategy, _ in tried)
            strategy = choose(self.config, self._before, cannot=cannot)
            answer = self._circle(strategy, situation) or self._act(strategy, situation, trouble)
            if isinstance(answer, Done):
                return strategy, answer
            tried.append((strategy, answer.reason))

    def _act(self, strategy: RecoveryStrategy, situation: Situation, trouble: Trouble) -> Answer:
        good, step = self._before.good, trouble.step
        if way_back(strategy, situation, self.config) is not None:
            self._reached.leave(situation, step=step, good=good)
        answer = act(strategy, situation, self.config, trouble)
        if strategy is RecoveryStrategy.ABORT:  # if it failed, there is nothing beyond it
            done = Done(answer.reason) if isinstance(answer, Cannot) else answer
            return self._reached.given_up(done, situation, step=step, good=good)
        if isinstance(answer, Done) and answer.went_back_to is not None:
            self._reached.returned(answer.went_back_to, good=good)
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

    def _remember(self, strategy: RecoveryStrategy, done: Done) -> None:
        self._before = self._before.after_use(self.config, strategy, back_at=done.went_back_to)
        if done.loaded_from is not None:
            self._loads.append(changed_at(str(self.config.checkpoint_path)))
        if done.undo is not None:
            self._undo.append(done.undo)
        if strategy is RecoveryStrategy.REWIND:
            self.batches_to_skip = self.config.rewind_skip_batches

    def _several(self, number: int) -> tuple[Any, ...]:
        given = self._members[number] if self._members else None
        if given is None:
            return ()
        return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _facts(situation: Situation) -> dict[str, Any]:
    """Numbers that a recommendation needs, as the bad step found them."""
    dtypes = {param.dtype for param in params_of(situation.optimizer)}
    lowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=None)
    return {
        "lr": max(rates_of(situation.optimizer), default=None),
        "scale": current_scale(situation.scaler),
        "dtype": None if lowest is None else str(lowest).removeprefix("torch."),
    }


_ALL_BUT_LOADER = tuple(part for part in PARTS if part != "loader")
_PUT_BACK = "training stops here, with the weights from before it went back"


class Reached:
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

    def returned(self, step: int, *, good: int) -> None:
        """A snapshot of `step` was restored."""
        self._returned = step, good

    def given_up(self, done: Done, situation: Situation, *, step: int, good: int) -> Done:
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
                return Done(_PUT_BACK, went_back_to=self._kept.step)
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
