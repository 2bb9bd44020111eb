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


WRITES = """
import os, torch

os.makedirs("out")  # fails if the run before has left it
log = open("log.txt", "a")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    x = torch.rand(4, 2)
    loss = (model(x).squeeze(1) ** 2).mean()
    if step == 5:
        loss = loss + torch.sqrt((model(x) * 0) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, file=log, flush=True)
    torch.save(model.state_dict(), f"out/{step}.pt")
torch.save(model.state_dict(), "model.pt")
"""


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_script_that_writes_is_explained_and_its_files_stay_as_its_own_run_left_them(
    tmp_path: Path,
) -> None:
    def run(name: str, *options: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(WRITES)
        (folder / "model.pt").write_bytes(b"of another day")
        command = [sys.executable, "-m", "stayfinite", "run", "--no-record"]
        done = subprocess.run(
            [*command, "--json", str(tmp_path / f"{name}.json"), *options, "train.py"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 3, done.stderr
        result = json.loads((tmp_path / f"{name}.json").read_text())
        return result["incidents"][0], _files(folder)

    _, alone = run("alone", "--second-run", "never", "--prove", "0")
    incident, files = run("whole")
    assert files == alone
    assert files["model.pt"] == b"of another day"
    assert sorted(files) == sorted(["train.py", "model.pt", "log.txt", *_saved(5)])
    assert (incident["origin"]["exact"], incident["origin"]["line"]) == (True, 13)
    assert "finite for all its 12 steps" in incident["diagnosis"]["evidence"][-1]


def _saved(count: int) -> list[str]:
    return [f"out/{step}.pt" for step in range(count)]


def test_where_writes_are_refused_a_trial_counts_up_to_the_first(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WRITES.split("os.makedirs")[0] + QUIET)
    (tmp_path / "model.pt").write_bytes(b"of another day")
    command = [sys.executable, "-m", "stayfinite", "run", "--no-record", "--json", "out.json"]
    subprocess.run(
        [*command, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE, "STAYFINITE_SANDBOX": "landlock"},
        capture_output=True,
    )
    (incident,) = json.loads((tmp_path / "out.json").read_text())["incidents"]
    assert "finite for 12 steps so far" in incident["diagnosis"]["evidence"][-1]
    assert (tmp_path / "model.pt").read_bytes() == b"of another day"


QUIET = "\n".join(
    line for line in WRITES.splitlines()[5:] if "log" not in line and "out/" not in line
)
