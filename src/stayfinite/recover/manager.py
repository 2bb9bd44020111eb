"""NaNRecoveryManager: counts bad steps, chooses what to do about each, does it, and remembers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from stayfinite.detect.gradients import params_of
from stayfinite.records import NaNReport
from stayfinite.recover.actions import act
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.recover.policy import History, choose
from stayfinite.recover.rates import rates_of
from stayfinite.recover.recovery import Recovery as Recovery
from stayfinite.recover.scale import current_scale
from stayfinite.recover.situation import Done, Situation, Trouble

if TYPE_CHECKING:
    from stayfinite.snapshot import Snapshot, SnapshotRing

logger = logging.getLogger("stayfinite")

Tried = list[tuple[RecoveryStrategy, str]]


class NaNRecoveryManager:
    """Counts bad steps, chooses what to do about each, does it, and remembers.

    After recover() has returned True go on with the step: without gradients the optimizer
    changes nothing. False means stop; the weights are as they were, or at the last snapshot.

        manager = NaNRecoveryManager(RecoveryConfig(primary_strategy="clip"))
        ...
        loss.backward()
        if bad := check_gradients(model):
            if not manager.recover(bad[0], model, optimizer, step=step):
                break
        else:
            manager.record_good_step()
        optimizer.step()
    """

    def __init__(self, config: RecoveryConfig | None = None) -> None:
        self.config = RecoveryConfig() if config is None else config
        self.batches_to_skip = 0
        self._history = History()
        self._recoveries: list[Recovery] = []
        self._ring: SnapshotRing | None = None
        self._members: tuple[Any, ...] = ()
        self._undo: list[Callable[[], None]] = []

    def recover(
        self,
        nan_report: NaNReport | None,
        model: nn.Module | None,
        optimizer: Optimizer,
        scaler: Any = None,
        step: int = 0,
    ) -> bool:
        """Do something about a bad step; True means that training can go on."""
        is_known = bool(self._members) and self._members[1] is optimizer
        situation = Situation(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            schedulers=self._schedulers() if is_known else (),
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
        self._history = self._history.after_bad_step()
        tried: Tried = []
        strategy, done = self._first_that_helps(situation, trouble, tried)
        self._remember(strategy, done, step)
        recovery = Recovery(
            step=step,
            location=trouble.report.location if trouble.report else "",
            strategy=strategy,
            succeeded=strategy is not RecoveryStrategy.ABORT,
            detail=done.detail,
            tried=tuple(tried),
            cause=cause,
            module=situation.module,
            **facts,
        )
        self._recoveries.append(recovery)
        logger.info("step %d: %s: %s", step, strategy.value, done.detail)
        return recovery

    def record_good_step(
        self,
        *,
        grad_norm: float | None = None,
        loss: float | None = None,
        lr: float | None = None,
    ) -> None:
        """A step went well: the streak of bad ones is over.

        What is known of it makes get_recommendations() more concrete.
        """
        self._history = self._history.after_good_step(self.config)

    def should_abort(self) -> bool:
        """Whether the last bad step has used up what was allowed; a good step takes it back."""
        return self._history.is_aborted

    def get_recovery_history(self) -> list[Recovery]:
        """One record for each bad step, oldest first."""
        return list(self._recoveries)

    def snapshot(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        step: int = 0,
    ) -> Snapshot:
        """Keep this state for RESET_MODEL and REWIND; NonFiniteError if it is not finite."""
        from stayfinite.snapshot import SnapshotRing, TrainingState

        members = (model, optimizer, scheduler, scaler, ema)
        if self._ring is None or [*map(id, members)] != [*map(id, self._members)]:
            state = TrainingState(model, optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
            self._ring = SnapshotRing(state, slots=self.config.snapshot_slots)
            self._members = members
        return self._ring.take(step=step)

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

    def _first_that_helps(
        self, situation: Situation, trouble: Trouble, tried: Tried
    ) -> tuple[RecoveryStrategy, Done]:
        while True:
            cannot = frozenset(strategy for strategy, _ in tried)
            strategy = choose(self.config, self._history, cannot=cannot)
            answer = act(strategy, situation, self.config, trouble)
            if isinstance(answer, Done):
                return strategy, answer
            if strategy is RecoveryStrategy.ABORT:  # it failed, and there is nothing beyond it
                return strategy, Done(answer.reason)
            tried.append((strategy, answer.reason))

    def _remember(self, strategy: RecoveryStrategy, done: Done, step: int) -> None:
        lost = 0 if done.went_back_to is None else step - done.went_back_to
        self._history = self._history.after_use(self.config, strategy, ground_lost=lost)
        if done.undo is not None:
            self._undo.append(done.undo)
        if strategy is RecoveryStrategy.REWIND:
            self.batches_to_skip = self.config.rewind_skip_batches

    def _schedulers(self) -> tuple[Any, ...]:
        scheduler = self._members[2] if self._members else None
        if scheduler is None:
            return ()
        return tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,)


def _facts(situation: Situation) -> dict[str, Any]:
    """Numbers that a recommendation needs, as the bad step found them."""
    dtypes = {param.dtype for param in params_of(situation.optimizer)}
    lowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=None)
    return {
        "lr": max(rates_of(situation.optimizer), default=None),
        "scale": current_scale(situation.scaler),
        "dtype": None if lowest is None else str(lowest).removeprefix("torch."),
    }
