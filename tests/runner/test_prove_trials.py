"""Changes of the source are tried in a run of the script, which itself stays as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

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


def _run(scripts: Any, *options: str) -> tuple[dict[str, Any], str]:
    scripts.write(SCRIPT)
    scripts.write(LOSSES, "losses.py")
    done = scripts.warm(
        "train.py",
        options=["--no-record", "--json", "out.json", *options],
        env={"PYTHONDONTWRITEBYTECODE": ""},
    )
    assert done.code == 3, done.err.decode()
    return scripts.result()["incidents"][0], done.err.decode()


def test_a_change_of_an_imported_file_is_tried_and_nothing_is_left_behind(scripts: Any) -> None:
    incident, said = _run(scripts, "--prove", "30")
    diagnosis = incident["diagnosis"]
    assert diagnosis["patch"].startswith("--- a/losses.py\n+++ b/losses.py\n")
    assert "finite for all its 40 steps" in diagnosis["evidence"][-1]
    assert diagnosis["confidence"] == "proven"
    assert "With this change" in said
    folder = scripts.folder
    assert (folder / "losses.py").read_text() == LOSSES
    compiled = list((folder / "__pycache__").glob("losses*.pyc"))
    again = "import losses, inspect, torch; print(losses.entropy(torch.tensor([0.0, 1.0])))"
    shown = subprocess.run(
        [sys.executable, "-c", again], cwd=folder, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "tensor(inf)\n", compiled


def test_nothing_is_tried_when_that_is_not_wanted(scripts: Any) -> None:
    incident, said = _run(scripts, "--prove", "0")
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
    scripts: Any, tmp_path: Path
) -> None:
    def run(name: str, *options: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        scripts.folder = tmp_path / name
        scripts.write(WRITES)
        (scripts.folder / "model.pt").write_bytes(b"of another day")
        options = ("--no-record", "--json", str(tmp_path / f"{name}.json"), *options)
        done = scripts.warm("train.py", options=options)
        assert done.code == 3, done.err.decode()
        return scripts.result(f"../{name}.json")["incidents"][0], _files(scripts.folder)

    _, alone = run("alone", "--second-run", "never", "--prove", "0")
    incident, files = run("whole", "--prove", "30")
    assert files == alone
    assert files["model.pt"] == b"of another day"
    assert sorted(files) == sorted(["train.py", "model.pt", "log.txt", *_saved(5)])
    assert (incident["origin"]["exact"], incident["origin"]["line"]) == (True, 13)
    assert "finite for all its 12 steps" in incident["diagnosis"]["evidence"][-1]


def _saved(count: int) -> list[str]:
    return [f"out/{step}.pt" for step in range(count)]


def test_where_writes_are_refused_a_trial_counts_up_to_the_first(scripts: Any) -> None:
    scripts.write(WRITES.split("os.makedirs")[0] + QUIET)
    (scripts.folder / "model.pt").write_bytes(b"of another day")
    scripts.warm(
        "train.py",
        options=["--no-record", "--json", "out.json", "--prove", "30"],
        env={"STAYFINITE_SANDBOX": "landlock"},
    )
    (incident,) = scripts.result()["incidents"]
    assert "finite for 12 steps so far" in incident["diagnosis"]["evidence"][-1]
    assert (scripts.folder / "model.pt").read_bytes() == b"of another day"


QUIET = "\n".join(
    line for line in WRITES.splitlines()[5:] if "log" not in line and "out/" not in line
)
