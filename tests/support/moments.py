"""The bytes of a training job at one moment, taken by torch's own means, not by ours."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel


def in_bytes(value: Any) -> Any:
    """Tensors and arrays as their bytes, within whatever holds them."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.is_sparse:
            return in_bytes([value.coalesce().indices(), value.coalesce().values()])
        flat = value.contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if isinstance(value, dict):
        return {key: in_bytes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_bytes(item) for item in value]
    return repr(value)


def optimizer_bytes(optimizer: Optimizer) -> Any:
    """State by parameter, and all groups with their parameters."""
    return in_bytes([optimizer.param_groups, list(optimizer.state.items())])


def places(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Which tensors these are, and where their memory is."""
    return [(id(t), t.data_ptr()) for t in tensors_in([optimizer.param_groups, optimizer.state])]


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def memory_of(snapshot: Any, name: str) -> Tensor:
    """Where a snapshot keeps the value of the item with this name."""
    names = [item.name for item in snapshot._kept.items]
    memory: Tensor = snapshot._kept.copies.memories[names.index(name)][0]
    return memory


def random_bytes() -> Any:
    return in_bytes([random.getstate(), np.random.get_state(), torch.get_rng_state()])


class Net(nn.Module):
    """Dropout, batch norm, and state of every kind that modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(6), persistent=False)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.calls = 0
        self.history: list[float] = []
        self.nested = {"largest": (0.0, [0])}
        self.center = torch.zeros(6)
        self.table = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(float(x.detach().mean()))
        self.nested["largest"] = (max(self.history), [self.calls])
        self.seen += x.detach().mean(dim=0)
        self.center = 0.9 * self.center + 0.1 * x.detach().mean(dim=0)
        self.table[self.calls % 3] += 1
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))

    def plain(self) -> Any:
        held = [self.calls, self.history, self.nested, self.center, self.table]
        return [held, [module.training for module in self.modules()]]


class Sampled:
    """A loader that can say where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Everything:
    """A job with one of each: all that can be forgotten."""

    def __init__(self) -> None:
        seed_everything(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        warm_up = lr_scheduler.LinearLR(self.optimizer, total_iters=3)
        cosine = lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scheduler = lr_scheduler.SequentialLR(self.optimizer, [warm_up, cosine], [3])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.ema = AveragedModel(self.model, use_buffers=True)
        self.loader = Sampled()
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(1)

    @property
    def members(self) -> dict[str, Any]:
        return {
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "ema": self.ema,
            "loader": self.loader,
            "generators": [self.torch_generator, self.numpy_generator],
        }

    def step(self) -> None:
        """Leaves its gradients behind, and adds to those that were there."""
        x = torch.randn(4, 6, generator=self.torch_generator) + next(self.loader)
        x = x * random.random() + np.random.rand() + float(self.numpy_generator.random())
        loss = self.model(x).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update_parameters(self.model)

    def bytes(self) -> dict[str, Any]:
        parts = {
            "parameters": list(self.model.parameters()),
            "buffers": dict(self.model.named_buffers()),
            "attributes": self.model.plain(),
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": list(self.optimizer.state.values()),
            "param_groups": self.optimizer.state_dict()["param_groups"],
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict(),
            "random": [random_bytes(), self.torch_generator.get_state()],
            "generator": self.numpy_generator.bit_generator.state,
            "loader": self.loader.state_dict(),
        }
        return {name: in_bytes(part) for name, part in parts.items()}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
