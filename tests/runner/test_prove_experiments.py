"""`stayfinite run` makes experiments on the bad step, in place."""

from __future__ import annotations

from typing import Any

import pytest

ONE_BAD_SAMPLE = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    sizes = torch.rand(64, 4) + 0.1
    sizes[37, 2] = 0.0
    loader = DataLoader(TensorDataset(sizes, torch.randn(64, 1)), batch_size=8, {how})
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x, y in loader:
        loss = (model(torch.log(x)) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
TOO_FAST = """
    import torch

    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    for step in range(60):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
TWO_TERMS = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        out = model(torch.randn(5, 3))
        spread = out.square().sum()
        length = (out * (step < 3)).norm(dim=1).clamp(max=9.0).sqrt().sum()
        loss = spread + length
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
LARGE_IN_HALF = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(6):
        x = torch.randn(4, 8) * (3000 if step == 4 else 1)
        with torch.autocast("cpu", dtype=torch.float16):
            out = torch.matmul(model(x), model(x).t())
        loss = out.float().mean().abs()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def diagnosed(scripts: Any, script: str, *options: str) -> dict[str, Any]:
    scripts.write(script)
    never = ("--second-run", "never", "--json", "out.json", "--no-record")
    done = scripts.warm("train.py", options=(*never, *(options or ("--prove", "15"))))
    assert done.code == 3, done.err.decode()
    found: dict[str, Any] = scripts.result()["incidents"][0]["diagnosis"]
    return found


@pytest.mark.parametrize("how", ["num_workers=0", "num_workers=2"])
def test_the_sample_and_its_value_are_found(scripts: Any, how: str) -> None:
    found = diagnosed(scripts, ONE_BAD_SAMPLE.format(how=how))
    said = "\n".join(found["evidence"])
    assert (found["cause"], found["confidence"]) == ("log_of_zero", "proven")
    assert (
        "with the inputs of that operation kept inside its domain, the same step is finite" in said
    )
    assert "row 5 of the batch goes bad alone, and the other 7 rows together are finite" in said
    assert "sample 37 of the dataset TensorDataset" in said
    assert "with value 2 of row 5 taken from row 0, the batch is finite" in said


def test_divergence_is_not_proven_by_what_one_step_shows(scripts: Any) -> None:
    found = diagnosed(scripts, TOO_FAST)
    assert found["cause"] == "lr_too_high"
    assert found["confidence"] != "proven"


def test_more_precision_cures_what_the_lack_of_it_made(scripts: Any) -> None:
    found = diagnosed(scripts, LARGE_IN_HALF)
    assert (found["cause"], found["confidence"]) == ("low_precision_overflow", "proven")
    assert "in float32 the same step is finite" in found["evidence"]


@pytest.mark.parametrize("first_bad", [0, 3])
def test_the_guilty_term_is_found_at_the_very_first_step_too(scripts: Any, first_bad: int) -> None:
    script = TWO_TERMS.replace("step < 3", f"step < {first_bad}")
    said = "\n".join(diagnosed(scripts, script)["evidence"])
    assert "run twice more, went bad the same way" in said
    assert "of the terms of the loss, length goes bad alone, and spread alone is finite" in said


def test_no_time_no_experiments(scripts: Any) -> None:
    found = diagnosed(scripts, TWO_TERMS, "--prove", "0")
    assert not any("run twice more" in said for said in found["evidence"])
