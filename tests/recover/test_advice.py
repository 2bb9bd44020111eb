"""What to change: concrete sentences drawn from what has happened, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import NAN, SmallJob, report
from torch.amp.grad_scaler import GradScaler

from stayfinite.causes import CAUSES
from stayfinite.recover.actions import Situation
from stayfinite.recover.advice import Past, Recovery, recommendations
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.recover.manager import NaNRecoveryManager

SKIP, CLIP = RecoveryStrategy.SKIP_STEP, RecoveryStrategy.CLIP_GRADIENTS
LOWER, RAISE = RecoveryStrategy.LOWER_LR, RecoveryStrategy.RAISE_PRECISION


def bad(step: int = 2000, location: str = "gradients.0.weight", **facts: Any) -> Recovery:
    return Recovery(
        **{
            "step": step,
            "location": location,
            "strategy": SKIP,
            "succeeded": True,
            "lr": 0.1,
            "dtype": "float32",
            **facts,
        }
    )


def advice(*recoveries: Recovery, **past: Any) -> list[str]:
    config = past.pop("config", RecoveryConfig())
    return recommendations(Past(recoveries=recoveries, config=config, **past))


def first_with(words: str, said: Sequence[str]) -> str:
    found = [sentence for sentence in said if words in sentence]
    assert found, said
    return found[0]


def test_nothing_happened_nothing_to_say() -> None:
    manager = NaNRecoveryManager()
    manager.record_good_step(grad_norm=1.0, loss=2.0, lr=0.1)
    assert manager.get_recommendations() == []


@pytest.mark.parametrize("cause", [slug for slug in CAUSES if slug != "unknown"])
def test_known_cause_comes_with_its_fix(cause: str) -> None:
    said = advice(bad(cause=cause, module="encoder"), bad())
    sentence = first_with(CAUSES[cause].title, said)
    assert sentence.endswith(CAUSES[cause].fix)
    assert " in encoder, at 1 of 2 bad steps" in sentence
    assert said.index(sentence) < 2


def test_known_cause_is_ranked_before_guesses() -> None:
    said = advice(bad(cause="log_of_zero"), bad(), bad())
    assert said[0].startswith("Logarithm of zero, at 1 of 3 bad steps")


def test_causes_are_ranked_by_how_often_they_struck() -> None:
    said = advice(bad(cause="log_of_zero"), bad(cause="exp_overflow"), bad(cause="exp_overflow"))
    titles = [CAUSES["exp_overflow"].title, CAUSES["log_of_zero"].title]
    assert [sentence.partition(",")[0] for sentence in said[:2]] == titles


def test_lower_rate_is_a_number() -> None:
    said = advice(bad(cause="lr_too_high", lr=0.3), config=RecoveryConfig(lr_reduction_factor=0.1))
    sentence = first_with("Lower the learning rate to", said)
    assert sentence.startswith("Lower the learning rate to 0.03: it was 0.3 at the last bad step")


def test_lower_rate_that_helped_is_the_one_to_keep() -> None:
    said = advice(bad(strategy=LOWER, lr=0.1), bad(strategy=LOWER, lr=0.05))
    sentence = first_with("Lower the learning rate", said)
    assert "to 0.025" in sentence
    assert "lowering it ended 2 streaks" in sentence
    assert said[0] == sentence


def test_rate_is_not_blamed_for_a_local_cause() -> None:
    said = advice(bad(cause="log_of_zero"))
    assert not any("learning rate to" in sentence for sentence in said)


def test_clip_limit_comes_from_the_norms_of_good_steps() -> None:
    norms = [1.0] * 90 + [2.0] * 8 + [50.0] * 2
    sentence = first_with("Clip the gradients", advice(bad(), norms=norms))
    assert sentence.startswith(
        "Clip the gradients at 2, `stayfinite.clip_gradients(model, 2)`: "
        "the norm of good steps was 1 as a rule, and at most 2 in 95%"
    )


def test_clip_limit_without_norms_says_so() -> None:
    config = RecoveryConfig(grad_clip_value=0.5)
    sentence = first_with("Clip the gradients", advice(bad(), config=config))
    assert "at 0.5" in sentence
    assert "no norms of good steps were recorded" in sentence


def test_norms_that_ran_away_raise_the_rank_of_calmer_updates() -> None:
    calm = advice(bad(location="loss"), norms=[1.0] * 20)
    wild = advice(bad(location="loss"), norms=[1.0] * 15 + [2.0, 4.0, 8.0, 16.0, 32.0])
    assert not calm[0].startswith("Lower the learning rate")
    assert wild[0].startswith("Lower the learning rate")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"dtype": "float16"}, True),
        ({"scale": 512.0}, True),
        ({"dtype": "bfloat16"}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_bfloat16_is_for_those_who_use_float16(facts: dict[str, Any], expected: bool) -> None:
    said = advice(bad(**facts))
    assert any("Train in bfloat16 instead of float16" in each for each in said) == expected


def test_scale_at_its_floor_is_told() -> None:
    sentence = first_with("bfloat16", advice(bad(scale=1.0, cause="loss_scale_collapse")))
    assert "it needs no loss scale (which was down to 1)." in sentence


def test_module_that_was_raised_stays_in_float32() -> None:
    said = advice(bad(strategy=RAISE, module="decoder.attention", dtype="bfloat16"))
    assert said[0].startswith("Keep decoder.attention in float32")


@pytest.mark.parametrize(
    ("steps", "length"), [([3], 100), ([12, 90], 182), ([5, 4000], None), ([4000], None)]
)
def test_warm_up_is_for_early_trouble(steps: list[int], length: int | None) -> None:
    said = advice(*(bad(step) for step in steps))
    found = [sentence for sentence in said if sentence.startswith("Warm the learning rate up")]
    assert bool(found) == (length is not None)
    if length is not None:
        assert f"over the first {length} steps" in found[0]


def test_data_is_named_with_its_steps() -> None:
    said = advice(bad(7, "inputs.image"), bad(9, "inputs.image"), bad(9, "inputs.image"))
    assert said[0] == ("Look at the data: inputs.image was bad at steps 7, 9; skip those samples.")


def test_loss_term_is_named() -> None:
    sentence = first_with("loss term", advice(bad(5, "loss.kl"), bad(6, "loss.kl")))
    assert sentence == (
        "Look at how the loss term 'kl' is computed: it was not finite at steps 5, 6."
    )
    assert first_with("the loss itself", advice(bad(5, "loss")))


def test_layer_is_named() -> None:
    recoveries = [bad(2000, f"gradients.{name}") for name in ("a.0.weight", "a.0.bias", "b.weight")]
    sentence = first_with("Look at a.0 first", advice(*recoveries))
    assert "2 of 3 bad steps" in sentence


def test_initial_weights_are_suspected_at_the_very_beginning() -> None:
    sentence = first_with("Initialize the weights", advice(bad(0, "gradients.head.weight")))
    assert "of head smaller" in sentence
    assert "bad from step 0 on" in sentence
    assert not any("Initialize" in each for each in advice(bad(500)))
    diagnosed = advice(bad(500, "loss", cause="bad_init", module="stem"))
    assert "of stem smaller" in first_with("Initialize the weights", diagnosed)


def test_strategy_that_ended_streaks_is_preferred() -> None:
    recoveries = []
    for _ in range(3):
        recoveries += [bad(bad_in_a_row=1), bad(strategy=CLIP, bad_in_a_row=2)]
    config = RecoveryConfig(primary_strategy=SKIP, fallback_strategy=CLIP)
    sentence = first_with("primary_strategy", advice(*recoveries, config=config))
    assert sentence == "Use primary_strategy='clip': it ended 3 streaks in 3 uses, 'skip' 0."


def test_streak_that_is_not_over_was_not_ended() -> None:
    clipped = bad(strategy=CLIP)
    ended = first_with("Clip the gradients", advice(clipped, is_streak_over=True))
    assert "clipping has ended 1 streak" in ended
    going_on = first_with("Clip the gradients", advice(clipped, is_streak_over=False))
    assert "ended" not in going_on


def test_missing_snapshots_are_missed() -> None:
    tried = ((RecoveryStrategy.RESET_MODEL, "there is no snapshot"),)
    sentence = first_with("manager.snapshot", advice(bad(tried=tried), bad()))
    assert "at 50% of bad steps" in sentence


def test_manager_gives_what_it_has_seen() -> None:
    job = SmallJob(GradScaler("cpu", init_scale=1024.0))
    manager = NaNRecoveryManager()
    for _ in range(20):
        manager.record_good_step(grad_norm=0.5, loss=1.0, lr=0.01)
    job.backward(NAN)
    situation = Situation(model=job.model, optimizer=job.optimizer, scaler=job.scaler, module="2")
    manager.respond([report("loss")], situation, step=20, cause="low_precision_overflow")
    said = manager.get_recommendations()
    assert said[0].startswith("Overflow in half precision in 2, at the bad step")
    assert first_with("bfloat16", said)


causes = st.none() | st.sampled_from([*CAUSES, "something_new"])
any_recovery = st.builds(
    Recovery,
    step=st.integers(0, 5000),
    location=st.sampled_from(["", "loss", "loss.kl", "gradients.a.weight", "inputs.x", "other"]),
    strategy=st.sampled_from(RecoveryStrategy),
    succeeded=st.booleans(),
    cause=causes,
    module=st.none() | st.sampled_from(["", "a.b"]),
    bad_in_a_row=st.integers(1, 3),
    lr=st.none() | st.floats(0, 10),
    scale=st.none() | st.floats(0, 1e5),
    dtype=st.none() | st.sampled_from(["float16", "float32"]),
)
numbers = st.lists(st.floats(0, 1e30), max_size=12)


@given(st.lists(any_recovery, min_size=1, max_size=6), numbers, numbers, numbers)
def test_any_history_gives_distinct_sentences(
    recoveries: list[Recovery], norms: list[float], losses: list[float], rates: list[float]
) -> None:
    said = advice(*recoveries, norms=norms, losses=losses, rates=rates)
    assert said
    assert len(set(said)) == len(said)
    assert all(sentence[0].isupper() or sentence[0] in "a" for sentence in said)
    assert all(sentence.endswith(".") for sentence in said)
