"""A summary counts every element once and agrees with NumPy."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensor_kinds import DENSE, FP8, WIDE, kinds_for, make
from torch._subclasses.fake_tensor import FakeTensorMode

from stayfinite.detect.memory import PIECE, pieces
from stayfinite.detect.summary import summarize
from stayfinite.records import NaNType

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
numbers = st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan]), max_size=30)


@relaxed
@given(st.lists(st.floats() | st.sampled_from([0.0, -0.0, 1.7e308, 5e-324]), max_size=30))
def test_histogram_agrees_with_numpy(drawn: list[float]) -> None:
    array = np.array(drawn, dtype=np.float64)
    finite = array[np.isfinite(array)]
    histogram = summarize("x", torch.from_numpy(array)).histogram
    assert sum(count for _, count in histogram) == finite.size
    so_far = 0
    for limit, count in histogram:
        so_far += count
        assert count > 0
        assert (finite < limit).sum() <= so_far <= (finite <= limit).sum()
        assert limit in (0.0, sys.float_info.max) or abs(math.frexp(limit)[0]) == 0.5
    assert len(histogram) == len(
        {(math.copysign(1, v), math.frexp(v)[1]) if v else 0 for v in finite}
    )


@relaxed
@given(numbers)
def test_counts_and_statistics_agree_with_numpy(drawn: list[float]) -> None:
    array = np.array(drawn, dtype=np.float64)
    finite = array[np.isfinite(array)]
    summary = summarize("x", torch.from_numpy(array))
    assert summary.numel == array.size
    assert summary.nan_count == np.isnan(array).sum()
    assert summary.pos_inf_count == (array == math.inf).sum()
    assert summary.neg_inf_count == (array == -math.inf).sum()
    assert summary.zero_count == (array == 0).sum()
    assert summary.negative_count == (array < 0).sum()
    bad = np.flatnonzero(~np.isfinite(array))
    assert summary.first_bad_index == ((bad[0],) if bad.size else None)
    if not finite.size:
        assert (summary.min, summary.max, summary.mean, summary.std) == (None,) * 4
        return
    assert (summary.min, summary.max) == (finite.min(), finite.max())
    assert summary.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9 * np.abs(finite).max())
    assert summary.std == pytest.approx(finite.std(), rel=1e-6, abs=1e-9 * np.abs(finite).max())


@relaxed
@given(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 40), st.permutations(range(4)))
def test_pieces_cover_every_element_once_and_in_order(
    shape: list[int], limit: int, order: list[int]
) -> None:
    order = [dim for dim in order if dim < len(shape)]
    tensor = torch.arange(math.prod(shape)).reshape(shape).permute(order)
    seen: list[int] = []
    for start, piece in pieces(tensor, limit):
        assert piece.numel() <= limit
        assert len(start) == tensor.dim()
        assert tensor[start] == piece.flatten()[0]
        seen += piece.flatten().tolist()
    assert seen == tensor.flatten().tolist()


@pytest.mark.parametrize("shape", [(3 * PIECE + 1,), (5, PIECE - 1), (2, 2, PIECE + 3), (1, 7)])
def test_the_first_bad_index_is_the_first_in_reading_order(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    for where in (0, size // 2, size - 1):
        x = torch.zeros(shape)
        x.view(-1)[where:] = math.inf
        expected = tuple(int(i) for i in np.unravel_index(where, shape))
        assert summarize("x", x).first_bad_index == expected
        turned = summarize("x", x.T if x.dim() == 2 else x).first_bad_index
        assert turned is not None
        assert (x.T if x.dim() == 2 else x)[turned] == math.inf


def test_statistics_over_many_pieces_are_those_of_the_whole() -> None:
    x = torch.randn(4 * PIECE + 17, dtype=torch.float64) * 3 + torch.linspace(0, 9, 4 * PIECE + 17)
    summary = summarize("x", x)
    assert summary.mean == pytest.approx(x.mean().item(), rel=1e-12)
    assert summary.std == pytest.approx(x.std(correction=0).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(d, k) for d in (*WIDE, *FP8) for k in kinds_for(d)], ids=str
)
def test_every_kind_of_tensor_can_be_summarized(dtype: torch.dtype, kind: str) -> None:
    x = torch.ones(6, 4)
    x[1, 2] = math.nan
    tensor = make(kind, x.to(dtype))
    summary = summarize("x", tensor)
    assert summary.nan_type is NaNType.NAN
    assert summary.nan_count >= 1
    if kind in DENSE or kind in ("coo", "coo with dense dims", "complex", "mkldnn"):
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        assert summary.first_bad_index is not None
        assert dense[summary.first_bad_index].to(torch.complex64).isnan()


def test_sparse_indices_are_those_of_the_whole_tensor() -> None:
    index = torch.tensor([[5, 7], [2, 0]])
    values = torch.tensor([[1.0, 2.0], [3.0, math.nan]])
    tensor = torch.sparse_coo_tensor(index, values, (9, 9, 2))
    assert summarize("x", tensor).first_bad_index == (7, 0, 1)


def test_the_largest_doubles_have_finite_statistics() -> None:
    x = torch.tensor([1.7e308, -1.7e308, 1.7e308, -1.7e308], dtype=torch.float64)
    summary = summarize("x", x)
    assert summary.mean == 0
    assert summary.std == pytest.approx(1.7e308)


def test_a_complex_element_counts_once_as_the_worst_of_its_parts() -> None:
    x = torch.tensor([complex(math.nan, math.inf), complex(-math.inf, math.inf), complex(0, 0)])
    summary = summarize("x", x)
    assert (summary.nan_count, summary.pos_inf_count, summary.neg_inf_count) == (1, 1, 0)
    assert (summary.numel, summary.zero_count) == (3, 1)


def test_integers_and_booleans_are_described_too() -> None:
    labels = summarize("labels", torch.tensor([-100, 3, 0]))
    assert (labels.min, labels.max, labels.zero_count, labels.negative_count) == (-100, 3, 1, 1)
    assert labels.dtype == "int64"
    assert summarize("mask", torch.tensor([True, False])).mean == 0.5
    assert summarize("ids", torch.tensor([3], dtype=torch.uint16)).max == 3


def test_what_cannot_be_read_has_an_empty_summary() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    fp4 = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for tensor in (fake, fp4, torch.nn.LazyLinear(2).weight, torch.ones(3, device="meta")):
        summary = summarize("x", tensor)
        assert (summary.numel, summary.min, summary.bad_count) == (0, None, 0)


def test_a_scalar_has_an_empty_index() -> None:
    assert summarize("loss", torch.tensor(math.nan)).first_bad_index == ()
