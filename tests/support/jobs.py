"""A small training job, and what tests of recovery ask about it."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from stayfinite import NaNReport, NaNType
from stayfinite.nested import named_states, named_weights

NAN, INF = math.nan, math.inf


def report(location: str = "gradients.0.weight", **stats: Any) -> NaNReport:
    return NaNReport(
        has_nan=True,
        nan_type=NaNType.NAN,
        location=location,
        tensor_shape=(2,),
        tensor_stats=stats,
    )


class SmallJob:
    """Two layers and Adam, with one good step behind them, so that there is state to spoil."""

    def __init__(self, scaler: Any = None, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
        self.optimizer: Optimizer = Adam(self.model.parameters(), lr=0.01)
        self.scaler = scaler
        self.backward()
        self.update()

    def backward(self, poison: float | None = None) -> None:
        """Gradients of a new batch; one element of them is bad on demand."""
        self.optimizer.zero_grad()
        x = torch.randn(8, 3, dtype=next(self.model.parameters()).dtype)
        loss = self.model(x).pow(2).mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if poison is not None:
            self.gradients()[0].view(-1)[0] = poison

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def state(self) -> dict[str, bytes]:
        """Parameters, buffers and optimizer state, to the byte."""
        named = [*named_weights(self.model), *named_states(self.optimizer)]
        return {name: as_bytes(tensor) for name, tensor in named}

    def is_finite(self) -> bool:
        named = [*named_weights(self.model), *named_states(self.optimizer)]
        return all(bool(tensor.isfinite().all()) for _, tensor in named)

    def twin(self) -> SmallJob:
        return copy.deepcopy(self)


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
