"""Ten hostile sequences: what goes wrong in which step of a small training run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stayfinite.training import gradients_of

BATCH = 32
INPUTS = 8
TOO_SMALL = 2.0**-22


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in one step, and where; by default nothing does."""

    in_batch: float | None = None
    loss_times: float = 1.0
    gradients_times: float = 1.0
    in_gradients: float | None = None
    after_unscaling: float | None = None

    def spoil_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """After the backward pass."""
        for gradient in gradients_of(optimizer):
            gradient.mul_(self.gradients_times)
        _put(self.in_gradients, optimizer)

    def spoil_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """After unscaling, where there is any, and before clipping."""
        _put(self.after_unscaling, optimizer)


NOTHING = Fault()


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """A run of so many steps, and what goes wrong in each."""

    name: str
    steps: int
    fault: Callable[[int], Fault]
    in_half: bool = False


class Data:
    """Batches by their number, the same for everyone: a smooth function of eight numbers."""

    def __init__(self) -> None:
        self._direction = torch.randn(INPUTS, generator=torch.Generator().manual_seed(99))

    def batch(self, number: int, fault: Fault = NOTHING) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(number))
        targets = torch.tanh(inputs @ self._direction / 2).unsqueeze(1)
        if fault.in_batch is not None:
            inputs[3, 2] = fault.in_batch
        return inputs, targets


def new_model() -> nn.Module:
    """The same weights every time, with BatchNorm's statistics settled."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(INPUTS, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)
        )
    data = Data()
    with torch.no_grad():
        for number in range(50):
            model(data.batch(10**6 + number)[0])
    return model


HEALTHY = Sequence(name="nothing goes wrong", steps=150, fault=lambda step: NOTHING)


def once(at: int, fault: Fault) -> Callable[[int], Fault]:
    return lambda step: fault if step == at else NOTHING


SEQUENCES = (
    Sequence(name="one NaN in a gradient", steps=150, fault=once(5, Fault(in_gradients=math.nan))),
    Sequence(name="one Inf in a gradient", steps=150, fault=once(5, Fault(in_gradients=math.inf))),
    Sequence(
        name="200 overflows in a row",
        steps=400,
        fault=lambda step: Fault(in_gradients=math.inf) if 5 <= step < 205 else NOTHING,
    ),
    Sequence(
        name="every second step overflows",
        steps=400,
        fault=lambda step: Fault(in_gradients=math.inf) if step % 2 else NOTHING,
    ),
    Sequence(
        name="gradients of 1e20 and 1e30",
        steps=150,
        fault=lambda step: Fault(gradients_times=1e30 if step % 2 else 1e20),
    ),
    Sequence(name="one NaN loss", steps=150, fault=once(5, Fault(loss_times=math.nan))),
    Sequence(
        name="one bad batch, with BatchNorm", steps=150, fault=once(5, Fault(in_batch=math.nan))
    ),
    Sequence(
        name="NaN between unscale and step",
        steps=150,
        fault=once(5, Fault(after_unscaling=math.nan)),
    ),
    Sequence(
        name="gradients too small for fp16",
        steps=150,
        # The first power of two at which no gradient is left without scaling; a test holds it.
        fault=lambda step: Fault(loss_times=TOO_SMALL),
        in_half=True,
    ),
    Sequence(
        name="1000 healthy steps, then a NaN",
        steps=1100,
        fault=once(1000, Fault(in_gradients=math.nan)),
    ),
)


def _put(value: float | None, optimizer: torch.optim.Optimizer) -> None:
    if value is not None:
        gradients_of(optimizer)[0].view(-1)[0] = value
