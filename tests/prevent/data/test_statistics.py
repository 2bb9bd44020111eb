"""Streaming statistics give what all rows at once would give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stayfinite.prevent.data.batch import Leaf
from stayfinite.prevent.data.statistics import Extremes, RowSample, RunningMoments, TensorStatistics


def blocks_of(rows: Tensor, sizes: list[int]) -> list[Tensor]:
    """The rows in blocks whose sizes repeat."""
    blocks, start = [], 0
    while start < len(rows):
        size = sizes[len(blocks) % len(sizes)]
        blocks.append(rows[start : start + size])
        start += size
    return blocks


def normal(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def moments_of(rows: Tensor, sizes: list[int], *, is_whole: bool) -> RunningMoments:
    moments = RunningMoments(rows.shape[1])
    for block in blocks_of(rows, sizes):
        moments.add(block, is_whole=is_whole)
    return moments


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e9])
@pytest.mark.parametrize("is_whole", [True, False])
def test_mean_and_std_survive_a_large_offset(offset: float, is_whole: bool) -> None:
    rows = normal(5000, 3, seed=0) + offset
    moments = moments_of(rows, [1, 7, 640], is_whole=is_whole)
    exact = rows.numpy().astype(np.longdouble)
    np.testing.assert_allclose(moments.mean.numpy(), exact.mean(0).astype(float), rtol=1e-14)
    np.testing.assert_allclose(moments.std.numpy(), exact.std(0).astype(float), rtol=1e-8)


def test_a_sum_of_squares_would_not_have_survived_it() -> None:
    rows = normal(5000, 1, seed=0) + 1e9
    naive = (rows.square().mean() - rows.mean().square()).item()
    assert abs(naive - rows.var(correction=0).item()) > 0.1
    std = moments_of(rows, [64], is_whole=True).std.item()
    assert std == pytest.approx(rows.std(correction=0).item(), rel=1e-6)


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 80),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    missing=st.floats(0, 1),
)
def test_missing_values_are_left_out(
    seed: int, rows: int, sizes: list[int], missing: float
) -> None:
    table = normal(rows, 4, seed)
    generator = torch.Generator().manual_seed(seed)
    table[torch.rand(table.shape, generator=generator) < missing] = torch.nan
    moments = moments_of(table, sizes, is_whole=False)
    for column in range(4):
        known = table[:, column][~table[:, column].isnan()]
        assert moments.count[column] == len(known)
        if len(known):
            assert moments.mean[column].item() == pytest.approx(known.mean().item(), abs=1e-12)
            std = known.std(correction=0).item()
            assert moments.std[column].item() == pytest.approx(std, abs=1e-12)


def test_pooled_moments_are_those_of_all_values() -> None:
    rows = normal(300, 5, seed=1) * torch.tensor([1.0, 10, 100, 0.1, 3]) + 7
    pooled = moments_of(rows, [32], is_whole=True).pooled()
    assert pooled.count.item() == 1500
    assert pooled.mean.item() == pytest.approx(rows.mean().item())
    assert pooled.std.item() == pytest.approx(rows.std(correction=0).item())


def test_ranges_of_columns_ignore_what_is_not_finite() -> None:
    nan, inf = torch.nan, torch.inf
    blocks = [[[1.0, nan, nan], [2.0, nan, 5.0]], [[-1.0, inf, 3.0], [0.0, -inf, nan]]]
    leaves = [Leaf("batch.0", torch.tensor(block)) for block in blocks]
    tensor = TensorStatistics(leaves[0])
    for leaf in leaves:
        tensor.add(leaf, torch.arange(2))
    assert tensor.channels is not None
    assert [ends.tolist() for ends in tensor.channels] == [[-1, inf, 3], [2, -inf, 5]]


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 200),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    kinds=st.sampled_from(["normal", "whole", "missing", "same"]),
)
def test_extremes_are_those_of_a_sort(seed: int, rows: int, sizes: list[int], kinds: str) -> None:
    table = normal(rows, 3, seed)
    if kinds == "whole":
        table = (table * 2).round()
    if kinds == "same":
        table[:, 1] = 5
    if kinds == "missing":
        table[table > 1] = torch.nan
    extremes, places = Extremes(3, size=4), torch.arange(rows)
    for block, where in zip(blocks_of(table, sizes), blocks_of(places, sizes), strict=True):
        extremes.add(block, where, is_whole=kinds != "missing")
    for column in range(3):
        known = table[:, column][~table[:, column].isnan()]
        for sign, half in ((1, slice(4)), (-1, slice(4, 8))):
            expected = (known * sign).sort(descending=True).values[:4] * sign
            kept = extremes.values[half, column]
            assert kept[~kept.isnan()].tolist() == expected.tolist()
            for value, place in zip(kept, extremes.places[half, column], strict=True):
                assert value.isnan() or table[place, column] == value


def test_a_sample_is_the_same_each_time_and_asks_no_one_for_random_numbers() -> None:
    rows = torch.arange(5000.0, dtype=torch.float64).unsqueeze(1)
    state = torch.get_rng_state()
    first, second = RowSample(1, size=64), RowSample(1, size=64)
    for block in blocks_of(rows, [100, 33]):
        first.add(block)
        second.add(block)
    assert torch.equal(first.rows, second.rows)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sample_has_all_rows_while_they_are_few() -> None:
    rows = torch.arange(50.0, dtype=torch.float64).unsqueeze(1)
    sample = RowSample(1, size=64)
    for block in blocks_of(rows, [7]):
        sample.add(block)
    assert sorted(sample.rows.flatten().tolist()) == list(range(50))


def test_a_sample_is_uniform_over_the_stream() -> None:
    rows = torch.arange(100_000.0, dtype=torch.float64).unsqueeze(1)
    sample = RowSample(1, size=512)
    for block in blocks_of(rows, [1000, 1, 37]):
        sample.add(block)
    kept = sample.rows.flatten()
    assert len(kept.unique()) == 512
    tenths = (kept / 10_000).long().bincount(minlength=10)
    # 51 are expected in each tenth, with a standard deviation of 6.8.
    assert tenths.min() > 51 - 4 * 6.8
    assert tenths.max() < 51 + 4 * 6.8
