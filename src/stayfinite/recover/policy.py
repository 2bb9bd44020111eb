"""Which strategy comes next: a pure function of what is allowed and of what has happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set
from dataclasses import dataclass

from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy

ABORT = RecoveryStrategy.ABORT
GOING_BACK = frozenset({RecoveryStrategy.RESET_MODEL, RecoveryStrategy.REWIND})


@dataclass(frozen=True, kw_only=True)
class History:
    """What counts for the next choice; each event makes a new one.

    A streak is made of bad steps, up to the next good one. `rung` is the place on the ladder,
    and `uses` is how much of its budget is gone.
    """

    bad_in_a_row: int = 0
    good_in_a_row: int = 0
    recoveries: int = 0
    rung: int = 0
    uses: int = 0
    is_aborted: bool = False
    returns: int = 0  # to a snapshot, without getting farther than before
    ground_lost: int = 0  # steps that the last return has undone
    good_since_return: int = 0

    def after_bad_step(self) -> History:
        """A bad step was noticed; nothing has been done about it yet."""
        return dataclasses.replace(self, bad_in_a_row=self.bad_in_a_row + 1, good_in_a_row=0)

    def after_good_step(self, config: RecoveryConfig) -> History:
        """The streak is over; often enough, one rung down, and the budget there is new."""
        good = self.good_in_a_row + 1
        calm = good % config.deescalate_after == 0
        return dataclasses.replace(
            self,
            bad_in_a_row=0,
            good_in_a_row=good,
            rung=max(0, self.rung - 1) if calm else self.rung,
            uses=0 if calm else self.uses,
            is_aborted=False,
            good_since_return=self.good_since_return + 1,
        )

    def after_use(
        self, config: RecoveryConfig, strategy: RecoveryStrategy, *, ground_lost: int = 0
    ) -> History:
        """The strategy was applied; `ground_lost` is how many steps it went back."""
        if strategy is ABORT:
            return dataclasses.replace(self, is_aborted=True)
        rung = next((n for n, each in _open_rungs(config, self) if each is strategy), self.rung)
        used = dataclasses.replace(
            self,
            recoveries=self.recoveries + 1,
            rung=rung,
            uses=self.uses + 1 if rung == self.rung else 1,
        )
        return used._after_return(ground_lost) if strategy in GOING_BACK else used

    def _after_return(self, ground_lost: int) -> History:
        returns = 1 if self.good_since_return > self.ground_lost else self.returns + 1
        return dataclasses.replace(
            self, returns=returns, ground_lost=max(0, ground_lost), good_since_return=0
        )

    def goes_in_circles(self, config: RecoveryConfig) -> bool:
        """Whether going back once more would only lead to the same bad step again."""
        got_farther = self.good_since_return > self.ground_lost
        return not got_farther and self.returns >= config.max_consecutive_nans


def choose(
    config: RecoveryConfig,
    history: History,
    *,
    cannot: Set[RecoveryStrategy] = frozenset(),
) -> RecoveryStrategy:
    """The strategy for the bad step that was recorded last; `cannot` are those that did not help.

    >>> choose(RecoveryConfig(), History(bad_in_a_row=1)).value
    'reduce_scale'
    >>> choose(RecoveryConfig(), History(bad_in_a_row=2)).value
    'skip'
    >>> choose(RecoveryConfig(), History(bad_in_a_row=5)).value
    'abort'
    """
    if is_over(config, history):
        return ABORT
    if config.ladder:
        candidates = [strategy for _, strategy in _open_rungs(config, history)]
    elif history.bad_in_a_row <= 1:
        candidates = [config.primary_strategy, config.fallback_strategy]
    else:
        candidates = [config.fallback_strategy]
    if history.goes_in_circles(config):
        cannot = cannot | GOING_BACK
    return next((strategy for strategy in candidates if strategy not in cannot), ABORT)


def is_over(config: RecoveryConfig, history: History) -> bool:
    """Whether a budget is used up, so that only stopping is left."""
    if history.is_aborted or history.bad_in_a_row >= config.max_consecutive_nans:
        return True
    return (
        history.bad_in_a_row > 0
        and config.max_recoveries is not None
        and history.recoveries >= config.max_recoveries
    )


def _open_rungs(config: RecoveryConfig, history: History) -> Iterator[tuple[int, RecoveryStrategy]]:
    """The rungs from here upwards that have something left of their budget."""
    for number, rung in enumerate(config.ladder):
        left = rung.budget - (history.uses if number == history.rung else 0)
        if number >= history.rung and left > 0:
            yield number, rung.strategy
