"""A model and its optimizer: checked, their gradients, and how a step does not see them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.errors import InputError

Pairs: TypeAlias = list[tuple[Tensor, Tensor]]
"""Parameters, each with its gradient."""


def require_module(model: Any) -> None:
    """InputError unless the model is a module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that are there."""
    return [
        grad
        for group in optimizer.param_groups
        for param in group["params"]
        if (grad := param.grad) is not None
    ]


def pairs_of(optimizer: Optimizer) -> Pairs:
    """The same, each with its parameter."""
    return [(p, grad) for p in params_of(optimizer) if (grad := p.grad) is not None]


def put_gradients(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Give each parameter its gradient, or none."""
    for param, gradient in pairs:
        param.grad = gradient


class HiddenGradients:
    """Gradients taken away for a while: an optimizer leaves a parameter without one alone."""

    def __init__(self) -> None:
        self._pairs: Pairs = []

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def take(self, optimizer: Optimizer) -> None:
        self._pairs = pairs_of(optimizer)
        for param, _ in self._pairs:
            param.grad = None

    def give_back(self) -> None:
        pairs, self._pairs = self._pairs, []
        if all(param.grad is None for param, _ in pairs):  # else a backward pass came between
            for param, grad in pairs:
                param.grad = grad
