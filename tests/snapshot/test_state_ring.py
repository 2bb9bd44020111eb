"""The ring keeps the newest good moments, and nothing that is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moments import Everything, in_bytes, memory_of
from torch import Tensor, nn

from stayfinite.errors import ConfigError, NonFiniteError, SnapshotError
from stayfinite.snapshot import Snapshot, SnapshotRing, TrainingState


def ring_of(slots: int = 2) -> tuple[Everything, SnapshotRing]:
    training = Everything()
    training.step()
    state = TrainingState(training.model, training.optimizer, **training.members)
    return training, SnapshotRing(state, slots=slots)


def test_newest_are_kept_and_older_ones_give_their_memory() -> None:
    training, ring = ring_of(slots=2)
    assert (len(ring), ring.back()) == (0, None)
    first, second = ring.take(step=1), ring.take(step=2)
    training.step()
    third = ring.take(step=3)
    assert third is first
    assert [ring.back(k) for k in range(3)] == [third, second, None]
    assert [ring.back(k).step for k in range(2)] == [3, 2]  # type: ignore[union-attr]
    assert ring.back(-1) is None


@pytest.mark.parametrize("k", [0, 1, 2])
def test_any_of_them_can_be_gone_back_to(k: int) -> None:
    training, ring = ring_of(slots=3)
    moments = []
    for step in range(5):
        moments.append(training.bytes())
        ring.take(step=step)
        training.step()
    assert ring.restore(k).step == 4 - k
    assert training.bytes() == moments[4 - k]
    assert len(ring) == 3 - k  # the newer ones are forgotten
    training.step()
    ring.take(step=9)
    assert [ring.back(i).step for i in range(len(ring))] == [9, *range(4 - k, 1, -1)][:3]  # type: ignore[union-attr]


def test_memory_of_forgotten_ones_is_used_again() -> None:
    _, ring = ring_of(slots=3)
    taken = [ring.take(step=step) for step in range(3)]
    ring.restore(2)
    again = [ring.take(step=step) for step in (7, 8)]
    assert {id(snapshot) for snapshot in again} == {id(taken[1]), id(taken[2])}


def test_going_back_to_nothing_is_an_error_that_says_so() -> None:
    training, ring = ring_of()
    before = training.bytes()
    with pytest.raises(SnapshotError, match="no snapshot 0 back, only 0"):
        ring.restore()
    ring.take(step=0)
    with pytest.raises(SnapshotError, match="no snapshot 1 back, only 1"):
        ring.restore(1)
    assert training.bytes() == before


def test_ring_without_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="slots is 0"):
        SnapshotRing(TrainingState(nn.Linear(1, 1)), slots=0)


def test_snapshot_apart_is_in_no_ring() -> None:
    training, ring = ring_of()
    before, apart = training.bytes(), ring.apart(step=3)
    assert (len(ring), apart.step) == (0, 3)
    training.step()
    apart.restore()
    assert training.bytes() == before


def spoil(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1] = value


WHERE = {
    "parameters.last.bias": lambda job: job.model.last.bias,
    "optimizer.first.weight.exp_avg_sq": lambda job: job.optimizer.state[job.model.first.weight][
        "exp_avg_sq"
    ],
    "buffers.norm.running_var": lambda job: job.model.norm.running_var,
    "buffers.seen": lambda job: job.model.seen,
    "ema.parameters.module.first.weight": lambda job: job.ema.module.first.weight,
    "ema.buffers.module.norm.running_mean": lambda job: job.ema.module.norm.running_mean,
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", WHERE)
def test_bad_moment_is_refused_by_name_and_the_ring_is_as_before(name: str, value: float) -> None:
    training, ring = ring_of(slots=2)
    moments = []
    for step in range(3):
        ring.take(step=step)
        moments.append(training.bytes())
        training.step()
    spoil(WHERE[name](training), value)
    with pytest.raises(NonFiniteError) as caught:
        ring.take(step=3)
    assert caught.value.report is not None
    assert caught.value.report.location == name
    for k, step in ((0, 2), (1, 1)):
        snapshot = ring.back(k)
        assert snapshot is not None
        assert snapshot.step == step
        snapshot.restore()
        assert training.bytes() == moments[step]


@pytest.mark.parametrize("name", WHERE)
def test_snapshot_that_has_gone_bad_is_refused_and_nothing_is_changed(name: str) -> None:
    training, ring = ring_of()
    snapshot = ring.take(step=0)
    spoil(memory_of(snapshot, name), math.nan)
    training.step()
    before = training.bytes()
    with pytest.raises(NonFiniteError, match=name):
        ring.restore()
    assert training.bytes() == before


class Large:
    """A job of which a snapshot takes more than is looked at beforehand."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(700, 800), nn.Linear(800, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 700)).square().sum().backward()
        self.optimizer.step()

    def bytes(self) -> Any:
        return in_bytes([list(self.model.parameters()), list(self.optimizer.state.values())])

    def tensor(self, name: str) -> Tensor:
        place, key = name.rsplit(".", 1)
        param = self.model.get_parameter(place)
        return param if key == "value" else self.optimizer.state[param][key]


