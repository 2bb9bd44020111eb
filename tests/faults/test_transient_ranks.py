"""A transient fault on one of two ranks: both undo the step, try it again, and stay equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import answers

TRAINING = """
import contextlib, hashlib, stayfinite
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from stayfinite.recover.config import RecoveryConfig
from stayfinite.testing import inject

CONFIG = RecoveryConfig(primary_strategy="skip", skip_batch_after_nan=False)

def digest(*tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()

def run(accumulate, **target):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.manual_seed(100 + me)
    batches = list(enumerate(torch.randn(8, 4, 3)))

    def step(batch):
        number, x = batch
        model(x).square().mean().backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

    fault = inject(model, optimizer, at_step=1, rank=1, **target) if target else None
    with (
        stayfinite.watch(model, optimizer, config=CONFIG, sinks=[]) as guard,
        fault or contextlib.nullcontext(),
    ):
        for batch in batches:
            guard.step(step, batch)
    return {
        "parameters": digest(*model.parameters()),
        "all": digest(*model.state_dict().values(), torch.get_rng_state()),
        "incidents": [[i.step, i.diagnosis.cause] for i in guard.incidents],
    }

said = [run(ACCUMULATE, **target) for target in (
    {}, {"gradient": "module.0.weight"}, {"loss": True}, {"inputs": True}, {"module": "module.1"},
)]
"""


@pytest.mark.parametrize("accumulate", [1, 4])
def test_ranks_retry_together(tmp_path: Path, accumulate: int) -> None:
    first, second = answers(tmp_path, TRAINING.replace("ACCUMULATE", str(accumulate)))
    for said in (first, second):
        clean, *faulty = said
        assert clean["incidents"] == []
        assert [run["all"] for run in faulty] == [clean["all"]] * 4
        assert [run["incidents"] for run in faulty] == [[[1, "transient_fault"]]] * 4
    assert first[0]["parameters"] == second[0]["parameters"]
