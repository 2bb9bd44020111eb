"""The ring keeps the newest good moments, and nothing that is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moments import Everything, in_bytes
from torch import Tensor, nn

from stayfinite.errors import ConfigError, NonFiniteError, SnapshotError
from stayfinite.snapshot import Snapshot, SnapshotRing, TrainingState
from stayfinite.snapshot.copies import Offload


def ring_of(slots: int = 2, offload: Offload = "none") -> tuple[Everything, SnapshotRing]:
    training = Everything()
    training.step()
    state = TrainingState(training.model, training.optimizer, **training.members)
    return training, SnapshotRing(state, slots=slots, offload=offload)


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


@pytest.mark.parametrize("offload", ["none", "cpu", "pinned"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_any_of_them_can_be_gone_back_to(k: int, offload: Offload) -> None:
    training, ring = ring_of(slots=3, offload=offload)
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"slots": 0}, "slots is 0"), ({"offload": "disk"}, "'none', 'cpu', 'pinned'")],
)
def test_wrong_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SnapshotRing(TrainingState(nn.Linear(1, 1)), **settings)


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
    spoil(snapshot.memory_of(name)[0], math.nan)
    training.step()
    before = training.bytes()
    with pytest.raises(NonFiniteError, match=name):
        ring.restore()
    assert training.bytes() == before


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
        patched.setattr("stayfinite.snapshot.rooms.copy_groups", stop)
        with pytest.raises(KeyboardInterrupt):
            ring.take(step=2)
    assert [ring.back(k).step for k in range(len(ring))] == [1]  # type: ignore[union-attr]
    training.step()
    ring.restore()
    assert training.bytes() == before


def test_empty_snapshot_and_unknown_names_are_refused() -> None:
    with pytest.raises(SnapshotError, match="nothing was captured"):
        Snapshot().restore()
    with pytest.raises(SnapshotError, match=r"parameters\.none is not in this snapshot"):
        TrainingState(nn.Linear(1, 1)).capture().memory_of("parameters.none")
