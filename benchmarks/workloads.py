"""Small training steps to measure on: a GPT, a CNN and a tiny MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, *, layers: int = 4, width: int = 256, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(128, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.position[: tokens.shape[1]]))


def cnn_model() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def mlp_model() -> nn.Module:
    hidden = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


@dataclass(kw_only=True)
class Workload:
    """A model, its optimizer and one fixed batch."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[], Tensor]

    def step(self, check: Callable[[], Any] | None = None) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        if check is not None:
            check()
        self.optimizer.step()


def workload(name: str, *, fused: bool = False) -> Workload:
    torch.manual_seed(0)
    if name == "gpt":
        model: nn.Module = GPT()
        batch = torch.randint(1024, (8, 129))
        x, y = batch[:, :-1], batch[:, 1:].reshape(-1)
    else:
        model = cnn_model() if name == "cnn" else mlp_model()
        x = torch.randn(32, 3, 32, 32) if name == "cnn" else torch.randn(32, 32)
        y = torch.randint(10, (32,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def loss() -> Tensor:
        return functional.cross_entropy(model(x).view(len(y), -1), y)

    return Workload(name=name, model=model, optimizer=optimizer, loss=loss)
