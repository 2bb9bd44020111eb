"""A fault on one of two ranks that train together over gloo."""

from __future__ import annotations

from pathlib import Path

from ranks import answers

DDP = """
from torch.nn.parallel import DistributedDataParallel
from stayfinite.testing import inject

torch.manual_seed(me)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
bad = []
with inject(model, optimizer, gradient="module.weight", at_step=2, element=2, rank=1) as fault:
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        bad.append(model.module.weight.grad.isnan().flatten().nonzero().flatten().tolist())
        optimizer.step()
said = {"bad": bad, "fired": fault.fired, "step": fault.step}
"""


def test_fault_on_one_rank_reaches_all_by_the_gradient(tmp_path: Path) -> None:
    first, second = answers(tmp_path, DDP)
    assert first["bad"] == second["bad"] == [[], [], [2]]
    assert (first["fired"], second["fired"]) == (False, True)
    assert first["step"] == second["step"] == 3
