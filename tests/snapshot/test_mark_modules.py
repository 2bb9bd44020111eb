"""State captured and put back: in place, by bytes."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor, nn

from stayfinite.snapshot import RandomState, Snapshot


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    net.register_buffer("scratch", torch.ones(2), persistent=False)
    net.register_buffer("nothing", None)
    net[3].bias = net[3].bias
    net[1].eval()
    return net


def raw(tensors: list[Tensor]) -> list[bytes]:
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def everything(net: nn.Module) -> list[bytes]:
    return raw([*net.parameters(), *net.buffers()])


def test_state_is_restored_by_bytes_and_in_place() -> None:
    net = model()
    held = [*net.parameters(), *net.buffers()]
    before, addresses = everything(net), [t.data_ptr() for t in held]
    snapshot = Snapshot([net])
    with torch.no_grad():
        for tensor in held:
            tensor.fill_(7)
    net[1].running_mean = torch.full((4,), math.nan)  # another tensor in its place
    net.train()
    snapshot.restore()
    assert everything(net) == before
    assert all(a is b for a, b in zip(held, [*net.parameters(), *net.buffers()], strict=True))
    assert [t.data_ptr() for t in held] == addresses
    assert not net[1].training
    assert net[0].training


def test_bits_of_nan_and_negative_zero_survive() -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-0.0, math.nan], [math.inf, 5e-324]]))
    before = everything(net)
    snapshot = Snapshot([net])
    net.weight.data.zero_()
    snapshot.restore()
    assert everything(net) == before


def test_gradients_come_back_as_the_same_objects() -> None:
    net = nn.Linear(2, 2)
    net.weight.grad = torch.ones(2, 2)
    gradient = net.weight.grad
    snapshot = Snapshot([net])
    net(torch.ones(1, 2)).sum().backward()
    assert net.bias.grad is not None
    snapshot.restore()
    assert net.weight.grad is gradient
    assert gradient.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert net.bias.grad is None


def test_gradient_that_was_dropped_comes_back() -> None:
    net = nn.Linear(2, 2)
    net.weight.grad = torch.ones(2, 2)
    snapshot = Snapshot([net])
    net.zero_grad(set_to_none=True)
    snapshot.restore()
    assert net.weight.grad is not None


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_random_numbers_come_again() -> None:
    state = RandomState.capture()
    first = draws()
    assert draws() != first
    state.restore()
    assert draws() == first


def test_snapshot_can_be_restored_again_and_again() -> None:
    net = model()
    before = everything(net)
    snapshot = Snapshot([net])
    numbers = set()
    for _ in range(3):
        numbers.add(tuple(draws()))
        net[0].weight.data.add_(1.0)
        snapshot.restore()
        assert everything(net) == before
    assert len(numbers) == 1


def test_several_modules_with_shared_parts_are_one_state() -> None:
    shared = nn.Linear(2, 2)
    one, two = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(2, 1))
    before = everything(one) + everything(two)
    snapshot = Snapshot([one, two])
    for parameter in two.parameters():
        parameter.data.zero_()
    snapshot.restore()
    assert everything(one) + everything(two) == before


def test_restoring_leaves_no_trace_in_autograd() -> None:
    net = nn.Linear(2, 2)
    snapshot = Snapshot([net])
    snapshot.restore()
    assert net.weight.is_leaf
    assert net.weight.grad_fn is None


def test_half_precision_and_integer_buffers_are_kept() -> None:
    net = nn.Linear(2, 2).half()
    net.register_buffer("count", torch.tensor(3))
    before = everything(net)
    snapshot = Snapshot([net])
    net.weight.data.zero_()
    net.count.add_(5)
    snapshot.restore()
    assert everything(net) == before


def test_snapshot_of_no_module_keeps_the_random_states() -> None:
    snapshot = Snapshot([])
    first = draws()
    snapshot.restore()
    assert draws() == first
