"""A whole training job goes back, by bytes and in place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from moments import Everything, in_bytes, memory_of, seed_everything, tensors_in
from torch import Tensor, nn

from stayfinite.errors import InputError
from stayfinite.snapshot import TrainingState


def job(steps: int) -> tuple[Everything, TrainingState]:
    made = Everything()
    for _ in range(steps):
        made.step()
    return made, TrainingState(made.model, made.optimizer, **made.members)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_everything_is_as_before(steps: int) -> None:
    training, state = job(steps)
    before = training.bytes()
    snapshot = state.capture(step=steps)
    for _ in range(3):
        training.step()
        training.model.train(not training.model.training)
    changed = training.bytes()
    assert [name for name in before if changed[name] == before[name]] == []
    state.restore(snapshot)
    after = training.bytes()
    assert [name for name in before if after[name] != before[name]] == []
    assert snapshot.step == steps


def test_training_goes_on_as_if_nothing_had_been() -> None:
    training, state = job(2)
    snapshot = state.capture()
    training.step()
    training.step()
    first = training.bytes()
    for _ in range(3):
        state.restore(snapshot)
        training.step()
        training.step()
        assert training.bytes() == first


def test_no_tensor_moves() -> None:
    training, state = job(2)
    held = [
        *training.model.parameters(),
        *training.model.buffers(),
        *training.ema.parameters(),
        *(p.grad for p in training.model.parameters() if p.grad is not None),
        *tensors_in([training.optimizer.state, training.optimizer.param_groups]),
        training.scaler._scale,
    ]
    groups, state_dict = training.optimizer.param_groups, training.optimizer.state
    places = [(id(t), t.data_ptr()) for t in held]
    snapshot = state.capture()
    training.step()
    training.optimizer.zero_grad()
    state.restore(snapshot)
    again = [
        *training.model.parameters(),
        *training.model.buffers(),
        *training.ema.parameters(),
        *(p.grad for p in training.model.parameters() if p.grad is not None),
        *tensors_in([training.optimizer.state, training.optimizer.param_groups]),
        training.scaler._scale,
    ]
    assert [(id(t), t.data_ptr()) for t in again] == places
    assert training.optimizer.param_groups is groups
    assert training.optimizer.state is state_dict


def test_memory_of_an_older_snapshot_is_used_again() -> None:
    training, state = job(2)
    snapshot = state.capture(step=1)
    names = ["parameters.first.weight", "optimizer.last.bias.exp_avg", "attributes.center"]
    memory = [memory_of(snapshot, name).data_ptr() for name in names]
    size = snapshot.nbytes
    training.step()
    before = training.bytes()
    assert state.capture(step=2, into=snapshot) is snapshot
    # An attribute that became another tensor is found by its name.
    assert [memory_of(snapshot, name).data_ptr() for name in names] == memory
    assert (snapshot.step, snapshot.nbytes) == (2, size)
    training.step()
    state.restore(snapshot)
    assert training.bytes() == before


def test_several_models_and_optimizers_are_one_state() -> None:
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
    state = TrainingState(nets, optimizers)

    def step() -> None:
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    step()
    before = in_bytes([[*n.parameters(), o.state] for n, o in zip(nets, optimizers, strict=True)])
    snapshot = state.capture()
    step()
    state.restore(snapshot)
    after = in_bytes([[*n.parameters(), o.state] for n, o in zip(nets, optimizers, strict=True)])
    assert after == before


def test_parameters_outside_of_any_module_are_kept() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    state = TrainingState(None, optimizer)
    weight.sum().backward()
    snapshot = state.capture()
    optimizer.step()
    state.restore(snapshot)
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert weight.grad is not None
    assert not optimizer.state


def test_tied_parameters_are_kept_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert TrainingState(net).capture().nbytes == 4 * 16


def test_twelve_bytes_for_each_parameter_with_adam() -> None:
    net = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step_counter = 4
    assert TrainingState(net, optimizer).capture().nbytes == 12 * 1000 + step_counter


def test_frozen_parameters_stay_frozen() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    state = TrainingState(net)
    snapshot = state.capture()
    net.requires_grad_(True)
    net.weight.requires_grad_(False)
    state.restore(snapshot)
    assert (net.weight.requires_grad, net.bias.requires_grad) == (True, False)


def test_attribute_that_did_not_exist_is_removed_and_a_lost_one_comes_back() -> None:
    net = nn.Linear(2, 2)
    net.kept = [1, torch.ones(2)]
    kept = net.kept
    state = TrainingState(net)
    snapshot = state.capture()
    net.kept[1].zero_()
    del net.kept
    net.born = 3
    state.restore(snapshot)
    assert net.kept is kept
    assert kept[1].tolist() == [1.0, 1.0]
    assert not hasattr(net, "born")


def test_machinery_of_modules_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    state = TrainingState(net)
    snapshot = state.capture()
    calls: list[int] = []
    net.register_forward_hook(lambda *_: calls.append(1))
    net.callback = lambda: None
    state.restore(snapshot)
    net(torch.ones(1, 2))
    assert calls == [1]
    assert callable(net.callback)


def test_parameter_that_was_given_other_memory_keeps_it() -> None:
    net = nn.Linear(2, 2)
    state = TrainingState(net)
    before = in_bytes(list(net.parameters()))
    snapshot = state.capture()
    net.weight.data = torch.zeros(2, 2)
    place = net.weight.data_ptr()
    state.restore(snapshot)
    assert net.weight.data_ptr() == place
    assert in_bytes(list(net.parameters())) == before


def test_tensor_that_was_resized_gets_its_shape_back() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("cache", torch.arange(3.0))
    state = TrainingState(net)
    snapshot = state.capture()
    net.cache.resize_(5).zero_()
    state.restore(snapshot)
    assert net.cache.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("odd", "zero"),
    [
        (torch.ones(3).expand(2, 3), lambda odd: odd[0].zero_()),
        (torch.arange(6.0).view(2, 3).t(), Tensor.zero_),
        (torch.arange(6.0)[::2], Tensor.zero_),
        (torch.ones(2, dtype=torch.bfloat16), Tensor.zero_),
        (torch.ones(2, dtype=torch.complex64).conj(), Tensor.zero_),
        (torch.tensor([True, False]), Tensor.zero_),
        (torch.ones(2, dtype=torch.float8_e4m3fn), Tensor.zero_),
        (torch.eye(3).to_sparse(), lambda odd: odd.values().zero_()),
    ],
    ids=lambda odd: str(getattr(odd, "dtype", "")).removeprefix("torch."),
)
def test_tensors_of_every_kind_are_kept(odd: Tensor, zero: Callable[[Tensor], Any]) -> None:
    net = nn.Linear(1, 1)
    net.register_buffer("odd", odd)
    state = TrainingState(net)
    before, snapshot, mark = in_bytes(odd.resolve_conj()), state.capture(), state.mark()
    for back in (lambda: state.restore(snapshot), lambda: state.go_back(mark)):
        zero(odd)
        assert in_bytes(odd.resolve_conj()) != before
        back()
        assert net.odd is odd
        assert in_bytes(odd.resolve_conj()) == before


def test_lazy_and_meta_parameters_are_no_obstacle() -> None:
    net = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2, device="meta"))
    state = TrainingState(net)
    state.restore(state.capture())
    assert net[0].has_uninitialized_params()


def test_things_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(InputError, match="model is a str"):
        TrainingState("model")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="optimizer is a Linear"):
        TrainingState(nn.Linear(1, 1), nn.Linear(1, 1))  # type: ignore[arg-type]


def test_random_numbers_of_all_kinds_come_again() -> None:
    seed_everything(5)
    generators = [torch.Generator(), np.random.default_rng(2), np.random.RandomState(3)]
    generators += [random.Random(4)]
    state = TrainingState(nn.Linear(1, 1), generators=generators)

    def draw() -> list[float]:
        torch_one, numpy_one, old_one, python_one = generators
        drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
        drawn += [float(torch.rand(())), float(torch.rand((), generator=torch_one))]
        return [*map(float, drawn), numpy_one.random(), old_one.rand(), python_one.random()]

    for take, back in ((state.capture, state.restore), (state.mark, state.go_back)):
        kept = take()
        first = draw()
        assert draw() != first
        back(kept)
        assert draw() == first
        back(kept)
        assert draw() == first
