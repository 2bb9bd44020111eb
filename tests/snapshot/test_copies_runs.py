"""Runs cover the memory of every tensor once, and nothing of anyone else's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stayfinite.snapshot import copies
from stayfinite.snapshot.copies import MemoryRun, TensorCopies, runs_of, side_by_side

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12)


def numbered(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors of these forms whose elements are all different."""
    start, found = 1, []
    for tensor in tensors:
        found.append(torch.arange(start, start + tensor.numel()).to(tensor).view(tensor.shape))
        start += tensor.numel()
    return found


def filled(
    lengths: list[tuple[int, ...]], run: int
) -> tuple[list[Tensor], list[Tensor], list[MemoryRun]]:
    tensors = numbered([torch.empty(shape) for shape in lengths])
    memories = side_by_side(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "RUN", run)
        found = runs_of(enumerate(memories))
    for its in found:
        its.fill(tensors)
    return tensors, memories, found


@given(shapes, st.integers(1, 40))
def test_every_value_is_copied_and_seen_once(lengths: list[tuple[int, ...]], run: int) -> None:
    tensors, memories, found = filled(lengths, run)
    assert all(a.equal(b) for a, b in zip(tensors, memories, strict=True))
    seen = torch.cat([its.memory for its in found])
    count = sum(tensor.numel() for tensor in tensors)
    assert sorted(seen[seen != 0].tolist()) == list(range(1, count + 1))


@given(shapes, st.integers(1, 40))
def test_runs_are_short(lengths: list[tuple[int, ...]], run: int) -> None:
    _, _, found = filled(lengths, run)
    # Between two memories there are at most 15 zeros.
    assert all((its.memory != 0).sum() <= run for its in found)


def test_memory_from_elsewhere_is_a_run_of_its_own() -> None:
    tensors = numbered([torch.empty(3) for _ in range(4)])
    memories = [*side_by_side(tensors[:2]), *side_by_side(tensors[2:3]), torch.zeros(3)]
    found = runs_of(enumerate(memories))
    assert len(found) == 3
    for run in found:
        run.fill(tensors)
    assert all(a.equal(b) for a, b in zip(tensors, memories, strict=True))


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1 / 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_are_kept(dtype: torch.dtype) -> None:
    values = torch.tensor(SPECIAL * 3, dtype=dtype)
    copied = TensorCopies([values], checked=[0])
    assert len(copied.runs) == 1
    copied.fill()
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}.get(dtype, torch.int16)
    assert copied.memories[0][0].view(bits).equal(values.view(bits))


def test_what_cannot_be_added_up_is_not_in_runs() -> None:
    whole = torch.arange(6)
    tensors = [torch.ones(2), torch.ones(2, dtype=torch.float16), whole, torch.ones(2, 2).t()[:1]]
    tensors.append(torch.full((2,), math.inf))
    copied = TensorCopies(tensors, checked=[0, 1, 2, 3])
    assert copied.not_in_runs == [1, 2, 3]
    before = [tensor.clone() for tensor in tensors]
    copied.fill()
    for tensor in tensors:
        tensor.zero_()
    copied.put_back()
    assert all(a.equal(b) for a, b in zip(tensors, before, strict=True))
