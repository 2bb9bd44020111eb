"""A training job with every kind of state that a checkpoint must carry, and its bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from torch import Tensor, nn

from stayfinite.checkpoint import load_checkpoint, save_checkpoint
from stayfinite.checkpoint.values import encode

IS_PROOF = settings.default.max_examples >= 5_000
"""With --hypothesis-profile=prove faults come in their whole number, else a part of them."""


class Net(nn.Module):
    """Parameters, buffers of both kinds, a tensor attribute, an empty slot, a tie, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.second.weight
        self.register_buffer("decay", torch.full((3,), 0.5), persistent=False)
        self.scale = torch.tensor(1.0)
        self.offset = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        if self.offset is None:
            self.offset = hidden.detach().mean(0)[:4].clone()
        return self.second(hidden) * self.scale + self.offset + self.head(hidden)


class Job:
    """A model with optimizer, scheduler, scaler and average; steps draw from all generators."""

    def __init__(self, seed: int = 0) -> None:
        seed_all(seed)
        self.model = Net()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler: Any = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        self.steps = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(8, 4) + random.random() + float(np.random.rand())
            loss = self.model(x).pow(2).mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            with torch.no_grad():
                self.model.scale.mul_(0.9)
                self.model.decay.mul_(0.8)
            losses.append(loss.item())
            self.steps += 1
        return losses

    def members(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "ema")
        return {name: getattr(self, name) for name in names}

    def save(self, path: Path, **options: Any) -> Path:
        saved = save_checkpoint(path, **self.members(), step=self.steps, **options)
        assert saved is not None
        return saved

    def load(self, path: Path, **options: Any) -> Any:
        loaded = load_checkpoint(path, **self.members(), **options)
        self.steps = loaded.step
        return loaded

    def bytes(self) -> dict[str, Any]:
        return {name: fingerprint(member) for name, member in self.members().items()}


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def fingerprint(member: Any) -> dict[str, Any]:
    """Everything in an object, tensors as bytes with their address: equal only if untouched."""
    tensors: dict[str, Tensor] = {}
    found: dict[str, Any] = {}
    if isinstance(member, nn.Module):
        for name, module in member.named_modules():
            for kind in (module._parameters, module._buffers, vars(module)):
                for key, value in kind.items():
                    if isinstance(value, Tensor) or value is None:
                        found[f"{name}.{key}"] = None if value is None else of_tensor(value)
        return found
    found["state"] = encode(member.state_dict(), "", tensors)
    return found | {name: of_tensor(tensor) for name, tensor in tensors.items()}


def of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), tensor.data_ptr(), plain.numpy().tobytes()


def values_only(prints: Any) -> Any:
    """The same without addresses, to compare two objects."""
    if isinstance(prints, dict):
        return {key: values_only(item) for key, item in prints.items()}
    if isinstance(prints, tuple) and len(prints) == 4 and isinstance(prints[0], torch.dtype):
        return (*prints[:2], prints[3])
    return prints
