"""Each mode does what its paper says: checked against NumPy in float64, written from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stayfinite.prevent.clipping import (
    AdaptiveClipper,
    Percentile,
    PerTensor,
    PerUnit,
    Robust,
    ZScore,
)

Floats = NDArray[np.float64]
CLOSE = 1e-6
STEPS = 300


def noisy_norms(seed: int) -> Floats:
    """Norms as training has them: noise on a slow trend, and a spike now and then."""
    random = np.random.default_rng(seed)
    trend = np.linspace(0, random.normal(), STEPS) + random.normal()
    norms = np.exp(trend + 0.2 * random.normal(size=STEPS))
    spikes = random.choice(np.arange(60, STEPS), 8, replace=False)
    norms[spikes] *= random.uniform(3, 1000, size=8)
    return norms


def robust(norms: Floats, *, window: int, deviations: float, least: float, most: float) -> Floats:
    """Median times exp(deviations * sigma), with sigma from the median absolute deviation."""
    allowed = np.full(len(norms), np.inf)
    for step in range(1, len(norms)):
        logs = np.log(norms[max(0, step - window) : step])
        middle = np.median(logs)
        sigma = 1.4826 * np.median(np.abs(logs - middle))
        factor = most if step < 16 else np.clip(np.exp(deviations * sigma), least, most)
        allowed[step] = np.exp(middle) * factor
    return allowed


def autoclip(norms: Floats, *, percentile: float) -> Floats:
    """Seetharaman et al.: the percentile of the history, the present norm included."""
    return np.array([np.percentile(norms[: step + 1], percentile) for step in range(len(norms))])


def zclip(norms: Floats, *, alpha: float, threshold: float, warmup: int) -> Floats:
    """Kumar et al., reciprocal clipping; what is clipped enters the averages as clipped."""
    allowed = np.full(len(norms), np.inf)
    mean, variance = norms[:warmup].mean(), norms[:warmup].var()
    for step in range(warmup, len(norms)):
        norm = norms[step]
        z = (norm - mean) / (np.sqrt(variance) + 1e-6)
        if z > threshold:
            norm = allowed[step] = mean + threshold**2 / z * np.sqrt(variance)
        mean = alpha * mean + (1 - alpha) * norm
        variance = alpha * variance + (1 - alpha) * (norm - mean) ** 2
    return allowed


def agc(gradient: Floats, weight: Floats, *, ratio: float, eps: float) -> Floats:
    """Brock et al.: unit by unit, against the norm of the unit's weights."""
    axes = tuple(range(1, gradient.ndim)) if gradient.ndim > 1 else None
    norms = np.sqrt((gradient**2).sum(axis=axes, keepdims=True))
    limits = ratio * np.maximum(np.sqrt((weight**2).sum(axis=axes, keepdims=True)), eps)
    return np.where(norms > limits, gradient * limits / np.maximum(norms, 1e-300), gradient)


def adagc(norms: Floats, *, absolute: float, relative: float, beta: float, warmup: int) -> Floats:
    """Wang et al.; rows are steps, columns are tensors. The norms that are left."""
    left, averages = np.empty_like(norms), np.full(norms.shape[1], np.inf)
    for step, now in enumerate(norms):
        if step < warmup:
            left[step] = now * min(absolute / np.sqrt((now**2).sum()), 1.0)
            averages = np.minimum(averages, left[step])
        else:
            left[step] = now * np.minimum(relative * averages / now, 1.0)
            averages = beta * averages + (1 - beta) * left[step]
    return left


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]


def with_norm(shape: torch.Size, norm: float) -> Tensor:
    direction = torch.randn(shape, dtype=torch.float64)
    return direction * (norm / direction.norm())


def norm_of(params: list[nn.Parameter]) -> float:
    gradients = [param.grad.flatten() for param in params if param.grad is not None]
    return float(torch.cat(gradients).norm())


