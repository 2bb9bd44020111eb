"""Risks: their order, and their way to JSON and back."""

from __future__ import annotations

import math

import pytest

from stayfinite.errors import ConfigError, RecordError
from stayfinite.prevent.risks import Risk, rank_risks
from stayfinite.records import from_json, to_json


def _risk(**changes: object) -> Risk:
    given = {
        "level": "medium",
        "what": "log gets 0.",
        "where": "train.py:3",
        "fix": "Clamp it.",
        "cause": "log_of_zero",
    }
    return Risk(**{**given, **changes})


def test_ranked_puts_the_worst_first_and_says_nothing_twice() -> None:
    low, near, far = _risk(level="low"), _risk(score=2.0), _risk(where="train.py:9", score=1.0)
    high = _risk(level="high", where="train.py:7")
    assert rank_risks([low, far, near, high, near]) == [high, near, far]


def test_only_high_and_medium_are_warnings() -> None:
    assert [_risk(level=level).is_warning for level in ("high", "medium", "low")] == [1, 1, 0]


def test_a_risk_survives_json_with_non_finite_evidence() -> None:
    risk = _risk(evidence={"margin": 1e-9, "count": 3, "line": "train.py:3"}, score=0.5)
    assert from_json(Risk, to_json(risk)) == risk
    assert '"inf"' in to_json(_risk(evidence={"norm": math.inf}))


@pytest.mark.parametrize(
    "changes", [{"level": "worst"}, {"cause": "gremlins"}, {"score": math.nan}]
)
def test_a_risk_checks_itself(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        _risk(**changes)


def test_what_is_no_risk_is_refused() -> None:
    with pytest.raises(RecordError):
        from_json(Risk, '{"level": 3}')
