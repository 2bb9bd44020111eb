"""Recent batches can be run again after going back, and take no more memory than agreed."""

from __future__ import annotations

import doctest
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moments import in_bytes, optimizer_bytes, random_bytes, seed_everything
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from stayfinite.snapshot import RecentBatches, SnapshotRing, TrainingState, batches


class Noisy(torch.utils.data.Dataset[Tensor]):
    """Samples that draw from the global generators when they are read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(3) + float(np.random.rand()) + index


class Job:
    """Trains with dropout on a noisy loader; what goes wrong is put right by going back."""

    def __init__(self, *, accumulate: int = 1, slots: int = 2) -> None:
        seed_everything(5)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.ring = SnapshotRing(TrainingState(self.model, self.optimizer), slots=slots)
        self.recent = RecentBatches()
        self.accumulate, self.step, self.parts = accumulate, 0, 0

    def run(self, *, faults: dict[int, int]) -> Any:
        """`faults` says how many snapshots to go back after which steps."""
        for batch in DataLoader(Noisy(), batch_size=2, shuffle=True):
            if self.parts == 0 and self.step % 3 == 0:
                self.ring.take(step=self.step)
                oldest = self.ring.back(len(self.ring) - 1)
                assert oldest is not None
                self.recent.forget(before=oldest.step)
            self.train(batch)
            if self.parts == 0 and self.step in faults:
                self.go_back(faults.pop(self.step))
        return [in_bytes(list(self.model.parameters())), optimizer_bytes(self.optimizer)]

    def train(self, batch: Tensor) -> None:
        self.recent.keep(batch, step=self.step)
        self.model(batch).square().mean().backward()
        self.parts = (self.parts + 1) % self.accumulate
        if self.parts == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def go_back(self, k: int) -> None:
        self.model[0].weight.data.fill_(7.0)
        torch.randn(4)
        self.step = self.ring.restore(k, rewind_loader=False).step
        kept = self.recent.take_back(self.step)
        assert kept is not None
        for batch in kept:
            batch.restore_random()
            self.train(batch.value())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("faults", [{2: 0}, {3: 0}, {5: 1}, {2: 0, 4: 1, 5: 0}])
def test_going_back_and_running_them_again_is_as_if_nothing_had_happened(
    faults: dict[int, int], accumulate: int
) -> None:
    calm = Job(accumulate=accumulate)
    expected, random_after = calm.run(faults={}), random_bytes()
    hurt = Job(accumulate=accumulate)
    assert hurt.run(faults=dict(faults)) == expected
    assert random_bytes() == random_after
    assert hurt.step == calm.step


def test_batches_of_a_step_that_was_left_out_are_not_run_again() -> None:
    recent = RecentBatches()
    for step, value in ((0, 1.0), (1, 2.0), (1, 3.0)):
        recent.keep(torch.tensor([value]), step=step)
    recent.take_back(1)
    recent.keep(torch.tensor([4.0]), step=1)
    found = recent.since(0)
    assert found is not None
    assert [float(kept.value()) for kept in found] == [1.0, 4.0]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    x: Tensor
    more: dict[str, Any] = field(default_factory=dict)


def ones() -> Tensor:
    return torch.ones(2, 3)


BATCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int]] = {
    "tensor": (ones, lambda b: None, 24),
    "dict": (lambda: {"x": ones(), "n": 3}, lambda b: b.pop("x"), 24),
    "nested": (lambda: {"a": [ones(), (ones(), "s")]}, lambda b: b["a"].clear(), 48),
    "list": (lambda: [ones(), ones()], lambda b: b.pop(), 48),
    "named tuple": (lambda: Pair(ones(), ones()), lambda b: None, 48),
    "frozen": (lambda: Sample(ones(), {"y": [1]}), lambda b: b.more["y"].append(2), 24),
    "like a dict": (lambda: UserDict(x=ones(), y=[1]), lambda b: (b.pop("x"), b["y"].pop()), 24),
    "array": (lambda: [np.ones(3)], lambda b: b[0].fill(5), 24),
    "packed": (lambda: pack_sequence([ones()[0], ones()[0, :2]]), lambda b: None, 44),
    "inference": (torch.inference_mode()(ones), lambda b: torch.inference_mode()(b.fill_)(3), 24),
    "text": (lambda: ["a", None, 1.5], lambda b: b.clear(), 0),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batch_of_any_kind_comes_as_it_was_however_often(kind: str) -> None:
    make, use, nbytes = BATCHES[kind]
    recent, batch = RecentBatches(), make()
    recent.keep(batch, step=0)
    assert recent.nbytes == nbytes
    use(batch)
    for _ in range(2):
        found = recent.since(0)
        assert found is not None
        again = found[0].value()
        assert type(again) is type(make())
        assert repr(again) == repr(make())
        use(again)


def test_step_that_writes_into_its_batch_is_noticed_and_later_batches_are_copied() -> None:
    recent = RecentBatches()
    made = [ones() for _ in range(3)]
    for step, batch in enumerate(made):
        recent.keep({"x": batch}, step=step)
        batch.mul_(2)
    assert recent.since(0) is None  # the first was written into before anyone knew
    found = recent.since(1)
    assert found is not None
    assert [kept.value()["x"].equal(ones()) for kept in found] == [True, True]


def test_random_states_come_back_with_a_batch() -> None:
    seed_everything(2)
    recent = RecentBatches()
    recent.keep(None, step=0)
    before = random_bytes()
    torch.rand(1)
    np.random.rand()
    found = recent.since(0)
    assert found is not None
    found[0].restore_random()
    assert random_bytes() == before


# How much later each step is than the one before, and the size of its batch.
deliveries = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=30)


@given(deliveries, st.integers(1, 8), st.integers(1, 120), st.integers(0, 40))
def test_limits_hold_and_what_is_gone_is_said_to_be_gone(
    delivered: list[tuple[int, int]], max_batches: int, max_bytes: int, asked: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MAX_BATCHES", max_batches)
        patch.setattr(batches, "MAX_BYTES", max_bytes)
        check_limits(delivered, max_batches, max_bytes, asked)


def check_limits(
    delivered: list[tuple[int, int]], max_batches: int, max_bytes: int, asked: int
) -> None:
    recent = RecentBatches()
    step, left, lost = 0, [], -1
    for number, (later, size) in enumerate(delivered):
        step += later
        recent.keep((number, torch.zeros(size)), step=step)
        left.append((number, step, 4 * size))
        while len(left) > max_batches or sum(nbytes for _, _, nbytes in left) > max_bytes:
            lost = left.pop(0)[1]
        assert len(recent) == len(left)
        assert recent.nbytes <= max_bytes
    found = recent.since(asked)
    if asked <= lost:
        assert found is None
    else:
        assert found is not None
        assert [kept.value()[0] for kept in found] == [n for n, its, _ in left if its >= asked]


def test_forgotten_ones_are_gone() -> None:
    recent = RecentBatches()
    for step in range(6):
        recent.keep(ones(), step=step)
    recent.forget(before=4)
    assert (len(recent), recent.nbytes) == (2, 48)
    assert recent.since(3) is None
    assert len(recent.since(4) or []) == 2
    assert recent.since(6) == []


def test_example_is_true() -> None:
    result = doctest.testmod(batches)
    assert (result.failed, result.attempted) == (0, 6)
