"""A weight under a loss scaler, whose gradients are as a test wants them."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

Event = Literal["good", "inf", "nan", "late", "none"]


class Training:
    """One optimizer under a scaler; each step is good or goes bad in one of several ways."""

    def __init__(self, scaler: Any, optimizer: Optimizer | None = None) -> None:
        self.scaler = scaler
        self.weight = nn.Parameter(torch.ones(3))
        self.optimizer = SGD([self.weight], lr=2.0**-6) if optimizer is None else optimizer
        self.weights = [p for group in self.optimizer.param_groups for p in group["params"]]

    def attempt(self, event: Event = "good") -> None:
        """Everything but update(): "late" is good until it is unscaled, "none" has no gradient."""
        scale = self.scaler.scale(torch.ones(()))
        bad = {"inf": math.inf, "nan": math.nan}.get(event, 1.0)
        for weight in self.weights:
            weight.grad = None if event == "none" else torch.full_like(weight, bad) * scale
        if event == "late":
            self.scaler.unscale_(self.optimizer)
            for weight in self.weights:
                gradient(weight)[..., :1] = math.nan
        self.scaler.step(self.optimizer)

    def step(self, event: Event = "good") -> None:
        self.attempt(event)
        self.scaler.update()

    def is_finite(self) -> bool:
        return all(bool(weight.isfinite().all()) for weight in self.weights)


def gradient(weight: Tensor) -> Tensor:
    """The gradient of a weight that has one."""
    assert weight.grad is not None
    return weight.grad
