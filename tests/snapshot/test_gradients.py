"""Leftover gradients in snapshots: kept by value, without holding on to theirs."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from stayfinite.snapshot import TrainingState


def left_over() -> tuple[nn.Linear, TrainingState]:
    net = nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    return net, TrainingState(net)


def test_gradient_that_is_still_there_is_written_in_place() -> None:
    net, state = left_over()
    gradient = net.weight.grad
    snapshot = state.capture()
    net(torch.ones(1, 2)).sum().backward()
    state.restore(snapshot)
    assert net.weight.grad is gradient
    assert gradient is not None
    assert gradient.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_gradient_that_was_dropped_is_free_and_comes_back_by_value() -> None:
    net, state = left_over()
    assert net.weight.grad is not None
    gradient = weakref.ref(net.weight.grad)
    snapshot = state.capture()
    net.zero_grad()
    gc.collect()
    assert gradient() is None
    for _ in range(2):
        state.restore(snapshot)
        assert net.weight.grad is not None
        assert net.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        net.weight.grad.zero_()


def test_gradient_that_was_not_there_is_removed() -> None:
    net = nn.Linear(2, 2)
    state = TrainingState(net)
    snapshot = state.capture()
    net(torch.ones(1, 2)).sum().backward()
    state.restore(snapshot)
    assert net.weight.grad is None


def test_expanded_and_sparse_gradients_come_back() -> None:
    net = nn.Linear(2, 2, bias=False)
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    net.weight.grad = torch.ones(2).expand(2, 2)
    state = TrainingState([net, table])
    snapshot = state.capture()
    net.weight.grad[0].zero_()
    assert table.weight.grad is not None
    table.weight.grad._values().zero_()
    state.restore(snapshot)
    assert net.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert table.weight.grad.to_dense().tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


def test_gradients_are_left_out_on_demand() -> None:
    net, state = left_over()
    with_them = state.capture().nbytes
    parts = ("parameters", "buffers", "attributes")
    assert with_them - state.capture(parts=parts).nbytes == 4 * 6
    assert net.weight.grad is not None
