"""Rules for who is told how often, under a clock that the test moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stayfinite import (
    Alert,
    AlertRule,
    ConfigError,
    Forecast,
    Incident,
    NaNReport,
    NaNType,
    Outcome,
)
from stayfinite.records import Severity
from stayfinite.report.alerts import SEVERITIES
from stayfinite.report.sinks import forecasts_told_to, told_to

DAY = 86_400.0
SEEN = NaNReport(has_nan=True, nan_type=NaNType.NAN, location="loss", tensor_shape=())
LOST = Incident(step=37, reports=(SEEN,), outcome=Outcome(strategy="stop"))
SKIPPED = Incident(step=36, reports=(SEEN,), outcome=Outcome(strategy="skip", detail="skipped"))
SOON = Forecast(
    step=210,
    signal="activation",
    where="encoder.3.ffn",
    dtype="float16",
    steps_left=40,
    steps_low=25,
    steps_high=70,
)

severities = st.sampled_from(SEVERITIES)
pauses = st.one_of(
    st.just(0.0), st.floats(0, 900), st.floats(0, 2 * DAY), st.sampled_from([600.0, DAY])
)
rules = st.fixed_dictionaries(
    {
        "min_severity": severities,
        "cooldown": st.one_of(st.just(0.0), st.floats(0, 7200), st.floats(0, 2 * DAY)),
        "max_per_day": st.integers(1, 6),
    }
)
events = st.lists(st.tuples(pauses, severities), max_size=60)


class Told:
    """A receiver, and the clock of its rule."""

    def __init__(self, **rule: Any) -> None:
        self.now = 1000.0
        self.alerts: list[tuple[float, Alert]] = []
        self.rule = AlertRule(self.hear, clock=lambda: self.now, name="", **rule)

    def hear(self, alert: Alert) -> None:
        self.alerts.append((self.now, alert))

    def run(self, events: list[tuple[float, Severity]]) -> None:
        for pause, severity in events:
            self.now += pause
            self.rule.on_forecast(Forecast(step=0, signal="loss", severity=severity))


@given(rules, events)
def test_nothing_below_the_least_severity_is_told_and_all_else_is_told_or_counted(
    rule: dict[str, Any], events: list[tuple[float, Severity]]
) -> None:
    told = Told(**rule)
    told.run(events)
    least = SEVERITIES.index(rule["min_severity"])
    meant = [severity for _, severity in events if SEVERITIES.index(severity) >= least]
    counted = sum(alert.held_back for _, alert in told.alerts) + told.rule.held_back
    assert all(SEVERITIES.index(alert.severity) >= least for _, alert in told.alerts)
    assert len(told.alerts) + counted == len(meant)
    assert not meant or told.alerts


@given(rules, events)
def test_no_24_hours_have_more_than_the_cap(
    rule: dict[str, Any], events: list[tuple[float, Severity]]
) -> None:
    told = Told(**rule)
    told.run(events)
    times = [time for time, _ in told.alerts]
    for first, after in zip(times, times[rule["max_per_day"] :], strict=False):
        assert after - first >= DAY


@given(rules, events)
def test_within_the_cooldown_only_something_more_severe_is_told(
    rule: dict[str, Any], events: list[tuple[float, Severity]]
) -> None:
    told = Told(**rule)
    told.run(events)
    for (before, one), (after, other) in itertools.pairwise(told.alerts):
        is_worse = SEVERITIES.index(other.severity) > SEVERITIES.index(one.severity)
        assert after - before >= rule["cooldown"] or is_worse


@given(rules, events)
def test_the_first_critical_event_of_a_day_is_always_told(
    rule: dict[str, Any], events: list[tuple[float, Severity]]
) -> None:
    told = Told(**{**rule, "max_per_day": rule["max_per_day"] + 1})
    quiet = [(pause, severity) for pause, severity in events if severity != "critical"]
    told.run([*quiet, (0.0, "critical")])
    assert told.alerts[-1][1].severity == "critical"


@given(events)
def test_without_limits_everything_is_told(events: list[tuple[float, Severity]]) -> None:
    told = Told(min_severity="info", cooldown=0.0, max_per_day=len(events) + 2)
    told.run(events)
    assert len(told.alerts) == len(events)
    assert {alert.held_back for _, alert in told.alerts} <= {0}


def test_the_next_message_says_what_was_held_back() -> None:
    told = Told(cooldown=600.0)
    told.rule(SKIPPED)
    told.rule(SKIPPED)
    told.rule.on_forecast(SOON)
    told.now += 600
    told.rule(SKIPPED)
    first, last = (alert for _, alert in told.alerts)
    assert first.title == "NaN at step 36 in the loss; skip: skipped"
    assert last.title == f"{first.title} (2 messages were held back before)"
    assert last.text.startswith(last.title)


def test_a_training_that_is_lost_is_told_at_once_after_a_warning() -> None:
    told = Told(cooldown=DAY, max_per_day=2)
    told.rule.on_forecast(SOON)
    told.rule(SKIPPED)
    told.rule(LOST)
    assert [alert.severity for _, alert in told.alerts] == ["warning", "critical"]
    assert told.alerts[0][1].title == (
        "step 210: encoder.3.ffn overflows float16 in about 40 steps (25-70)"
    )


def test_a_receiver_that_raises_is_told_of_it_later() -> None:
    heard: list[Alert] = []

    def receiver(alert: Alert) -> None:
        if alert.step == 36:
            raise OSError("the line is dead")
        heard.append(alert)

    rule = AlertRule(receiver, name="")
    tell = told_to([], rule)
    tell(SKIPPED)
    tell(LOST)
    assert [(alert.step, alert.held_back) for alert in heard] == [(37, 1)]


@pytest.mark.parametrize(("rank", "tells"), [("2", True), ("0", False), ("3", False)])
def test_of_ranks_that_train_together_the_one_where_it_began_tells(
    rank: str, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    told = Told()
    told.rule(Incident(step=5, rank=2, world=4))
    assert bool(told.alerts) == tells


def test_forecasts_are_told_by_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    told = Told()
    told.rule.on_forecast(SOON)
    monkeypatch.setenv("RANK", "0")
    told.rule.on_forecast(SOON)
    assert len(told.alerts) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AlertRule(print, min_severity="loud"), "'info', 'warning', 'critical'"),  # type: ignore[arg-type]
        (lambda: AlertRule(print, cooldown=-1), "cooldown is -1"),
        (lambda: AlertRule(print, cooldown=float("nan")), "cooldown is nan"),
        (lambda: AlertRule(print, max_per_day=0), "max_per_day is 0"),
        (lambda: AlertRule(7), "the receiver is a int"),  # type: ignore[arg-type]
        (lambda: AlertRule(told_to_all()), "give it to `sinks`"),
    ],
)
def test_a_rule_checks_itself(make: Callable[[], AlertRule], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def told_to_all() -> Any:
    from stayfinite.report.sinks import terminal

    return terminal()


def test_sinks_without_a_word_for_forecasts_are_not_told_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard: list[Incident] = []
    forecasts_told_to([heard.append])(SOON)
    assert heard == []
    forecasts_told_to(None)(SOON)
    said = capsys.readouterr().err
    assert said == (
        "stayfinite: step 210: encoder.3.ffn overflows float16 in about 40 steps (25-70)\n"
    )
