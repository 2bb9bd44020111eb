"""What may be done about a bad step, and how often."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args

from stayfinite.causes import Sort
from stayfinite.errors import ConfigError
from stayfinite.settings import is_number


class RecoveryStrategy(Enum):
    """One way to go on after a bad step.

    >>> RecoveryStrategy("rewind")
    <RecoveryStrategy.REWIND: 'rewind'>
    """

    SKIP_STEP = "skip"
    REDUCE_SCALE = "reduce_scale"
    CLIP_GRADIENTS = "clip"
    RESET_MODEL = "reset"
    CUSTOM = "custom"
    LOWER_LR = "lower_lr"
    REWIND = "rewind"
    RAISE_PRECISION = "raise_precision"
    ABORT = "abort"


@dataclass(frozen=True)
class Rung:
    """A strategy on a ladder, and how often it may be used before the next rung is climbed.

    With `in_a_row` it is also left when a streak of bad steps is longer than that. With `share` it
    may be used more often than `budget` while no more than that share of all steps is bad.
    `against` are the sorts of causes that it is meant for, by default all of them: "sample" (a bad
    sample or a singular value), "precision", "divergence", "unknown". A ladder with such rungs has
    a place for each sort of its own.

    >>> ladder = [Rung("skip", budget=20, in_a_row=2), Rung("lower_lr", against="divergence")]
    >>> RecoveryConfig(ladder=ladder).strategies[0]
    <RecoveryStrategy.SKIP_STEP: 'skip'>
    """

    strategy: RecoveryStrategy
    budget: int = 1
    in_a_row: int | None = None
    share: float | None = None
    against: tuple[Sort, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", strategy_of(self.strategy, "strategy"))
        sorts = (self.against,) if isinstance(self.against, str) else tuple(self.against)
        object.__setattr__(self, "against", sorts)
        if unknown := [sort for sort in sorts if sort not in get_args(Sort)]:
            known = ", ".join(map(repr, get_args(Sort)))
            raise ConfigError(
                f"against of {self.strategy.value!r} has {unknown[0]!r}; it must be of {known}."
            )
        if self.share is not None and not (is_number(self.share) and 0 < self.share <= 1):
            raise ConfigError(
                f"the share of {self.strategy.value!r} is {self.share!r}; "
                "it must be between 0 and 1, such as 0.5, or None for no more than the budget."
            )
        if not _is_whole(self.budget) or self.budget < 1:
            raise ConfigError(
                f"the budget of {self.strategy.value!r} is {self.budget!r}; "
                "it must be a whole number of at least 1. To do without a rung, do not list it."
            )
        if self.in_a_row is not None and not (_is_whole(self.in_a_row) and self.in_a_row >= 1):
            raise ConfigError(
                f"in_a_row of {self.strategy.value!r} is {self.in_a_row!r}; "
                "it must be a whole number of at least 1, or None for no limit."
            )


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What may be done about a bad step, and how often.

    Strategies can be given by their names. Without a `ladder`, the first bad step of a streak
    gets the primary strategy and the next ones the fallback; with one, its rungs are used up one
    after the other, and `deescalate_after` good steps lead down by one. With
    `lower_lr_goes_back` the rate is lowered from the oldest snapshot on; None does so for
    `on_forecast`, and not after a bad step. With `grad_clip_value` None, 'clip' drops bad elements
    and clips nothing. `checkpoint_path` is a checkpoint, or a folder whose newest good one is
    taken: 'reset' loads it where there is no snapshot in memory. The bad step that makes
    `max_consecutive_nans` in a row ends the run, and so does the one after `max_recoveries`.
    With `quarantine` a sample that made a step bad is not read again: another one of its batch
    takes its place. `on_forecast` is what is done when something is about to overflow or diverge,
    and undone when the trend is gone; `on_spike` what is done when the loss jumps. Both need
    `watch(..., forecast=True)`. As their answer, 'lower_lr' makes updates with a part of the
    learning rate until it is undone; the optimizer and its schedules keep theirs.

    >>> RecoveryConfig(primary_strategy="clip").primary_strategy
    <RecoveryStrategy.CLIP_GRADIENTS: 'clip'>
    """

    primary_strategy: RecoveryStrategy = RecoveryStrategy.REDUCE_SCALE
    fallback_strategy: RecoveryStrategy = RecoveryStrategy.SKIP_STEP
    max_consecutive_nans: int = 5
    scale_reduction_factor: float = 0.5
    grad_clip_value: float | None = 1.0
    skip_batch_after_nan: bool = True
    custom_recovery_fn: Callable[..., bool] | None = None
    checkpoint_path: str | os.PathLike[str] | None = None
    ladder: tuple[Rung, ...] = ()
    deescalate_after: int = 100
    lr_reduction_factor: float = 0.5
    lower_lr_goes_back: bool | None = None
    rewind_snapshots: int = 1
    rewind_skip_batches: int = 200
    snapshot_every: int = 50
    snapshot_slots: int = 2
    drop_whole_tensors: bool = False
    max_recoveries: int | None = None
    quarantine: bool = True
    on_forecast: Literal["lower_lr", "raise_precision", "clip"] | None = None
    on_spike: Literal["skip", "lower_lr", "rewind"] | None = None

    def __post_init__(self) -> None:
        for name in ("primary_strategy", "fallback_strategy"):
            object.__setattr__(self, name, strategy_of(getattr(self, name), name))
        if not isinstance(self.ladder, (list, tuple)):
            raise ConfigError(
                f"ladder is {self.ladder!r}; "
                "it must be a list of Rung(strategy, budget) or strategy names."
            )
        object.__setattr__(self, "ladder", tuple(map(_rung, self.ladder)))
        if isinstance(self.checkpoint_path, os.PathLike):
            object.__setattr__(self, "checkpoint_path", os.fspath(self.checkpoint_path))
        if problems := " ".join(_problems(self)):
            raise ConfigError(problems)

    @property
    def strategies(self) -> tuple[RecoveryStrategy, ...]:
        """Those that can come up, in their order."""
        if self.ladder:
            return tuple(rung.strategy for rung in self.ladder)
        return self.primary_strategy, self.fallback_strategy


