"""Which strategy comes next: a pure function of what is allowed and of what has happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set
from dataclasses import dataclass

from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy

ABORT = RecoveryStrategy.ABORT


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What counts for the next choice; each event makes a new one.

    A streak is made of bad steps, up to the next good one. `rung` is the place on the ladder,
    and `uses` is how much of its budget is gone.
    """

    bad_in_a_row: int = 0
    good_in_a_row: int = 0
    good: int = 0
    recoveries: int = 0
    rung: int = 0
    uses: int = 0
    is_aborted: bool = False
    returns: int = 0  # to snapshots no newer than `farthest`, in a row
    farthest: int | None = None  # the newest step that was ever gone back to

    def after_bad_step(self) -> PolicyState:
        """A bad step was noticed; nothing has been done about it yet."""
        return dataclasses.replace(self, bad_in_a_row=self.bad_in_a_row + 1, good_in_a_row=0)

    def after_good_steps(self, config: RecoveryConfig, count: int = 1) -> PolicyState:
        """The streak is over; often enough, one rung down, and the budget there is new."""
        good = self.good_in_a_row + count
        down = good // config.deescalate_after - self.good_in_a_row // config.deescalate_after
        return dataclasses.replace(
            self,
            bad_in_a_row=0,
            good_in_a_row=good,
            good=self.good + count,
            rung=max(0, self.rung - down),
            uses=0 if down else self.uses,
            is_aborted=False,
        )

    def after_use(
        self, config: RecoveryConfig, strategy: RecoveryStrategy, *, back_at: int | None = None
    ) -> PolicyState:
        """The strategy was applied; `back_at` is the step of the snapshot that it restored."""
        if strategy is ABORT:
            return dataclasses.replace(self, is_aborted=True)
        rung = next((n for n, each in _open_rungs(config, self) if each is strategy), self.rung)
        used = dataclasses.replace(
            self,
            recoveries=self.recoveries + 1,
            rung=rung,
            uses=self.uses + 1 if rung == self.rung else 1,
        )
        if back_at is None:
            return used
        if self.farthest is None or back_at > self.farthest:
            return dataclasses.replace(used, returns=1, farthest=back_at)
        return dataclasses.replace(used, returns=self.returns + 1)

    def goes_in_circles(self, config: RecoveryConfig, *, back_at: int) -> bool:
        """Whether to go back there again would only lead to the same bad step once more."""
        is_new = self.farthest is None or back_at > self.farthest
        return not is_new and self.returns >= config.max_consecutive_nans


def choose(
    config: RecoveryConfig, history: PolicyState, *, cannot: Set[RecoveryStrategy] = frozenset()
) -> RecoveryStrategy:
    """The strategy for the bad step that was recorded last; `cannot` are those that did not help.

    >>> choose(RecoveryConfig(), PolicyState(bad_in_a_row=1)).value
    'reduce_scale'
    >>> choose(RecoveryConfig(), PolicyState(bad_in_a_row=2)).value
    'skip'
    >>> choose(RecoveryConfig(), PolicyState(bad_in_a_row=5)).value
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
    return next((strategy for strategy in candidates if strategy not in cannot), ABORT)


def is_over(config: RecoveryConfig, history: PolicyState) -> bool:
    """Whether a budget is used up, so that only stopping is left."""
    if history.is_aborted or history.bad_in_a_row >= config.max_consecutive_nans:
        return True
    return (
        history.bad_in_a_row > 0
        and config.max_recoveries is not None
        and history.recoveries >= config.max_recoveries
    )


def _open_rungs(
    config: RecoveryConfig, history: PolicyState
) -> Iterator[tuple[int, RecoveryStrategy]]:
    """The rungs from here upwards that have something left of their budget."""
    for number, rung in enumerate(config.ladder):
        left = rung.budget - (history.uses if number == history.rung else 0)
        is_tired = rung.in_a_row is not None and history.bad_in_a_row > rung.in_a_row
        if number >= history.rung and left > 0 and not is_tired:
            yield number, rung.strategy
