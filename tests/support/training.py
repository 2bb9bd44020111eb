"""A small regression to train, by hand and with the trainer, and its bytes to compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.amp.config import AMPConfig, NaNDetectionConfig
from stayfinite.amp.trainer import AMPTrainer
from stayfinite.recover.config import RecoveryConfig

Batch = tuple[Tensor, Tensor]
mse = nn.functional.mse_loss


def small_model(seed: int = 0) -> nn.Module:
    """Dropout and BatchNorm, so that random state and buffers count."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
    )


def batches(count: int, *, seed: int = 1, bad: tuple[int, ...] = ()) -> list[Batch]:
    """So many batches; those numbered in `bad` have a NaN in their inputs."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        x = torch.randn(8, 4, generator=generator)
        y = x.sum(1, keepdim=True)
        if number in bad:
            x[0, 0] = math.nan
        made.append((x, y))
    return made


def config(precision: Any = "fp32", *, detect: Any = None, **options: Any) -> AMPConfig:
    """A config whose recovery and checks can be given by name."""
    checks = NaNDetectionConfig(**(detect or {}))
    return AMPConfig(precision=precision, nan_detection=checks, **options)


def recovering(*, max_consecutive_nans: int = 5, **options: Any) -> RecoveryConfig:
    return RecoveryConfig(max_consecutive_nans=max_consecutive_nans, **options)


def trainer_of(
    given: AMPConfig, model: nn.Module, *, lr: float = 0.05, loss_fn: Any = mse, **options: Any
) -> AMPTrainer:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return AMPTrainer(given, model, optimizer, loss_fn, **options)


def by_hand(
    model: nn.Module, made: list[Batch], *, lr: float = 0.05, every: int = 1, follow: Any = None
) -> list[float]:
    """The plain loop; its losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for number, (x, y) in enumerate(made):
        if number % every == 0:
            optimizer.zero_grad()
        loss = mse(model(x), y)
        (loss / every if every > 1 else loss).backward()
        losses.append(loss.item())
        if number % every == every - 1:
            optimizer.step()
            if follow is not None:
                follow(model, optimizer)
    return losses


def raw(model: nn.Module) -> list[bytes]:
    """Parameters and buffers, byte for byte."""
    tensors = [*model.parameters(), *model.buffers()]
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def all_steps(trainer: AMPTrainer, made: list[Batch]) -> list[float | None]:
    return [
        None if (loss := trainer.training_step(batch)) is None else loss.item() for batch in made
    ]


def without(made: list[Batch], *left_out: int) -> list[Batch]:
    return [batch for number, batch in enumerate(made) if number not in left_out]


class Heard:
    """A callback that keeps all it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda event: self.events.append((name, event))

    def named(self, name: str) -> list[Any]:
        return [event for each, event in self.events if each == name]


def counted(made: list[Batch]) -> Iterator[Batch]:
    """The batches as a stream, which has no length."""
    yield from made
