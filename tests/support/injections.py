"""A small training into which faults are injected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 5


class Classifier(nn.Module):
    """Attention, normalisation and dropout, and a loss with a softmax in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.embed(x))))
        return torch.softmax(self.head(hidden), dim=-1)


class Job:
    """A model, an optimizer, batches, and the loss of every step that was run."""

    def __init__(self, optimizer: Callable[..., Optimizer] = torch.optim.Adam) -> None:
        torch.manual_seed(7)
        self.model = Classifier()
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.batches = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(STEPS)]
        self.losses: list[float] = []

    def step(self, batch: Any) -> None:
        inputs, labels = batch
        self.optimizer.zero_grad()
        wanted = 0.1 + 0.7 * nn.functional.one_hot(labels, 3)
        loss = -(wanted * torch.log(self.model(inputs))).sum(1).mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def train(self, batches: Iterable[Any] | None = None) -> None:
        for batch in self.batches if batches is None else batches:
            self.step(batch)

    def bytes(self) -> dict[str, bytes]:
        """All that training has changed, by name."""
        held = dict(self.model.state_dict())
        for number, entry in enumerate(self.optimizer.state.values()):
            tensors = {key: value for key, value in entry.items() if isinstance(value, Tensor)}
            held |= {f"{number}.{key}": value for key, value in tensors.items()}
        held["rng"] = torch.get_rng_state()
        return {name: tensor.detach().numpy().tobytes() for name, tensor in held.items()}
