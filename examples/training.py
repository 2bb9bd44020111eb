"""A small training with one bad batch, which the examples of trackers look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import stayfinite


def train(*, sinks: list[Any] | None = None, steps: int = 40) -> int:
    """Train on amounts, one of which is negative; how many steps were left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        amounts, wanted = batch
        optimizer.zero_grad()
        predicted = model(torch.log(amounts))
        nn.functional.mse_loss(predicted, wanted).backward()
        optimizer.step()

    with stayfinite.watch(model, optimizer, sinks=sinks) as guard:
        for number in range(steps):
            amounts = torch.rand(32, 3) + 0.1
            if number == 20:
                amounts[7, 1] = -1.0  # a refund
            guard.step(step, (amounts, amounts.sum(1, keepdim=True)))
    return len(guard.incidents)
