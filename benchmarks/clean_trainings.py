"""Small trainings in which nothing goes wrong, on batches that are new in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from workloads import GPT, cnn_model, mlp_model

TEXT = Path(__file__).parents[1] / "LICENSE"
LENGTH = 64

Batches = Callable[[], tuple[Tensor, Tensor]]


@dataclass(kw_only=True)
class Training:
    """A model, its optimizer and where its batches come from."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    batch: Batches

    def step(self, clip: Callable[[], object] | None = None) -> float:
        """The loss of a new batch."""
        inputs, targets = self.batch()
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(inputs).view(len(targets), -1), targets)
        loss.backward()
        if clip is not None:
            clip()
        self.optimizer.step()
        return loss.item()


def noisy_classes() -> tuple[nn.Module, Batches]:
    """The classes of a linear teacher, who is not sure."""
    teacher = torch.randn(32, 10)

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 32)
        return x, (x @ teacher + torch.randn(32, 10)).argmax(1)

    return mlp_model(), batch


def noisy_images() -> tuple[nn.Module, Batches]:
    """Ten images under noise."""
    images = torch.randn(10, 3, 32, 32)

    def batch() -> tuple[Tensor, Tensor]:
        y = torch.randint(10, (16,))
        return images[y] + 2 * torch.randn(16, 3, 32, 32), y

    return cnn_model(), batch


def bytes_of_text() -> tuple[nn.Module, Batches]:
    """The next byte of a real text."""
    text = torch.tensor(list(TEXT.read_bytes()))

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - LENGTH, (8,)).tolist()
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:].reshape(-1)

    return GPT(layers=2, width=64, vocabulary=256), batch


TASKS = {"mlp": noisy_classes, "cnn": noisy_images, "gpt": bytes_of_text}
OPTIMIZERS = ("adamw", "sgd")


def training(task: str, optimizer: str, *, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model, batch = TASKS[task]()
    chosen: Optimizer
    if optimizer == "adamw":
        chosen = AdamW(model.parameters(), lr=1e-3)
    else:
        chosen = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Training(name=f"{task}, {optimizer}", model=model, optimizer=chosen, batch=batch)
