"""After a preflight all is as before: the model, the optimizer, the batch, all random states."""

from __future__ import annotations

import copy
import random
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from as_before import torch_as_before  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional

from stayfinite.prevent.preflight.preflight import preflight


class Restless(nn.Module):
    """Everything that a forward pass can change: buffers, attributes, its input, random states."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls = 0
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.history.append(random.random() + float(np.random.rand()))
        x.mul_(2)
        return self.head(self.body(x))


def job() -> tuple[Restless, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Restless()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(16, 6), torch.randint(0, 3, (16,))
    functional.cross_entropy(model(batch[0].clone()), batch[1]).backward()
    optimizer.step()
    return model.eval(), optimizer, batch


def everything(model: Restless, optimizer: Any, batch: Any) -> dict[str, Any]:
    """All of it as plain values, tensors as bytes."""
    saved = optimizer.state_dict()
    return {
        "tensors": [plain(each) for each in (*model.parameters(), *model.buffers(), *batch)],
        "gradients": [plain(parameter.grad) for parameter in model.parameters()],
        "flags": [module.training for module in model.modules()],
        "attributes": (model.calls, list(model.history)),
        "optimizer": [[plain(v) for v in state.values()] for state in saved["state"].values()],
        "groups": saved["param_groups"],
        "random": (random.getstate(), repr(np.random.get_state()), plain(torch.get_rng_state())),
    }


def plain(value: Any) -> Any:
    return value.detach().numpy().tobytes() if isinstance(value, Tensor) else value


def loss_with_a_risk(out: Tensor, target: Tensor) -> Tensor:
    return functional.nll_loss(torch.log(out.softmax(-1)), target)


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_nothing_is_changed(precision: Any) -> None:
    model, optimizer, batch = job()
    before, parameters = everything(model, optimizer, batch), list(model.parameters())
    found = preflight(model, optimizer, batch, loss_with_a_risk, precision)
    assert any(risk.cause == "log_of_zero" for risk in found)
    assert everything(model, optimizer, batch) == before
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_nothing_is_changed_when_the_model_raises() -> None:
    model, optimizer, batch = job()
    before = everything(model, optimizer, batch)

    def fails(out: Tensor, target: Tensor) -> Tensor:
        out.sum().backward()
        raise RuntimeError("their bug")

    with pytest.raises(RuntimeError, match="their bug"):
        preflight(model, optimizer, batch, fails)
    assert everything(model, optimizer, batch) == before


def test_nothing_is_changed_when_the_loss_is_not_finite() -> None:
    model, optimizer, batch = job()
    before = everything(model, optimizer, batch)
    found = preflight(model, optimizer, batch, lambda out, y: (out / 0).sum())
    assert found[0].level == "high"
    assert everything(model, optimizer, batch) == before


def test_what_only_the_loss_function_knows_is_unchanged() -> None:
    model, optimizer, batch = job()
    critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    shift = torch.zeros(3, requires_grad=True)
    critic[0].weight.grad = gradient = torch.ones(4, 3)
    before = [plain(value) for value in critic.state_dict().values()]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(out + shift, target) + critic(out).square().mean()

    preflight(model, optimizer, batch, loss)
    assert [plain(value) for value in critic.state_dict().values()] == before
    assert critic[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 3))
    assert shift.grad is None
    assert critic[2].weight.grad is None


def test_training_goes_on_as_if_there_had_been_none() -> None:
    def trained(look: bool) -> dict[str, Any]:
        model, optimizer, (x, y) = job()
        model.train()
        for _ in range(3):
            if look:
                preflight(model, optimizer, (x, y), functional.cross_entropy)
            optimizer.zero_grad()
            functional.cross_entropy(model(x.clone()), y).backward()
            optimizer.step()
        return everything(model, optimizer, (x, y))

    assert trained(look=True) == trained(look=False)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_batch_of_any_shape_is_left_alone(kind: Any) -> None:
    class Named(nn.Module):
        def forward(self, *, x: Tensor, scale: float) -> Tensor:
            x.add_(1)
            return (x * scale).sum()

    batch = kind({"x": torch.randn(4, 3, requires_grad=True).detach(), "scale": 2.0})
    before = copy.deepcopy(batch)
    preflight(Named(), batch=batch)
    assert torch.equal(batch["x"], before["x"])