def refuse_unanswered(config: RecoveryConfig | None, why: str | None) -> None:
    """ConfigError if forecasts are to be answered that are not made, or that nobody can answer.

    `why` also says what to do about it; None where they are made and answered.
    """
    if config is None or why is None:
        return
    for name in _ANSWERS:
        if (given := getattr(config, name)) is not None:
            raise ConfigError(f"{name} is {given!r}, but {why} Or leave {name} None.")


def strategy_of(given: Any, name: str) -> RecoveryStrategy:
    """The strategy itself or the one of this name; ConfigError lists them all."""
    if isinstance(given, RecoveryStrategy):
        return given
    try:
        return RecoveryStrategy(given)
    except ValueError:
        known = ", ".join(repr(strategy.value) for strategy in RecoveryStrategy)
        raise ConfigError(f"{name} is {given!r}; it must be one of {known}.") from None


def _rung(given: Any) -> Rung:
    if isinstance(given, Rung):
        return given
    if isinstance(given, Mapping):
        unknown = set(given) - {field.name for field in dataclasses.fields(Rung)}
        if unknown or "strategy" not in given:
            known = ", ".join(repr(field.name) for field in dataclasses.fields(Rung))
            raise ConfigError(f"a rung is {dict(given)!r}; its keys are {known}.")
        return Rung(**given)
    if isinstance(given, (list, tuple)) and len(given) == 2:
        return Rung(*given)
    return Rung(strategy_of(given, "a rung of the ladder"))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_fraction(value: Any) -> bool:
    return is_number(value) and 0 < value < 1


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: _is_whole(value) and value >= least