def clipped_norms(
    clipper_of: Callable[[list[nn.Parameter]], AdaptiveClipper], norms: Floats
) -> Iterator[tuple[float, float]]:
    """The norm that each step had before and after, in a model of several tensors."""
    params = parameters((4, 3), (5,), ())
    clipper = clipper_of(params)
    for norm in norms:
        whole = with_norm(torch.Size([18]), float(norm))
        for param, part in zip(params, whole.split([12, 5, 1]), strict=True):
            param.grad = part.reshape(param.shape).clone()
        before = [param.grad.clone() for param in params if param.grad is not None]
        result = clipper.clip()
        after = norm_of(params)
        assert result.norm == pytest.approx(norm, rel=CLOSE)
        assert result.was_clipped == (after < norm * (1 - 1e-12))
        for param, gradient in zip(params, before, strict=True):
            assert param.grad is not None
            assert torch.allclose(param.grad, gradient * (after / norm), rtol=CLOSE)
        yield float(norm), after


def check(rule: Robust | Percentile | ZScore, norms: Floats, allowed: Floats) -> None:
    pairs = list(clipped_norms(lambda params: AdaptiveClipper(params, rule), norms))
    assert [after for _, after in pairs] == pytest.approx(np.minimum(norms, allowed), rel=CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_robust_is_median_and_median_deviation_of_the_logarithms(seed: int) -> None:
    torch.manual_seed(seed)
    norms = noisy_norms(seed)
    options = {"window": 50, "deviations": 3.0, "least": 1.5, "most": 4.0}
    allowed = robust(norms, **options)  # type: ignore[arg-type]
    assert (norms > allowed).sum() >= 8
    check(Robust(**options), norms, allowed)  # type: ignore[arg-type]
    allowed = robust(norms, window=128, deviations=6, least=3, most=5)
    check(Robust(), norms, allowed)


@pytest.mark.parametrize("percentile", [0.0, 10.0, 47.3, 90.0])
def test_percentile_is_autoclip(percentile: float) -> None:
    torch.manual_seed(0)
    norms = noisy_norms(0)
    check(Percentile(percentile=percentile), norms, autoclip(norms, percentile=percentile))


@pytest.mark.parametrize("seed", range(3))
def test_zscore_is_zclip(seed: int) -> None:
    torch.manual_seed(seed)
    norms = noisy_norms(seed)
    allowed = zclip(norms, alpha=0.97, threshold=2.5, warmup=25)
    assert (norms > allowed).sum() >= 8
    check(ZScore(), norms, allowed)


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (4, 3, 2), (6, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_per_unit_is_agc(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(len(shape))
    weight = nn.Parameter(torch.randn(shape, dtype=dtype))
    with torch.no_grad():
        torch.atleast_1d(weight)[:1] = 0  # at first many weights are; eps is for them
    for scale in (1e-6, 1e-3, 1.0, 1e6):
        weight.grad = torch.randn(shape, dtype=dtype) * scale
        expected = agc(
            weight.grad.double().numpy(), weight.detach().double().numpy(), ratio=0.02, eps=1e-3
        )
        AdaptiveClipper(weight, PerUnit(ratio=0.02)).clip()
        assert weight.grad.double().numpy() == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("size", [0.1, 10.0])
def test_per_tensor_is_adagc(size: float) -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    params = parameters((4, 3), (5,), (2, 2, 2))
    norms = size * np.exp(0.3 * random.normal(size=(STEPS, 3)) + np.array([0, 1, -3]))
    norms[random.integers(110, STEPS, 6), random.integers(0, 3, 6)] *= 100
    expected = adagc(norms, absolute=1.0, relative=1.05, beta=0.98, warmup=100)
    clipper = AdaptiveClipper(params, PerTensor())
    for now, left in zip(norms, expected, strict=True):
        for param, norm in zip(params, now, strict=True):
            param.grad = with_norm(param.shape, norm)
        result = clipper.clip()
        after = [norm_of([param]) for param in params]
        assert after == pytest.approx(left, rel=CLOSE)
        assert result.norm == pytest.approx(math.hypot(*now), rel=CLOSE)
        lower = [str(number) for number, (a, b) in enumerate(zip(left, now, strict=True)) if a < b]
        assert result.clipped == tuple(lower)
