"""Any sequence of events: the scale stays where it belongs, and is what fifteen lines say.

Each example is a trace, one byte for each event. The usual profile of 50 examples tries 5,000
events and 1,000 traces; `make prove`, with 10,000 examples, a million events and 200,000 traces.
"""

from __future__ import annotations

import ctypes
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling import Training
from torch.amp.grad_scaler import GradScaler

from stayfinite.amp.scaler import LARGEST_SCALE, SMALLEST_SCALE, DynamicLossScaler, is_power_of_two

EVENTS_IN_A_TRACE = 100
SHORT = 16
SHORT_TRACES = 20  # in each example

quietly = {"floor_patience": 10**9}
exponents = st.integers(-20, 40)


@st.composite
def settings_of_twos(draw: Any, *, around: float = 1.0) -> dict[str, Any]:
    """Powers of two; with `around`, bounds that are none."""
    low, start, high = sorted(draw(st.tuples(exponents, exponents, exponents)))
    return {
        "init_scale": 2.0**start,
        "min_scale": 2.0**low / around,
        "max_scale": 2.0**high * around,
        "growth_factor": 2.0 ** draw(st.integers(1, 8)),
        "backoff_factor": 2.0 ** -draw(st.integers(1, 8)),
        **draw(other_settings),
    }


@st.composite
def any_settings(draw: Any) -> dict[str, Any]:
    """A growth factor that is no power of two, so that the bounds are kept as they are."""
    low, start, high = sorted(draw(st.tuples(*[st.floats(2.0**-20, 2.0**40)] * 3)))
    return {
        "init_scale": start,
        "min_scale": low,
        "max_scale": high,
        "growth_factor": draw(st.floats(1.001, 1000.0).filter(lambda f: not is_power_of_two(f))),
        "backoff_factor": draw(st.floats(0.001, 0.999)),
        **draw(other_settings),
    }


other_settings = st.fixed_dictionaries(
    {
        "growth_interval": st.integers(1, 6),
        "hysteresis": st.integers(1, 4),
        "hysteresis_mode": st.sampled_from(["interval", "consecutive"]),
    }
)


