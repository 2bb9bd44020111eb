"""What weights were before an update, by the optimizer's rule, and a smaller one as experiment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stayfinite.errors import TrainingAbortedError
from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard.conditions import weights_before

VARIANTS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.5, 0.9)}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
]


def trained(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> tuple[Any, ...]:
    """An optimizer after five updates, its last gradients, and the weights before the last."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = kind(model.parameters(), lr=0.05, **options)
    before: list[torch.Tensor] = []
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 3).double()).square().mean().backward()
        before = [param.detach().clone() for param in model.parameters()]
        gradients = [param.grad for param in model.parameters()]
        optimizer.step()
    optimizer.zero_grad()
    return optimizer, gradients, before


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=lambda value: str(value))
def test_an_update_is_taken_back_by_its_rule(kind: Any, options: dict[str, Any]) -> None:
    optimizer, gradients, before = trained(kind, options)
    found = weights_before(optimizer, gradients, [0.05])
    assert found is not None
    for (_, value), right in zip(found, before, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-12)


def test_the_rate_is_that_of_the_update() -> None:
    optimizer, gradients, before = trained(torch.optim.Adam, {})
    optimizer.param_groups[0]["lr"] = 7.0  # by a scheduler, since
    found = weights_before(optimizer, gradients, [0.05])
    assert found is not None
    torch.testing.assert_close(found[0][1], before[0])


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.RMSprop, {}), (torch.optim.SGD, {"maximize": True})],
    ids=["another rule", "maximize"],
)
def test_other_rules_do_not_tell(kind: Any, options: dict[str, Any]) -> None:
    optimizer, gradients, _ = trained(kind, options)
    assert weights_before(optimizer, gradients, [0.05]) is None


def test_gradients_that_may_have_been_written_to_since_do_not_tell() -> None:
    optimizer, gradients, _ = trained(torch.optim.SGD, {})
    param = optimizer.param_groups[0]["params"][0]
    param.grad = gradients[0].zero_()  # zero_grad(set_to_none=False)
    assert weights_before(optimizer, gradients, [0.05]) is None


SCRIPT = """
import torch

def train():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=RATE)
    for step in range(50):
        optimizer.zero_grad()
        loss = (weight ** 2).mean()
        loss.backward()
        optimizer.step()
    return weight
"""


@pytest.mark.parametrize(("rate", "is_cured"), [(1e3, True), (1e12, False)])
def test_a_tenth_of_the_last_update_is_tried_in_place(
    rate: float, is_cured: bool, tmp_path: Path
) -> None:
    file = tmp_path / f"train_at_{'high' if is_cured else 'absurd'}_rate.py"
    file.write_text(SCRIPT.replace("RATE", str(rate)))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    guard = Guard(GuardSettings(on_nan="stop", folder=str(tmp_path), prove_seconds=20))
    guard.attach()
    try:
        with pytest.raises(TrainingAbortedError) as caught:
            module.train()
    finally:
        guard.close()
        del sys.modules[file.stem]
    incident = caught.value.incident
    assert incident is not None
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "lr_too_high"
    said = "with a tenth of the learning rate over the last step this one is finite"
    assert (said in incident.diagnosis.evidence) == is_cured, incident.diagnosis.evidence
    assert not any("still bad" in each for each in incident.diagnosis.evidence)
