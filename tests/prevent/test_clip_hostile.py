"""Whatever came before, a spike is clipped to what is usual.

Promise: 100,000 hostile sequences, as many for each mode that learns (the profile "prove"); here
some of them, always the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from stayfinite.prevent.clipping import (
    AdaptiveClipper,
    Percentile,
    PerTensor,
    PerUnit,
    Robust,
    ZScore,
)

IS_PROOF = settings.default.max_examples >= 5_000
SEQUENCES = 20_000 if IS_PROOF else 60
LEARNING = (Robust(), Percentile(), Percentile(percentile=99.0), ZScore(), PerTensor())
NAN, INF = math.nan, math.inf
EDGES = (NAN, INF, -INF, 0.0, 1e38, 3e38, 1e-38, 1e-45, 1e30, 1e-30)

Random = np.random.Generator
Floats = NDArray[np.float64]


def usual(random: Random, size: int) -> Floats:
    level = 10.0 ** random.integers(-12, 12)
    norms: Floats = level * np.exp(random.uniform(0, 1) * random.normal(size=size))
    return norms


def constant(random: Random, size: int) -> Floats:
    return np.full(size, 10.0 ** random.integers(-30, 30))


def nothing_but_edges(random: Random, size: int) -> Floats:
    return random.choice(EDGES, size)


def with_edges(random: Random, size: int) -> Floats:
    return np.where(random.random(size) < 0.4, random.choice(EDGES, size), usual(random, size))


def with_spikes(random: Random, size: int) -> Floats:
    factors: Floats = 10.0 ** random.integers(2, 30, size)
    return np.minimum(usual(random, size) * np.where(random.random(size) < 0.3, factors, 1), 3e38)


def begins_badly(random: Random, size: int) -> Floats:
    return np.concatenate([random.choice(EDGES, 1 + size // 4), usual(random, size)])


def far_up_or_down(random: Random, size: int) -> Floats:
    return np.concatenate([usual(random, size), usual(random, size)])


def to_and_fro(random: Random, size: int) -> Floats:
    return np.tile(usual(random, 2), size)


MOTIFS: tuple[Callable[[Random, int], Floats], ...] = (
    constant,
    nothing_but_edges,
    with_edges,
    with_spikes,
    begins_badly,
    far_up_or_down,
    to_and_fro,
)


def sequence(random: Random) -> Floats:
    size = int(random.choice([2, 10, 40], p=[0.4, 0.4, 0.2]))
    motifs = random.choice(len(MOTIFS), random.integers(1, 3))
    return np.concatenate([MOTIFS[motif](random, size) for motif in motifs])


class ClippedParameter:
    """A parameter under a clipper, and the norms that count: finite ones, of sound gradients.

    In float64, since a spike above the largest norms of float32 must be possible.
    """

    def __init__(self, rule: Robust | Percentile | ZScore | PerTensor) -> None:
        self.param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.clipper = AdaptiveClipper(self.param, rule)
        self.window = rule.window
        self.good: list[float] = []

    def step(self, norm: float, *, poison: float = 0.0) -> None:
        gradient = [0.6 * norm + poison, 0.8 * norm]
        self.param.grad = torch.tensor(gradient, dtype=torch.float64)
        result = self.clipper.clip()
        assert math.isfinite(self.left())
        if math.isfinite(norm + poison) and norm > 0:
            self.good.append(result.norm)

    def left(self) -> float:
        assert self.param.grad is not None
        return math.hypot(*self.param.grad.tolist())

    def check(self) -> None:
        if not self.good:
            assert self.clipper.threshold == INF
            return
        thresholds = list(self.clipper.thresholds.values()) or [self.clipper.threshold]
        assert all(0 < threshold < INF for threshold in thresholds)
        median = float(np.median(self.good[-self.window :]))
        self.step(1000 * median)
        assert 0 < self.left() <= 5 * median * (1 + 1e-9)


@pytest.mark.parametrize("rule", LEARNING, ids=lambda rule: rule.mode)
def test_spike_after_a_hostile_sequence_is_clipped_to_the_usual(rule: Robust) -> None:
    random = np.random.default_rng(7)
    for _ in range(SEQUENCES):
        clipped = ClippedParameter(rule)
        norms = sequence(random)
        poisons = np.where(random.random(len(norms)) < 0.1, NAN, 0.0)
        for norm, poison in zip(norms.tolist(), poisons.tolist(), strict=True):
            clipped.step(norm, poison=poison)
        clipped.check()


@given(st.lists(st.floats(width=32), max_size=40), st.sampled_from(LEARNING))
def test_any_floats_leave_a_limit(norms: list[float], rule: Robust) -> None:
    clipped = ClippedParameter(rule)
    for norm in norms:
        clipped.step(abs(norm))
    clipped.check()


@pytest.mark.parametrize("rule", LEARNING, ids=lambda rule: rule.mode)
def test_training_that_becomes_much_larger_for_good_is_not_held_down(rule: Robust) -> None:
    """The published z-score clipper, for one, holds it down for ever."""
    clipped = ClippedParameter(rule)
    for norm in [1e-6] * 300 + [1e-3] * 400:
        clipped.step(norm)
    assert clipped.left() >= 1e-3 / 5


@pytest.mark.parametrize("rule", LEARNING, ids=lambda rule: rule.mode)
def test_training_that_becomes_much_smaller_for_good_is_followed(rule: Robust) -> None:
    clipped = ClippedParameter(rule)
    for norm in [1.0] * 300 + [1e-6] * 400:
        clipped.step(norm)
    clipped.check()


@pytest.mark.parametrize("value", EDGES)
def test_units_are_bounded_by_their_weights_whatever_comes(value: float) -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0], [NAN, 1.0], [INF, 1e30]]))
    weight.grad = torch.tensor([[value, 1e30], [1e38, 3e38], [1.0, value], [value, value]])
    AdaptiveClipper(weight, PerUnit()).clip()
    assert bool(weight.grad.isfinite().all())
    norms = weight.grad.double().norm(dim=1)
    limits = torch.tensor([0.05, 1e-5, 1e-5, 1e-5], dtype=torch.float64)
    assert bool((norms <= limits * (1 + 1e-6)).all())
    assert float(norms[1]) == pytest.approx(1e-5, rel=1e-6)
