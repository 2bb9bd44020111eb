"""Which strategy comes next: a pure function of what is allowed and of what has happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from stayfinite.causes import Sort, cause_of
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy, Rung

ABORT = RecoveryStrategy.ABORT
_MOST_RETURNS = 8  # to the same snapshots, however long a streak may be
_LONG_ROW = 20  # of bad steps, which different samples would not all make
_FOOT = (0, 0)


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What counts for the next choice; each event makes a new one.

    A streak is made of bad steps, up to the next good one. `places` are where on the ladder it
    stands: the number of the rung, and how much of its budget is gone. Where the rungs ask for the
    cause, each sort of cause has a place of its own.
    """

    bad_in_a_row: int = 0
    good_in_a_row: int = 0
    good: int = 0
    bad: int = 0
    recoveries: int = 0
    places: Mapping[Sort, tuple[int, int]] = field(default_factory=dict)
    is_aborted: bool = False
    returns: int = 0  # to snapshots no newer than `farthest`, in a row
    farthest: int | None = None  # the newest step that was ever gone back to

    def after_bad_step(self) -> PolicyState:
        """A bad step was noticed; nothing has been done about it yet."""
        return dataclasses.replace(
            self, bad_in_a_row=self.bad_in_a_row + 1, good_in_a_row=0, bad=self.bad + 1
        )

    @property
    def steps(self) -> int:
        return self.good + self.bad

    @property
    def share(self) -> float:
        """The part of the steps that was bad, from 0 to 1."""
        return self.bad / self.steps if self.steps else 0.0

    def after_good_steps(self, config: RecoveryConfig, count: int = 1) -> PolicyState:
        """The streak is over; often enough, one rung down, and the budget there is new."""
        good = self.good_in_a_row + count
        down = good // config.deescalate_after - self.good_in_a_row // config.deescalate_after
        return dataclasses.replace(
            self,
            bad_in_a_row=0,
            good_in_a_row=good,
            good=self.good + count,
            places=_lowered(self.places, down) if down else self.places,
            is_aborted=False,
        )

    def after_use(
        self,
        config: RecoveryConfig,
        strategy: RecoveryStrategy,
        *,
        sort: Sort = "unknown",
        back_at: int | None = None,
    ) -> PolicyState:
        """The strategy was applied; `back_at` is the step of the snapshot that it restored."""
        if strategy is ABORT:
            return dataclasses.replace(self, is_aborted=True)
        key = _key_of(config, sort)
        before, uses = self.places.get(key, _FOOT)
        rungs = _open_rungs(config, self, sort)
        rung = next((number for number, each in rungs if each is strategy), before)
        place = (rung, uses + 1 if rung == before else 1)
        used = dataclasses.replace(
            self, recoveries=self.recoveries + 1, places={**self.places, key: place}
        )
        if back_at is None:
            return used
        if self.farthest is None or back_at > self.farthest:
            return dataclasses.replace(used, returns=1, farthest=back_at)
        return dataclasses.replace(used, returns=self.returns + 1)

    def goes_in_circles(self, config: RecoveryConfig, *, back_at: int) -> bool:
        """Whether to go back there again would only lead to the same bad step once more."""
        is_new = self.farthest is None or back_at > self.farthest
        return not is_new and self.returns >= min(config.max_consecutive_nans, _MOST_RETURNS)


def choose(
    config: RecoveryConfig,
    history: PolicyState,
    *,
    cannot: Set[RecoveryStrategy] = frozenset(),
    sort: Sort = "unknown",
) -> RecoveryStrategy:
    """The strategy for the bad step that was recorded last; `cannot` are those that did not help.

    `sort` is the sort of its cause, which some rungs are meant for.

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
        candidates = [strategy for _, strategy in _open_rungs(config, history, sort)]
    elif history.bad_in_a_row <= 1:
        candidates = [config.primary_strategy, config.fallback_strategy]
    else:
        candidates = [config.fallback_strategy]
    return next((strategy for strategy in candidates if strategy not in cannot), ABORT)


def sort_of(cause: str | None, *, bad_in_a_row: int) -> Sort:
    """What the bad step that makes a row so long has to be treated as.

    A singular value that every batch meets, one after the other, is the doing of the weights.

    >>> sort_of("log_of_zero", bad_in_a_row=2), sort_of("log_of_zero", bad_in_a_row=21)
    ('sample', 'unknown')
    """
    known = cause_of(cause)
    is_singular = known.sort == "sample" and known.kind == "domain"
    return "unknown" if is_singular and bad_in_a_row > _LONG_ROW else known.sort


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
    config: RecoveryConfig, history: PolicyState, sort: Sort
) -> Iterator[tuple[int, RecoveryStrategy]]:
    """The rungs from here upwards that are meant for this and have something left."""
    here, uses = history.places.get(_key_of(config, sort), _FOOT)
    for number, rung in enumerate(config.ladder):
        is_meant = not rung.against or sort in rung.against
        is_tired = rung.in_a_row is not None and history.bad_in_a_row > rung.in_a_row
        is_used_up = number == here and not _has_budget(rung, uses, history)
        if number >= here and is_meant and not is_tired and not is_used_up:
            yield number, rung.strategy


def _has_budget(rung: Rung, uses: int, history: PolicyState) -> bool:
    """Whether it may be used once more; with a share also beyond the number, within that share."""
    is_within = rung.share is not None and history.share <= rung.share
    return uses < rung.budget or is_within


def _key_of(config: RecoveryConfig, sort: Sort) -> Sort:
    """Whose place on the ladder it is: one for all where no rung asks for the cause."""
    return sort if any(rung.against for rung in config.ladder) else "unknown"


def _lowered(places: Mapping[Sort, tuple[int, int]], by: int) -> dict[Sort, tuple[int, int]]:
    return {sort: (max(0, rung - by), 0) for sort, (rung, _) in places.items()}