# name, what is accepted, how that is said
_NUMBERS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "max_consecutive_nans",
        _at_least(1),
        "at least 1. To stop at the first NaN, set primary_strategy=ABORT",
    ),
    ("scale_reduction_factor", _is_fraction, "between 0 and 1, such as 0.5"),
    (
        "grad_clip_value",
        lambda v: v is None or (is_number(v) and v > 0),
        "a number greater than 0, or None to drop bad elements and clip nothing",
    ),
    ("deescalate_after", _at_least(1), "at least 1"),
    ("lr_reduction_factor", _is_fraction, "between 0 and 1, such as 0.5"),
    ("rewind_snapshots", _at_least(0), "at least 0, which is the newest snapshot"),
    ("rewind_skip_batches", _at_least(0), "at least 0"),
    ("snapshot_every", _at_least(1), "at least 1"),
    ("snapshot_slots", _at_least(1), "at least 1"),
    (
        "max_recoveries",
        lambda v: v is None or _at_least(0)(v),
        "at least 0, or None for no limit over the whole run",
    ),
)


_ANSWERS = {
    "on_forecast": ("lower_lr", "raise_precision", "clip"),
    "on_spike": ("skip", "lower_lr", "rewind"),
}


_FLAGS = {
    "skip_batch_after_nan": (True, False),
    "drop_whole_tensors": (True, False),
    "lower_lr_goes_back": (True, False, None),
    "quarantine": (True, False),
}


def _problems(config: RecoveryConfig) -> Iterator[str]:
    for name, accepts, accepted in _NUMBERS:
        value = getattr(config, name)
        if not accepts(value):
            yield f"{name} is {value!r}; it must be {accepted}."
    for name, allowed in _FLAGS.items():
        value = getattr(config, name)
        if not any(value is each for each in allowed):
            yield f"{name} is {value!r}; it must be {' or '.join(map(str, allowed))}."
    for name, known in _ANSWERS.items():
        if getattr(config, name) not in (None, *known):
            said = ", ".join(map(repr, known))
            yield f"{name} is {getattr(config, name)!r}; it must be one of {said}, or None."
    function, slots = config.custom_recovery_fn, config.snapshot_slots
    path = config.checkpoint_path
    if path is not None and not (isinstance(path, str) and path):
        yield f"checkpoint_path is {path!r}; it must be the path of a file or folder, or None."
    if function is not None and not callable(function):
        yield (
            f"custom_recovery_fn is {function!r}; it must be a function "
            "(report, model, optimizer, scaler, step) -> bool, or None."
        )
    if function is None and RecoveryStrategy.CUSTOM in config.strategies:
        yield (
            "The strategy 'custom' needs custom_recovery_fn, "
            "a function (report, model, optimizer, scaler, step) -> bool."
        )
    if RecoveryStrategy.REWIND in config.strategies and _is_whole(slots):
        back = config.rewind_snapshots
        if _is_whole(back) and back >= slots >= 1:
            yield (
                f"rewind_snapshots is {back}, but only {slots} snapshots are kept; "
                f"set snapshot_slots to at least {back + 1}."
            )


UNATTENDED = RecoveryConfig(
    ladder=(
        Rung(RecoveryStrategy.RAISE_PRECISION, budget=8, against=("precision",)),
        Rung(RecoveryStrategy.SKIP_STEP, budget=200, in_a_row=2, share=0.5),
        Rung(RecoveryStrategy.RAISE_PRECISION, against=("unknown",)),
        # A sample that is bad, or a value that is singular, is none of the learning rate's doing.
        Rung(RecoveryStrategy.LOWER_LR, budget=6, against=("divergence",)),
        Rung(RecoveryStrategy.CLIP_GRADIENTS, budget=1000, share=1.0),
        Rung(RecoveryStrategy.REWIND, against=("divergence",)),
        Rung(
            RecoveryStrategy.SKIP_STEP,
            budget=200,
            in_a_row=8,
            share=0.5,
            against=("precision", "unknown"),
        ),
        Rung(RecoveryStrategy.LOWER_LR, budget=6, against=("precision", "unknown")),
        Rung(RecoveryStrategy.SKIP_STEP, budget=200, share=0.5),
    ),
    lower_lr_goes_back=True,
    deescalate_after=50,
    max_consecutive_nans=100_000,
    rewind_skip_batches=10,
    snapshot_every=10,
)
"""What is done for a script whose author is not asked: rungs that follow the cause."""
