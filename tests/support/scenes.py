"""Small pieces of training, traced."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import stayfinite
from stayfinite.errors import NonFiniteError
from stayfinite.guard import Guard, GuardSettings
from stayfinite.locate.origin import origin_of
from stayfinite.locate.tracer import Tracer
from stayfinite.records import Incident, Origin

Step = Callable[[], Any]


def origin(step: Step) -> Origin | None:
    """Where the bad ones among the tensors that `step` returns began; None if all are finite."""
    with Tracer() as tracer:
        result = step()
        tensors = [result] if isinstance(result, Tensor) else list(result)
        found = origin_of(tracer.events_of(tensors), folder=os.getcwd())
    return found[0] if found else None


def guilty(step: Step) -> str | None:
    """The text of the expression at which it began."""
    found = origin(step)
    return found.facts["expression"] if found else None


def kinds(step: Step) -> list[str]:
    """The kinds of the hops from birth to what was noticed."""
    found = origin(step)
    return [hop.kind for hop in found.lineage] if found else []


def found(step: Step) -> list[Incident]:
    """The incidents of a traced block; what `step` returns is its last variable."""
    with stayfinite.trace(raise_on_nan=False) as block:
        result = step()  # noqa: F841  (a variable at the end of the block)
    return block.incidents


def cause(step: Step) -> str | None:
    """The first incident's cause; None when there is no incident."""
    try:
        with stayfinite.trace():
            result = step()  # noqa: F841  (a variable at the end of the block)
    except NonFiniteError as error:
        return error.incident.diagnosis.cause
    return None


@contextmanager
def guarded(**settings: Any) -> Iterator[Guard]:
    """A guard that is attached inside the block."""
    guard = Guard(GuardSettings(**settings))
    guard.attach()
    try:
        yield guard
    finally:
        guard.close()


def gradient(function: Callable[[Tensor], Tensor], *values: float) -> Tensor:
    """The gradient of the sum of function(leaf) at these values."""
    leaf = torch.tensor(values, requires_grad=True)
    function(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


class Net(nn.Module):
    """Two layers with a name for each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def run_file(path: Path, text: str) -> dict[str, Any]:
    """The variables of a script that lies in a file and was run in this process."""
    path.write_text(text, encoding="utf-8")
    variables: dict[str, Any] = {"__name__": "script", "torch": torch, "nn": nn}
    exec(compile(text, str(path), "exec"), variables)
    return variables


class Unstable(nn.Module):
    """Draws random numbers, moves its statistics, and takes the log of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x))) + torch.log(x)


def everything(model: nn.Module) -> list[Any]:
    """The bytes of a model, its gradients and all random states."""
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [p.grad for p in model.parameters()]
    numbers = [random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()]
    held = [t if t is None else t.detach().numpy().tobytes() for t in [*tensors, *gradients]]
    return [
        *held,
        *numbers[:2],
        numbers[2].numpy().tobytes(),
        [m.training for m in model.modules()],
    ]
