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

def run(accumulate, *, precision=torch.float32, **target):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    is_half = precision == torch.float16
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=is_half)
    torch.manual_seed(100 + me)
    batches = list(enumerate(torch.randn(8, 4, 3)))

    def step(batch):
        number, x = batch
        with torch.autocast("cpu", dtype=precision, enabled=is_half):
            out = model(x)
        scaler.scale(out.float().square().mean()).backward()
        if (number + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    fault = inject(model, optimizer, at_step=1, rank=1, **target) if target else None
    with (
        stayfinite.watch(model, optimizer, scaler=scaler, config=CONFIG, sinks=[]) as guard,
        fault or contextlib.nullcontext(),
    ):
        for batch in batches:
            guard.step(step, batch)
    return {
        "parameters": digest(*model.parameters()),
        "all": digest(*model.state_dict().values(), torch.get_rng_state()),
        "incidents": [[i.step, i.diagnosis and i.diagnosis.cause] for i in guard.incidents],
        "is_finite": all(bool(p.isfinite().all()) for p in model.parameters()),
    }

"""
RETRIED = """
said = [run(ACCUMULATE, **target) for target in (
    {}, {"gradient": "module.0.weight"}, {"loss": True}, {"inputs": True}, {"module": "module.1"},
)]
"""


@pytest.mark.parametrize("accumulate", [1, 4])
def test_ranks_retry_together(tmp_path: Path, accumulate: int) -> None:
    first, second = answers(tmp_path, TRAINING + RETRIED.replace("ACCUMULATE", str(accumulate)))
    for said in (first, second):
        clean, *faulty = said
        assert clean["incidents"] == []
        assert [run["all"] for run in faulty] == [clean["all"]] * 4
        assert [run["incidents"] for run in faulty] == [[[1, "transient_fault"]]] * 4
    assert first[0]["parameters"] == second[0]["parameters"]


SCALED = """
said = [run(1, precision=torch.float16, **target) for target in ({}, {"loss": True})]
"""


def test_ranks_agree_when_their_scalers_skip(tmp_path: Path) -> None:
    first, second = answers(tmp_path, TRAINING + SCALED)
    for clean, faulty in (first, second):
        assert clean["incidents"] == []
        assert [step for step, _ in faulty["incidents"]] == [1]
        assert faulty["all"] == clean["all"]


HARMED = """
said = [run(1, parameter="module.0.weight")]
"""


def test_ranks_go_back_together_when_one_has_bad_weights(tmp_path: Path) -> None:
    (first,), (second,) = answers(tmp_path, TRAINING + HARMED)
    assert first["is_finite"]
    assert second["is_finite"]
    assert first["parameters"] == second["parameters"]