LARGE = ("0.weight.value", "1.bias.value", "0.weight.exp_avg_sq", "1.bias.exp_avg", "1.bias.step")


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_large_moment_that_is_bad_is_refused_and_the_newest_stays(name: str, value: float) -> None:
    training = Large()
    ring = SnapshotRing(TrainingState(training.model, training.optimizer), slots=2)
    for step in range(3):
        ring.take(step=step)
        before = training.bytes()
        training.step()
    spoil(training.tensor(name), value)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=name.removesuffix(".value")):
            ring.take(step=3)
    assert [ring.back(k).step for k in range(len(ring))] == [2]  # type: ignore[union-attr]
    assert ring.restore().step == 2
    assert training.bytes() == before
    training.step()
    before = training.bytes()
    ring.take(step=3)
    training.step()
    assert ring.restore().step == 3
    assert training.bytes() == before
    assert len(ring) == 2


@pytest.mark.parametrize("name", LARGE)
def test_only_slot_survives_a_large_moment_that_is_bad(name: str) -> None:
    training = Large()
    ring = SnapshotRing(TrainingState(training.model, training.optimizer), slots=1)
    ring.take(step=0)
    before = training.bytes()
    training.step()
    spoil(training.tensor(name), math.nan)
    with pytest.raises(NonFiniteError):
        ring.take(step=1)
    assert ring.restore().step == 0
    assert training.bytes() == before


def test_large_values_whose_sum_overflows_are_no_reason_to_refuse() -> None:
    training = Large()
    ring = SnapshotRing(TrainingState(training.model, training.optimizer), slots=1)
    training.model[0].weight.data.fill_(3e38)
    before = training.bytes()
    for step in range(2):  # into new memory, then over the only one
        ring.take(step=step)
    training.model[0].weight.data.zero_()
    ring.restore()
    assert training.bytes() == before


@pytest.mark.parametrize("slots", [1, 2])
def test_large_tensor_of_another_form_is_kept_in_it(slots: int) -> None:
    net = nn.Linear(1100, 1100)
    ring = SnapshotRing(TrainingState(net), slots=slots)
    for step, form in enumerate([(1100, 1100), (10, 7), (600, 2000), (2000, 600)]):
        net.weight.data = torch.randn(form, generator=torch.Generator().manual_seed(step)).t()
        before = in_bytes([net.weight])
        ring.take(step=step)
        net.weight.data.zero_()
        ring.restore()
        assert in_bytes([net.weight]) == before


def test_what_was_infinite_from_the_beginning_is_kept() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.full((2,), -math.inf))
    net.bound = nn.Parameter(torch.full((2,), math.inf), requires_grad=False)
    net.best = torch.tensor(math.inf)
    state = TrainingState(net)
    before = in_bytes([net.mask, net.bound, net.best])
    snapshot = state.capture()
    for tensor in (net.mask, net.bound.data, net.best):
        tensor.zero_()
    state.restore(snapshot)
    assert in_bytes([net.mask, net.bound, net.best]) == before


def test_gradients_may_be_bad() -> None:
    net = nn.Linear(2, 2)
    net.weight.grad = torch.full((2, 2), math.nan)
    state = TrainingState(net)
    snapshot = state.capture()
    net.weight.grad.zero_()
    state.restore(snapshot)
    assert net.weight.grad.isnan().all()


def test_snapshot_that_was_not_finished_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    training, ring = ring_of(slots=2)
    ring.take(step=0)
    before = training.bytes()
    ring.take(step=1)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("stayfinite.snapshot.copies.copy_groups", stop)
        with pytest.raises(KeyboardInterrupt):
            ring.take(step=2)
    assert [ring.back(k).step for k in range(len(ring))] == [1]  # type: ignore[union-attr]
    training.step()
    ring.restore()
    assert training.bytes() == before


def test_empty_snapshot_is_refused() -> None:
    with pytest.raises(SnapshotError, match="nothing was captured"):
        Snapshot().restore()
