"""A config checks itself, and says all that is wrong with it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from stayfinite import ConfigError
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy, Rung


def test_defaults_are_as_promised() -> None:
    config = RecoveryConfig()
    assert config.primary_strategy is RecoveryStrategy.REDUCE_SCALE
    assert config.fallback_strategy is RecoveryStrategy.SKIP_STEP
    assert config.max_consecutive_nans == 5
    assert config.scale_reduction_factor == 0.5
    assert config.grad_clip_value == 1.0
    assert config.skip_batch_after_nan is True
    assert config.custom_recovery_fn is None
    assert config.strategies == (RecoveryStrategy.REDUCE_SCALE, RecoveryStrategy.SKIP_STEP)


def test_clipping_can_be_left_out_and_a_path_be_any_kind_of_path() -> None:
    config = RecoveryConfig(grad_clip_value=None, checkpoint_path=Path("runs") / "last.ckpt")
    assert config.grad_clip_value is None
    assert config.checkpoint_path == os.path.join("runs", "last.ckpt")
    assert RecoveryConfig().checkpoint_path is None


def test_strategies_have_their_names() -> None:
    assert {strategy.name: strategy.value for strategy in RecoveryStrategy} == {
        "SKIP_STEP": "skip",
        "REDUCE_SCALE": "reduce_scale",
        "CLIP_GRADIENTS": "clip",
        "RESET_MODEL": "reset",
        "CUSTOM": "custom",
        "LOWER_LR": "lower_lr",
        "REWIND": "rewind",
        "RAISE_PRECISION": "raise_precision",
        "ABORT": "abort",
    }


@pytest.mark.parametrize("strategy", RecoveryStrategy)
def test_strategies_can_be_given_by_name(strategy: RecoveryStrategy) -> None:
    given: Any = strategy.value
    config = RecoveryConfig(
        primary_strategy=given, fallback_strategy=given, custom_recovery_fn=lambda *_: True
    )
    assert config.strategies == (strategy, strategy)
    assert Rung(given).strategy is strategy


@pytest.mark.parametrize(
    "ladder",
    [
        [Rung(RecoveryStrategy.SKIP_STEP), Rung(RecoveryStrategy.LOWER_LR, 2)],
        ["skip", ("lower_lr", 2)],
        [{"strategy": "skip"}, {"strategy": "lower_lr", "budget": 2}],
        (RecoveryStrategy.SKIP_STEP, ["lower_lr", 2]),
    ],
)
def test_ladder_can_be_written_in_several_ways(ladder: Any) -> None:
    expected = (Rung(RecoveryStrategy.SKIP_STEP, 1), Rung(RecoveryStrategy.LOWER_LR, 2))
    assert RecoveryConfig(ladder=ladder).ladder == expected


def test_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        RecoveryConfig().max_consecutive_nans = 3  # type: ignore[misc]


ALL = "'skip', 'reduce_scale', 'clip', 'reset', 'custom', 'lower_lr', 'rewind', 'raise_precision'"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"max_consecutive_nans": 0},
            "max_consecutive_nans is 0; it must be at least 1. "
            "To stop at the first NaN, set primary_strategy=ABORT.",
        ),
        ({"max_consecutive_nans": 2.5}, "max_consecutive_nans is 2.5; it must be at least 1"),
        ({"max_consecutive_nans": True}, "max_consecutive_nans is True"),
        ({"primary_strategy": "hope"}, f"primary_strategy is 'hope'; it must be one of {ALL}"),
        ({"fallback_strategy": None}, "fallback_strategy is None; it must be one of 'skip'"),
        ({"scale_reduction_factor": 1.0}, "scale_reduction_factor is 1.0; it must be between"),
        ({"scale_reduction_factor": math.nan}, "scale_reduction_factor is nan"),
        ({"grad_clip_value": 0}, "grad_clip_value is 0; it must be a number greater than 0, or"),
        ({"checkpoint_path": 3}, "checkpoint_path is 3; it must be the path of a file or folder"),
        ({"checkpoint_path": ""}, "checkpoint_path is ''"),
        ({"grad_clip_value": "1"}, "grad_clip_value is '1'"),
        ({"lr_reduction_factor": 2}, "lr_reduction_factor is 2; it must be between 0 and 1"),
        ({"deescalate_after": 0}, "deescalate_after is 0; it must be at least 1."),
        ({"snapshot_every": 0}, "snapshot_every is 0"),
        ({"snapshot_slots": 0}, "snapshot_slots is 0"),
        ({"rewind_snapshots": -1}, "rewind_snapshots is -1"),
        ({"rewind_skip_batches": -1}, "rewind_skip_batches is -1"),
        ({"max_recoveries": -1}, "max_recoveries is -1; it must be at least 0, or None"),
        ({"skip_batch_after_nan": 1}, "skip_batch_after_nan is 1; it must be True or False."),
        ({"drop_whole_tensors": "no"}, "drop_whole_tensors is 'no'"),
        ({"lower_lr_goes_back": 2}, "lower_lr_goes_back is 2"),
        ({"primary_strategy": "custom"}, "'custom' needs custom_recovery_fn"),
        ({"ladder": ["custom"]}, "'custom' needs custom_recovery_fn"),
        ({"custom_recovery_fn": 3}, "custom_recovery_fn is 3; it must be a function"),
        ({"ladder": "skip"}, "ladder is 'skip'; it must be a list"),
        ({"ladder": ["hope"]}, f"a rung of the ladder is 'hope'; it must be one of {ALL}"),
        ({"ladder": [("skip", 0)]}, "the budget of 'skip' is 0; it must be a whole number"),
        (
            {"ladder": [{"strategy": "skip", "in_a_row": 0}]},
            "in_a_row of 'skip' is 0; it must be a whole number of at least 1, or None",
        ),
        ({"ladder": [{"budget": 3}]}, "its keys are 'strategy', 'budget', 'in_a_row'"),
        (
            {"ladder": [{"strategy": "skip", "uses": 3}]},
            "its keys are 'strategy', 'budget', 'in_a_row'",
        ),
        (
            {"primary_strategy": "rewind", "rewind_snapshots": 4},
            "rewind_snapshots is 4, but only 2 snapshots are kept; "
            "set snapshot_slots to at least 5.",
        ),
    ],
)
def test_wrong_values_are_refused_with_what_is_accepted(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RecoveryConfig(**options)
    assert said in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        RecoveryConfig(max_consecutive_nans=0, grad_clip_value=-1, snapshot_every=0)
    for name in ("max_consecutive_nans", "grad_clip_value", "snapshot_every"):
        assert name in str(caught.value)