class Life:
    """What may happen to a scaler and to those who use it."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        self.training = Training(DynamicLossScaler("cpu", **quietly, **chosen))
        self.other = Training(self.training.scaler)
        self.chosen = chosen

    @property
    def scaler(self) -> DynamicLossScaler:
        return self.training.scaler

    def happen(self, byte: int) -> None:
        if byte < 200:
            self.training.step(("good", "inf", "good", "nan", "late", "none")[byte % 6])
        elif byte < 220:
            self.training.attempt("good")
            self.other.step("nan" if byte % 2 else "good")
        else:
            rare = (self.set_scale, self.go_on_elsewhere, self.go_on_from_torch, self.set_interval)
            rare[byte % 4](byte)

    def set_scale(self, byte: int) -> None:
        self.training.attempt()
        self.scaler.update((0.0, -1.0, math.inf, 2.0**-140, 2.0**200, 64.0)[byte % 6])

    def go_on_elsewhere(self, byte: int) -> None:
        if byte % 8 < 4:
            successor = pickle.loads(pickle.dumps(self.scaler))
        else:
            successor = DynamicLossScaler("cpu", **quietly, **self.chosen)
            successor.load_state_dict(self.scaler.state_dict())
        assert successor.state_dict() == self.scaler.state_dict()
        self.training.scaler = self.other.scaler = successor

    def go_on_from_torch(self, byte: int) -> None:
        state = GradScaler("cpu", init_scale=(0.0, 1e30, 2.0**-149)[byte % 3]).state_dict()
        kept = {key: self.scaler.state_dict()[key] for key in state if key.endswith("factor")}
        self.scaler.load_state_dict({**state, **kept})

    def set_interval(self, byte: int) -> None:
        self.scaler.set_growth_interval(1 + byte % 5)


@settings(deadline=None, derandomize=True)
@given(
    settings_of_twos() | settings_of_twos(around=1.3),
    st.binary(min_size=EVENTS_IN_A_TRACE, max_size=EVENTS_IN_A_TRACE),
)
def test_scale_stays_a_power_of_two_within_its_bounds(chosen: dict[str, Any], trace: bytes) -> None:
    life = Life(chosen)
    for byte in trace:
        life.happen(byte)
        scale = life.scaler.get_scale()
        assert chosen["min_scale"] <= scale <= chosen["max_scale"]
        # A user may set 64 where the bounds allow it, and that is one too.
        assert math.frexp(scale)[0] == 0.5
    assert life.training.is_finite()


@settings(deadline=None, derandomize=True)
@given(any_settings(), st.binary(min_size=EVENTS_IN_A_TRACE, max_size=EVENTS_IN_A_TRACE))
def test_scale_stays_within_any_bounds(chosen: dict[str, Any], trace: bytes) -> None:
    life = Life(chosen)
    # What the scaler says of its bounds is what float32 can hold of those that were given.
    low, high = life.scaler.min_scale, life.scaler.max_scale
    assert (low, high) == pytest.approx((chosen["min_scale"], chosen["max_scale"]), rel=1e-7)
    for byte in trace:
        life.happen(byte)
        assert low <= life.scaler.get_scale() <= high
    assert life.training.is_finite()


@pytest.mark.parametrize("bound", [SMALLEST_SCALE, LARGEST_SCALE])
def test_scale_can_be_inverted_at_the_widest_bounds(bound: float) -> None:
    scaler = DynamicLossScaler(
        "cpu", init_scale=bound, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE
    )
    scaler.scale(torch.ones(()))
    training = Training(scaler)
    training.weight.grad = torch.full((3,), bound)
    scaler.step(training.optimizer)
    assert training.weight.tolist() == [1.0 - 2.0**-6] * 3


class Reference:
    """What a loss scaler does, in plain numbers."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        self.__dict__.update(chosen)
        self.scale, self.left = float32(chosen["init_scale"]), chosen["hysteresis"]
        self.good = self.at_floor = 0

    def update(self, *, bad: bool) -> None:
        low, high = float32(self.min_scale), float32(self.max_scale)
        self.at_floor = self.at_floor + 1 if bad and self.scale == low else 0
        self.good = 0 if bad else (self.good + 1) % self.growth_interval
        if bad:
            self.left = max(self.left - 1, 0)
            if not self.left:
                self.scale = max(float32(self.scale * self.backoff_factor), low)
        elif not self.good:
            self.scale = min(float32(self.scale * self.growth_factor), high)
        if not bad and (not self.good or self.hysteresis_mode == "consecutive"):
            self.left = self.hysteresis


def float32(number: float) -> float:
    return ctypes.c_float(number).value


@settings(deadline=None, derandomize=True)
@given(
    any_settings() | settings_of_twos(),
    st.binary(min_size=SHORT * SHORT_TRACES, max_size=SHORT * SHORT_TRACES),
    st.integers(1, 255),
)
def test_scaler_does_what_the_reference_does(
    chosen: dict[str, Any], traces: bytes, bad_below: int
) -> None:
    for start in range(0, len(traces), SHORT):
        training = Training(DynamicLossScaler("cpu", **quietly, **chosen))
        reference = Reference(chosen)
        for byte in traces[start : start + SHORT]:
            event = ("inf", "nan", "late")[byte % 3] if byte < bad_below else "good"
            training.step(event)
            reference.update(bad=event != "good")
            assert counted(training.scaler) == (
                reference.scale,
                reference.good,
                reference.left if reference.hysteresis > 1 else 1,
                reference.at_floor,
            )


def counted(scaler: DynamicLossScaler) -> tuple[float, int, int, int]:
    state = scaler.state_dict()
    names = ("scale", "_growth_tracker", "_hysteresis_tracker", "_overflows_at_floor")
    return tuple(state[name] for name in names)  # type: ignore[return-value]
