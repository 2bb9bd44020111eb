"""Changes of the source are tried in a run of the script, which itself stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import stayfinite

SOURCE = str(Path(stayfinite.__file__).parents[1])

SCRIPT = """
import torch
from losses import entropy

torch.manual_seed(0)
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.05)
for step in range(40):
    share = torch.softmax(weight, 0)
    if step == 6:
        share = torch.cat([share[:3], share[3:] * 0])
    loss = entropy(share)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LOSSES = """
import torch


def entropy(share):
    return -torch.log(share).mean()
"""


def _run(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "losses.py").write_text(LOSSES)
    command = [sys.executable, "-m", "stayfinite", "run", "--no-record", "--json", "out.json"]
    done = subprocess.run(
        [*command, *options, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    return json.loads((folder / "out.json").read_text())["incidents"][0], done.stderr


def test_a_change_of_an_imported_file_is_tried_and_nothing_is_left_behind(tmp_path: Path) -> None:
    incident, said = _run(tmp_path)
    diagnosis = incident["diagnosis"]
    assert diagnosis["patch"].startswith("--- a/losses.py\n+++ b/losses.py\n")
    assert "finite for all its 40 steps" in diagnosis["evidence"][-1]
    assert diagnosis["confidence"] == "proven"
    assert "With this change" in said
    assert (tmp_path / "losses.py").read_text() == LOSSES
    compiled = list((tmp_path / "__pycache__").glob("losses*.pyc"))
    again = "import losses, inspect, torch; print(losses.entropy(torch.tensor([0.0, 1.0])))"
    shown = subprocess.run(
        [sys.executable, "-c", again], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "tensor(inf)\n", compiled


def test_nothing_is_tried_when_that_is_not_wanted(tmp_path: Path) -> None:
    incident, said = _run(tmp_path, "--prove", "0")
    assert incident["diagnosis"]["patch"] is None
    assert incident["diagnosis"]["confidence"] != "proven"
    assert "trying changes" not in said
