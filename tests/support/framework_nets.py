"""A small net to train with any framework, batches that make it go bad, and its bytes."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

Bad = Literal["log", "sqrt", "data"]
Batch = dict[str, Tensor]
FILE = Path(__file__)


class Logs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x + 2)  # a log of what may be negative


class Roots(nn.Module):
    """Its backward pass makes NaN of an input of 0, in one gradient only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.scale * x)  # a root of what may be 0


class Net(nn.Module):
    """Dropout and BatchNorm, so that random state and buffers count."""

    def __init__(self) -> None:
        super().__init__()
        self.logs, self.roots = Logs(), Roots()
        self.linear, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = self.drop(self.norm(self.linear(self.logs(x))))
        y = self.head(h) + self.roots(x[:, 3:])
        if labels is None:
            return {"logits": y}
        return {"loss": functional.mse_loss(y, labels), "logits": y}  # the loss


LINES = {
    "log": ("a log of what may be negative", "logs", "aten.log.default"),
    "sqrt": ("a root of what may be 0", "roots", "aten.div.Tensor"),
}


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Every incident looks at all living objects, and a framework alone makes 300,000."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def line_of(text: str) -> int:
    """The line of this file that has the comment."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()  # type: ignore[arg-type]
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batches(count: int, *, bad: dict[int, Bad] | None = None, size: int = 6) -> list[Batch]:
    """So many batches, those in `bad` each bad in its way."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        x = torch.rand(size, 4, generator=generator) + 0.1
        labels = x.sum(1, keepdim=True)
        _spoil(x, (bad or {}).get(number))
        made.append({"x": x, "labels": labels})
    return made


def _spoil(x: Tensor, how: Bad | None) -> None:
    if how == "log":
        x[1, 0] = -3.0
    elif how == "sqrt":
        x[1, 3] = 0.0
    elif how == "data":
        x[1, 1] = math.nan


def samples(made: list[Batch]) -> list[dict[str, Tensor]]:
    """The batches taken apart, for a framework that makes batches itself."""
    return [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in made
        for row in range(len(batch["x"]))
    ]


def bytes_of(model: nn.Module, optimizer: Optimizer, *schedulers: Any) -> list[Any]:
    """Weights, buffers, optimizer state, schedulers and torch's generator, to compare."""
    state = optimizer.state_dict()["state"]
    tensors = [
        *model.state_dict().values(),
        *(torch.as_tensor(value) for kept in state.values() for value in kept.values()),
        torch.get_rng_state(),
    ]
    rates = [group["lr"] for group in optimizer.param_groups]
    counts = [each.state_dict() for each in schedulers]
    return [*(t.float().numpy().tobytes() for t in tensors), rates, counts]
