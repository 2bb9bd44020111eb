"""Modules with state in unusual places: each is exact, or the proof would say so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

from stayfinite.snapshot import TrainingState


class Quantizer(nn.Module):
    """A codebook that is moved by `.data`, as VQ-VAEs do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(dim=1)
        self.codes.data[nearest] = 0.9 * self.codes.data[nearest] + 0.1 * x.detach()
        return x + (self.codes[nearest] - x).detach()


class Queue(nn.Module):
    """A queue of keys, as MoCo keeps it, and a place in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("keys", torch.zeros(20000, 6))
        self.place = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.keys[self.place : self.place + len(x)] = out.detach()
        self.place += len(x)
        return out + self.keys[: self.place].mean()


class Remembering(nn.Module):
    """Keeps its activations, with their graph, and a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.hidden = torch.zeros(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x + self.hidden)
        self.hidden = self.last.detach()
        return self.last


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    return net


def parametrized() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    parametrizations.weight_norm(net[0])
    parametrizations.spectral_norm(net[1])
    return net


def pruned() -> nn.Module:
    net = nn.Linear(6, 6)
    prune.l1_unstructured(net, "weight", amount=0.5)
    return net


def channels_last() -> nn.Module:
    net = nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6))
    return nn.Sequential(net.to(memory_format=torch.channels_last), nn.Flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 6, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, None])[0][:, 0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": tied,
    "parametrized": parametrized,
    "pruned": pruned,
    "channels last": channels_last,
    "recurrent": Recurrent,
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8),
    "quantizer": lambda: nn.Sequential(nn.Linear(6, 6), Quantizer()),
    "queue": Queue,
    "remembering": Remembering,
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(6, 6)), backend="eager"),  # type: ignore[dict-item]
    "half": lambda: nn.Linear(6, 6).to(torch.bfloat16),
}


def stepper(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    dtype = next(net.parameters()).dtype

    def step() -> None:
        optimizer.zero_grad()
        net(torch.randn(4, 6, dtype=dtype)).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("kind", MODELS)
def test_restore_is_exact(kind: str) -> None:
    torch.manual_seed(0)
    net = MODELS[kind]()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    step = stepper(net, optimizer)
    state = TrainingState(net, optimizer)
    for _ in range(3):
        state.check_restore(step)
        step()


@pytest.mark.parametrize("kind", MODELS)
def test_going_back_and_on_is_exact(kind: str) -> None:
    """A step that was vetoed, then done: equal to one that was only done."""
    torch.manual_seed(0)
    net = MODELS[kind]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    step = stepper(net, optimizer)
    state = TrainingState(net, optimizer)
    for _ in range(6):
        mark = state.mark()
        weights = copy.deepcopy([p.detach() for p in net.parameters()])
        step()
        after, numbers = bits(net), torch.get_rng_state()
        with torch.no_grad():
            for param, weight in zip(net.parameters(), weights, strict=True):
                param.copy_(weight)
        state.go_back(mark)
        step()
        assert bits(net) == after
        assert torch.equal(torch.get_rng_state(), numbers)


def bits(net: nn.Module) -> list[bytes]:
    tensors = [*net.parameters(), *net.buffers()]
    flat = (t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors)
    return [t.numpy().tobytes() for t in flat]


def test_parametrizations_that_are_removed_do_not_hinder() -> None:
    net = parametrized()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    state = TrainingState(net, optimizer)
    state.mark()
    state.capture()
    parametrize.remove_parametrizations(net[0], "weight")
    state.go_back(state.mark())
    state.restore(state.capture())
    assert isinstance(net[0].weight, nn.Parameter)


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    where = f"file://{tmp_path}/meeting"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_model_is_exact_and_its_wrapper_left_alone(alone: None) -> None:
    torch.manual_seed(0)
    net = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.Adam(net.parameters())
    step = stepper(net, optimizer)
    state = TrainingState(net, optimizer)
    snapshot = state.capture()
    net.added_by_the_wrapper = 1
    for _ in range(3):
        state.check_restore(step)
        step()
        state.mark()
    state.restore(snapshot)
    assert net.added_by_the_wrapper == 1
    assert net.training
