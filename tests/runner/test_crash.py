"""A script that a NaN has killed keeps its own words and exit code, and is explained."""

from __future__ import annotations

SCRIPT = """
import torch
from torch.distributions import Normal

scale = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([scale], lr=0.5)
for step in range(9):
    policy = Normal(torch.zeros(2), torch.log(scale) + 1.0)
    loss = policy.scale.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_crash_by_a_nan_is_explained(scripts):
    scripts.write(SCRIPT)
    plain = scripts.plain("train.py")
    done = scripts.warm("train.py", options=("--json", "out.json"))
    result = scripts.result()
    assert plain.code == done.code == 1
    assert done.err.startswith(plain.err)
    assert result["exit"] == "incident"
    (incident,) = result["incidents"]
    assert incident["origin"]["line"] == 8
    assert incident["diagnosis"]["cause"] in ("log_of_negative", "log_of_zero")
