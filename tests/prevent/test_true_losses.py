"""Sums and losses against mpmath, over all logits, boxes and vectors that a dtype has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mpmath
import pytest
import torch
from edges import DTYPES, tensors
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stayfinite.prevent.losses import (
    ciou,
    dfl_loss,
    dice,
    focal,
    giou,
    info_nce,
    kl,
    masked_mean,
    masked_softmax,
    stable_bce,
)
from stayfinite.prevent.ops import safe_norm

Number = Any  # an mpmath number
Numbers = list[Number]
DTYPE = st.sampled_from(DTYPES)
UNHURRIED = settings(deadline=None)


@pytest.fixture(scope="module", autouse=True)
def enough_digits() -> Iterator[None]:
    with mpmath.workdps(360):  # softmax of 1e308 loses as many
        yield


def true(values: Tensor) -> Numbers:
    return [mpmath.mpf(value) for value in values.flatten().tolist()]


def assert_near(
    got: Tensor, expected: Sequence[Number], *, size: Number = 1, ulps: int = 16
) -> None:
    """Within some units in the last place of the size of the largest term."""
    about = torch.finfo(got.dtype)
    for each, right in zip(true(got), expected, strict=True):
        right = min(max(right, about.min), about.max)
        allowed = ulps * about.eps * max(abs(right), size) + ulps * about.tiny
        assert abs(each - right) <= allowed, f"{each} should be {mpmath.nstr(right, 10)}"


def exp(x: Number) -> Number:
    """Of what is not 0 in any dtype: the power of a number like 1e308 takes long."""
    return mpmath.exp(x) if x > -2000 else mpmath.mpf(0)


def log_sum_exp(values: Numbers) -> Number:
    top = max(values)
    return top + mpmath.log(sum(exp(value - top) for value in values))


def softplus(x: Number) -> Number:
    return mpmath.log1p(exp(x)) if x < 0 else x + mpmath.log1p(exp(-x))


@UNHURRIED
@given(DTYPE, st.data())
def test_norm(dtype: torch.dtype, data: st.DataObject) -> None:
    x = data.draw(tensors(dtype, 5))
    assert_near(safe_norm(x)[None], [mpmath.norm(true(x))], size=0)


@UNHURRIED
@given(DTYPE, st.data())
def test_masked_softmax(dtype: torch.dtype, data: st.DataObject) -> None:
    x = data.draw(tensors(dtype, 4))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=4, max_size=4)))
    kept = [value for value, is_kept in zip(true(x), mask, strict=True) if is_kept]
    whole = log_sum_exp(kept) if kept else 0
    expected = [
        exp(value - whole) if is_kept else 0 for value, is_kept in zip(true(x), mask, strict=True)
    ]
    got = masked_softmax(x, mask)
    assert got[~mask].tolist() == [0.0] * len(got[~mask])
    assert_near(got, expected, ulps=4)


@UNHURRIED
@given(DTYPE, st.data())
def test_masked_mean(dtype: torch.dtype, data: st.DataObject) -> None:
    x = data.draw(tensors(dtype, 5))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=5, max_size=5)))
    kept = true(x[mask])
    expected = sum(kept) / len(kept) if kept else mpmath.mpf(0)
    assert_near(masked_mean(x, mask)[None], [expected], size=max(map(abs, kept), default=0))


@UNHURRIED
@given(DTYPE, st.data())
def test_bce(dtype: torch.dtype, data: st.DataObject) -> None:
    x, target = data.draw(tensors(dtype, 4)), torch.tensor([0.0, 1.0, 0.25, 0.5])
    expected = [
        t * softplus(-value) + (1 - t) * softplus(value)
        for value, t in zip(true(x), true(target), strict=True)
    ]
    got = stable_bce(x, target, reduction="none")
    for one, right, value in zip(got, expected, true(x), strict=True):
        assert_near(one[None], [right], size=min(abs(value), 1))
    assert_near(stable_bce(x, target)[None], [sum(expected) / 4])


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@UNHURRIED
@given(dtype=DTYPE, data=st.data())
def test_focal(gamma: float, dtype: torch.dtype, data: st.DataObject) -> None:
    x, target = data.draw(tensors(dtype, 3)), torch.tensor([0.0, 1.0, 0.25])

    def of_true(value: Number) -> Number:
        return softplus(-value) * exp(-gamma * softplus(value))

    expected = [
        t * of_true(value) * 0.25 + (1 - t) * of_true(-value) * 0.75
        for value, t in zip(true(x), true(target), strict=True)
    ]
    # exp(-gamma * 88) has an exponent that is rounded to 88 * eps.
    assert_near(focal(x, target, gamma=gamma, reduction="none"), expected, size=0, ulps=256)


@UNHURRIED
@given(DTYPE, st.data())
def test_dice(dtype: torch.dtype, data: st.DataObject) -> None:
    x, target = data.draw(tensors(dtype, 1, 4)), torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    p = [exp(-softplus(-value)) for value in true(x)]
    overlap = sum(a * b for a, b in zip(p, true(target), strict=True))
    expected = 1 - (2 * overlap + 1) / (sum(p) + 2 + 1)
    assert_near(dice(x, target)[None], [expected])


@UNHURRIED
@given(DTYPE, st.data(), st.floats(0, 3, width=16))
def test_dfl(dtype: torch.dtype, data: st.DataObject, place: float) -> None:
    x, target = data.draw(tensors(dtype, 4)), torch.tensor([place], dtype=dtype)
    left = min(int(target), 2)
    logits, weight = true(x), true(target)[0] - left
    expected = log_sum_exp(logits) - (1 - weight) * logits[left] - weight * logits[left + 1]
    got = dfl_loss(x[None], target)
    limit = torch.finfo(got.dtype).max
    furthest = max(log_sum_exp(logits) - logits[left], log_sum_exp(logits) - logits[left + 1])
    assume(furthest <= limit)  # beyond it one of the two terms is the largest number
    assert_near(got[None], [expected], size=max(map(abs, logits)))


@UNHURRIED
@given(DTYPE, st.data())
def test_kl(dtype: torch.dtype, data: st.DataObject) -> None:
    p, q = data.draw(tensors(dtype, 4)), data.draw(tensors(dtype, 4))
    size = max(map(abs, [*true(p), *true(q)]))
    assume(size < torch.finfo(torch.float32).max / 16)
    log_p = [value - log_sum_exp(true(p)) for value in true(p)]
    log_q = [value - log_sum_exp(true(q)) for value in true(q)]
    expected = sum(exp(a) * (a - b) for a, b in zip(log_p, log_q, strict=True))
    assert_near(kl(p[None], q[None])[None], [expected], size=max(size, 1))


@UNHURRIED
@given(DTYPE, st.data())
def test_info_nce(dtype: torch.dtype, data: st.DataObject) -> None:
    queries, keys = data.draw(tensors(dtype, 3, 4)), data.draw(tensors(dtype, 3, 4))
    units = [[unit(row) for row in each] for each in (queries, keys)]
    loss = 0
    for number, query in enumerate(units[0]):
        angles = [sum(a * b for a, b in zip(query, key, strict=True)) * 10 for key in units[1]]
        loss += (log_sum_exp(angles) - angles[number]) / 3
    assert_near(info_nce(queries, keys, temperature=0.1)[None], [loss], size=10, ulps=32)


def unit(row: Tensor) -> Numbers:
    values = true(row)
    length = mpmath.norm(values)
    return [value / length if length else mpmath.mpf(0) for value in values]


@UNHURRIED
@given(DTYPE, st.data())
def test_boxes(dtype: torch.dtype, data: st.DataObject) -> None:
    a, b = data.draw(tensors(dtype, 4)), data.draw(tensors(dtype, 4))
    # Half of a subnormal number is rounded; that may be much of a box that is as small.
    tiny = torch.finfo(torch.float32).tiny if dtype != torch.float64 else torch.finfo(dtype).tiny
    assume(all(side == 0 or side > tiny for side in sides(true(a)) + sides(true(b))))
    assert_true_losses(a, b)


@pytest.mark.parametrize("shape", [(1e-7, 0.0), (3e-20, 4e-20), (0.0, 0.0)])
def test_a_tiny_box_keeps_its_shape_beside_a_distant_one(shape: tuple[float, float]) -> None:
    width, height = shape
    assert_true_losses(torch.tensor([0.0, 0.0, width, height]), torch.tensor([9.0, 3e38, 10, 3e38]))


def assert_true_losses(a: Tensor, b: Tensor) -> None:
    got = torch.stack([giou(a[None], b[None]), ciou(a[None], b[None])])
    assert_near(got, boxes_apart(true(a), true(b)), size=4, ulps=32)


def sides(box: Numbers) -> Numbers:
    return [abs(box[2] - box[0]), abs(box[3] - box[1])]


def boxes_apart(a: Numbers, b: Numbers) -> Numbers:
    """GIoU and CIoU losses by their definitions; a side that is 0 for all is left out."""
    lows, highs = (
        [[pick(box[axis], box[axis + 2]) for axis in (0, 1)] for box in (a, b)]
        for pick in (min, max)
    )
    shared = [max(0, min(highs[0][i], highs[1][i]) - max(lows[0][i], lows[1][i])) for i in (0, 1)]
    around = [max(highs[0][i], highs[1][i]) - min(lows[0][i], lows[1][i]) for i in (0, 1)]
    area_a, area_b, area_shared, area_around = (
        area([length if whole else 1 for length, whole in zip(lengths, around, strict=True)])
        for lengths in (sides(a), sides(b), shared, around)
    )
    union = area_a + area_b - area_shared
    iou = area_shared / union if union else mpmath.mpf(0)
    apart = sum(((highs[0][i] + lows[0][i]) - (highs[1][i] + lows[1][i])) ** 2 / 4 for i in (0, 1))
    diagonal = sum(side**2 for side in around)
    angle_a, angle_b = (mpmath.atan2(*sides(box)) for box in (a, b))
    aspect = (2 / mpmath.pi * (angle_a - angle_b)) ** 2
    alpha = aspect / (1 - iou + aspect) if 1 - iou + aspect else 0
    distance = apart / diagonal if diagonal else 0
    return [2 - iou - union / area_around, 1 - iou + distance + alpha * aspect]


def area(lengths: Numbers) -> Number:
    return lengths[0] * lengths[1]
