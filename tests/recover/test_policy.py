"""Which strategy comes next, as tables: no tensor is needed for it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Set

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stayfinite.causes import Sort
from stayfinite.recover.config import UNATTENDED, RecoveryConfig, RecoveryStrategy, Rung
from stayfinite.recover.policy import PolicyState, choose, sort_of

SKIP, SCALE = RecoveryStrategy.SKIP_STEP, RecoveryStrategy.REDUCE_SCALE
CLIP, RESET = RecoveryStrategy.CLIP_GRADIENTS, RecoveryStrategy.RESET_MODEL
LOWER, REWIND = RecoveryStrategy.LOWER_LR, RecoveryStrategy.REWIND
ABORT = RecoveryStrategy.ABORT


def played(
    config: RecoveryConfig,
    events: str,
    *,
    cannot: Set[RecoveryStrategy] = frozenset(),
) -> list[RecoveryStrategy]:
    """What is chosen at each "b"ad step of the events; "g" is a good one."""
    history, chosen = PolicyState(), []
    for event in events:
        if event == "g":
            history = history.after_good_steps(config)
        else:
            history = history.after_bad_step()
            chosen.append(choose(config, history, cannot=cannot))
            history = history.after_use(config, chosen[-1])
    return chosen


@pytest.mark.parametrize(
    ("events", "cannot", "expected"),
    [
        ("b", (), [SCALE]),
        ("bb", (), [SCALE, SKIP]),
        ("bgb", (), [SCALE, SCALE]),
        ("bbbbb", (), [SCALE, SKIP, SKIP, SKIP, ABORT]),
        ("bbbbgb", (), [SCALE, SKIP, SKIP, SKIP, SCALE]),
        ("bbbbbb", (), [SCALE, SKIP, SKIP, SKIP, ABORT, ABORT]),
        ("bbbbbgb", (), [SCALE, SKIP, SKIP, SKIP, ABORT, SCALE]),
        ("b", (SCALE,), [SKIP]),
        ("b", (SCALE, SKIP), [ABORT]),
        ("bb", (SKIP,), [SCALE, ABORT]),
        ("bbb", (SKIP,), [SCALE, ABORT, ABORT]),
    ],
)
def test_without_a_ladder(
    events: str, cannot: tuple[RecoveryStrategy, ...], expected: list[RecoveryStrategy]
) -> None:
    assert played(RecoveryConfig(), events, cannot=set(cannot)) == expected


LADDER = RecoveryConfig(
    ladder=(Rung(SKIP, 2), Rung(CLIP), Rung(LOWER)), deescalate_after=3, max_consecutive_nans=10
)


@pytest.mark.parametrize(
    ("events", "cannot", "expected"),
    [
        ("bb", (), [SKIP, SKIP]),
        ("bbbbb", (), [SKIP, SKIP, CLIP, LOWER, ABORT]),
        ("bgbgb", (), [SKIP, SKIP, CLIP]),  # its budget is used up, in one streak or in several
        ("bbggb", (), [SKIP, SKIP, CLIP]),
        ("bbgggb", (), [SKIP, SKIP, SKIP]),  # at the foot the budget is renewed
        ("bbbgggb", (), [SKIP, SKIP, CLIP, SKIP]),  # down by one
        ("bbbbgggb", (), [SKIP, SKIP, CLIP, LOWER, CLIP]),
        ("bbbbgggbb", (), [SKIP, SKIP, CLIP, LOWER, CLIP, LOWER]),
        ("bbbbggggggb", (), [SKIP, SKIP, CLIP, LOWER, SKIP]),
        ("b", (SKIP,), [CLIP]),
        ("b", (SKIP, CLIP, LOWER), [ABORT]),
    ],
)
def test_with_a_ladder(
    events: str, cannot: tuple[RecoveryStrategy, ...], expected: list[RecoveryStrategy]
) -> None:
    assert played(LADDER, events, cannot=set(cannot)) == expected


def test_limit_of_bad_steps_in_a_row_holds_on_a_ladder_too() -> None:
    config = RecoveryConfig(ladder=(Rung(SKIP, 100),), max_consecutive_nans=3)
    assert played(config, "bbb") == [SKIP, SKIP, ABORT]


def test_total_budget_ends_the_run() -> None:
    config = RecoveryConfig(max_recoveries=2)
    assert played(config, "bgbgb") == [SCALE, SCALE, ABORT]
    assert played(RecoveryConfig(max_recoveries=0), "b") == [ABORT]


def test_rung_that_tires_in_a_streak_is_left_and_taken_up_again() -> None:
    ladder = (Rung(SKIP, 50, in_a_row=2), Rung(CLIP, in_a_row=3), Rung(LOWER, 2))
    config = RecoveryConfig(ladder=ladder, deescalate_after=1, max_consecutive_nans=10)
    assert played(config, "bgbgbg") == [SKIP, SKIP, SKIP]
    assert played(config, "bbbbbb") == [SKIP, SKIP, CLIP, LOWER, LOWER, ABORT]
    assert played(config, "bbbgb") == [SKIP, SKIP, CLIP, SKIP]


def test_same_strategy_on_two_rungs_has_two_budgets() -> None:
    config = RecoveryConfig(ladder=(Rung(SKIP), Rung(CLIP), Rung(SKIP, 2)))
    assert played(config, "bbbb") == [SKIP, CLIP, SKIP, SKIP]


BY_CAUSE = RecoveryConfig(
    ladder=(
        Rung(SKIP, 9, in_a_row=2),
        Rung(LOWER, 2, against="divergence"),
        Rung(SKIP, 3, share=0.5),
    ),
    deescalate_after=3,
    max_consecutive_nans=1000,
)
SORTS: dict[str, Sort] = {"s": "sample", "d": "divergence", "p": "precision", "u": "unknown"}


def played_by_cause(config: RecoveryConfig, events: str) -> list[RecoveryStrategy]:
    """What is chosen at each bad step, a letter for the sort of its cause; "g" is a good one."""
    history, chosen = PolicyState(), []
    for event in events:
        if event == "g":
            history = history.after_good_steps(config)
        else:
            history = history.after_bad_step()
            chosen.append(choose(config, history, sort=SORTS[event]))
            history = history.after_use(config, chosen[-1], sort=SORTS[event])
    return chosen


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("sss", [SKIP, SKIP, SKIP]),
        ("ddd", [SKIP, SKIP, LOWER]),
        ("ggddddd", [SKIP, SKIP, LOWER, LOWER, SKIP]),
        ("dddgs", [SKIP, SKIP, LOWER, SKIP]),
        ("dddsd", [SKIP, SKIP, LOWER, SKIP, LOWER]),  # a sample in between does not climb for it
        ("gggggsssss", [SKIP] * 5),
        ("sssss" + "s", [SKIP] * 5 + [ABORT]),  # three more than the first two, all steps bad
    ],
)
def test_rungs_follow_the_cause(events: str, expected: list[RecoveryStrategy]) -> None:
    assert played_by_cause(BY_CAUSE, events) == expected


@given(st.text("sg", max_size=300))
def test_samples_are_skipped_however_often_within_the_share(events: str) -> None:
    chosen = played_by_cause(UNATTENDED, events)
    assert set(chosen) <= {SKIP, CLIP}  # neither back nor slower, and fewer than 200 are no reason


def test_the_share_of_bad_steps_is_the_budget_beyond_the_number() -> None:
    assert ABORT not in played_by_cause(UNATTENDED, "gs" * 3000)
    cannot_clip = dataclasses.replace(
        UNATTENDED, ladder=tuple(r for r in UNATTENDED.ladder if r.strategy is not CLIP)
    )
    chosen = played_by_cause(cannot_clip, "ss" * 1000)
    assert chosen.index(ABORT) == 202


@pytest.mark.parametrize("sort", "sdpu")
def test_unattended_keeps_on_through_a_long_streak(sort: str) -> None:
    assert ABORT not in played_by_cause(UNATTENDED, sort * 150 + "g" * 10 + sort * 30)


def test_unattended_answers_each_sort_in_its_own_way() -> None:
    assert played_by_cause(UNATTENDED, "p")[0] is RecoveryStrategy.RAISE_PRECISION
    assert played_by_cause(UNATTENDED, "ddd")[2] is LOWER
    assert played_by_cause(UNATTENDED, "sss")[2] is CLIP


def test_abort_can_be_chosen() -> None:
    assert played(RecoveryConfig(primary_strategy=ABORT), "b") == [ABORT]


def test_going_back_to_the_same_place_is_limited() -> None:
    config = RecoveryConfig(primary_strategy=RESET, max_consecutive_nans=2)
    history = PolicyState()
    for _ in range(2):
        assert not history.goes_in_circles(config, back_at=100)
        history = history.after_use(config, RESET, back_at=100).after_good_steps(config, 49)
    assert history.goes_in_circles(config, back_at=100)
    assert history.goes_in_circles(config, back_at=50)
    assert not history.goes_in_circles(config, back_at=101)
    assert not history.after_use(config, RESET, back_at=101).goes_in_circles(config, back_at=101)


@given(st.integers(1, 5), st.lists(st.integers(0, 30), max_size=5), st.integers(0, 3))
def test_many_good_steps_at_once_are_the_same_as_one_by_one(
    every: int, counts: list[int], rung: int
) -> None:
    config = RecoveryConfig(ladder=(Rung(SKIP), Rung(CLIP), Rung(LOWER)), deescalate_after=every)
    at_once = one_by_one = PolicyState(places={"unknown": (rung, 1)}, bad_in_a_row=2)
    for count in counts:
        at_once = at_once.after_good_steps(config, count) if count else at_once
        for _ in range(count):
            one_by_one = one_by_one.after_good_steps(config)
        assert at_once == one_by_one


configs = st.builds(
    RecoveryConfig,
    primary_strategy=st.sampled_from([SKIP, SCALE, CLIP, LOWER, ABORT]),
    fallback_strategy=st.sampled_from([SKIP, SCALE, CLIP, LOWER, ABORT]),
    max_consecutive_nans=st.integers(1, 6),
    ladder=st.lists(
        st.builds(
            Rung,
            st.sampled_from([SKIP, SCALE, CLIP, LOWER]),
            st.integers(1, 3),
            st.none() | st.integers(1, 3),
        ),
        max_size=3,
    ).map(tuple),
    deescalate_after=st.integers(1, 5),
    max_recoveries=st.none() | st.integers(0, 10),
)


@given(configs, st.text("bg", max_size=60))
def test_any_course_keeps_all_budgets(config: RecoveryConfig, events: str) -> None:
    chosen = iter(played(config, events))
    in_a_row = since_abort = recoveries = 0
    for event in events:
        in_a_row = in_a_row + 1 if event == "b" else 0
        if event == "g":
            since_abort = 0
            continue
        strategy = next(chosen)
        if in_a_row >= config.max_consecutive_nans or since_abort:
            assert strategy is ABORT
        since_abort = since_abort + 1 if strategy is ABORT else 0
        recoveries += strategy is not ABORT
        assert strategy is ABORT or strategy in config.strategies
    assert config.max_recoveries is None or recoveries <= config.max_recoveries


def test_policy_needs_no_torch() -> None:
    code = "import stayfinite.recover.policy, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("cause", "lowered_at"),
    [("log_of_zero", [21]), ("division_by_zero", [21]), ("bad_input_data", []), ("bad_label", [])],
)
def test_a_singular_value_in_every_step_is_in_the_end_the_doing_of_the_weights(
    cause: str, lowered_at: list[int]
) -> None:
    history, chosen = PolicyState(good=100), []
    cannot = {CLIP, RecoveryStrategy.RAISE_PRECISION}
    for _ in range(30):
        history = history.after_bad_step()
        sort = sort_of(cause, bad_in_a_row=history.bad_in_a_row)
        chosen.append(choose(UNATTENDED, history, cannot=cannot, sort=sort))
        history = history.after_use(UNATTENDED, chosen[-1], sort=sort)
        if chosen[-1] is LOWER:
            cannot.add(LOWER)  # the next step was bad again
    assert [number for number, each in enumerate(chosen, 1) if each is LOWER] == lowered_at
    assert set(chosen) <= {SKIP, LOWER}
