"""`stayfinite preflight`: what it accepts, promises and leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import forks
import pytest

import stayfinite
from stayfinite.cli.script_commands import preflight_command
from stayfinite.prevent.risks import Risk
from stayfinite.records import from_data
from stayfinite.runner.preflight_run import PreflightOptions, show

SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])

TRAINING = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(50):
    p = torch.softmax(net(torch.randn(8, 4)), -1)
    loss = LOSS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, *sys.argv[1:], flush=True)
"""
RISKY = TRAINING.replace("LOSS", "-torch.log(p[:, 0]).mean()")
SOUND = TRAINING.replace("LOSS", "-p[:, 0].mean()")


def start(*words: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, in a process that has torch already."""
    given = ["-m", "stayfinite", "preflight", *map(str, words)]
    return forks.run_text(given, cwd=cwd, env={**os.environ, "PYTHONPATH": SOURCE})


def start_anew(*words: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stayfinite", "preflight", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_surface_is_frozen() -> None:
    flags = {
        option for param in preflight_command.params for option in param.opts if option[:2] == "--"
    }
    fields = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(PreflightOptions)}
    surface = {
        param.opts[0]: param.type.name
        for param in preflight_command.params
        if isinstance(param, click.Option)
    }
    assert flags == fields
    assert surface == {"-m": "boolean", "--json": "text", "--verbose": "boolean"}


def test_a_risky_script_is_ended_after_its_first_step(tmp_path: Path) -> None:
    path = script(tmp_path, RISKY)
    done = start_anew("--json", "found.json", path, "a", "-b", cwd=tmp_path)
    line = next(i for i, text in enumerate(RISKY.splitlines(), 1) if "torch.log" in text)
    data = json.loads((tmp_path / "found.json").read_text())
    (risk,) = [from_data(Risk, entry) for entry in data["risks"]]
    assert done.returncode == 1
    assert done.stdout == "step 0 a -b\n"
    assert data["schema"] == 1
    assert (data["exit"], data["steps"]) == ("risks", 1)
    assert (risk.where, risk.cause, risk.level) == (f"train.py:{line}", "log_of_zero", "medium")
    assert f"train.py:{line}" in done.stderr
    assert done.stderr.rstrip().endswith("1 risk found; the script was ended after its first step.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "train.py"]


def test_a_sound_script_ends_with_code_0(tmp_path: Path) -> None:
    done = start(script(tmp_path, SOUND), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "stayfinite: 0 risks found; the script was ended after its first step.\n"


@pytest.mark.parametrize("width", ["12", "40", "100"])
def test_risks_fit_the_terminal(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    risk = Risk(
        level="high",
        cause="log_of_zero",
        what="log gets a softmax that can be 0, and nothing keeps it away.",
        where="train.py:7",
        fix="Take `log_softmax`.",
        evidence={"code": "loss = -torch.log(p[:, 0]).mean()", "module": "head"},
    )
    show([risk], everything=False)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(" ".join(lines).split()).startswith("high train.py:7 in head log_of_zero")
    assert all(line == line.rstrip() for line in lines)
    assert max(map(len, lines)) <= max(int(width), 20 + 9)


def test_a_loss_that_jumps_after_the_first_update_is_a_risk(tmp_path: Path) -> None:
    text = TRAINING.replace("LOSS", "(net(torch.randn(8, 4)) - 1).square().mean()")
    text = text.replace("lr=0.1", "lr=50")
    start("--json", "found.json", script(tmp_path, text), cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())["risks"]
    line = next(i for i, text in enumerate(TRAINING.splitlines(), 1) if "backward" in text)
    assert (f"train.py:{line}", "lr_too_high") in {(r["where"], r["cause"]) for r in found}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print('hello')", "no backward pass and no optimizer step was seen"),
        ("import torch\nprint('hello')", "no backward pass and no optimizer step was seen"),
        ("raise ValueError('their bug')", "the script failed with exit code 1"),
        ("import sys; sys.exit(7)", "the script failed with exit code 7"),
    ],
)
def test_a_script_that_fails_or_never_trains_ends_with_code_2(
    tmp_path: Path, text: str, words: str
) -> None:
    done = start("--json", "found.json", script(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert json.loads((tmp_path / "found.json").read_text())["exit"] == "script-error"


def test_a_script_without_an_optimizer_is_ended_after_a_few_passes(tmp_path: Path) -> None:
    text = RISKY.replace("optimizer = torch.optim.SGD(net.parameters(), lr=0.1)", "")
    text = text.replace("optimizer.zero_grad()", "").replace("optimizer.step()", "")
    done = start(script(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["step 0", "step 1"]


def test_an_end_that_the_script_catches_comes_again(tmp_path: Path) -> None:
    text = RISKY.replace("    optimizer.step()", "    try:\n        optimizer.step()\n"
                         "    except Exception:\n        pass")  # fmt: skip
    done = start(script(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 1
    assert "torch.log" in done.stderr


def test_a_module_can_be_the_target(tmp_path: Path) -> None:
    script(tmp_path, RISKY, "training.py")
    done = start("-m", "training", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "training.py:" in done.stderr


def test_processes_that_the_script_starts_are_looked_into(tmp_path: Path) -> None:
    script(tmp_path, RISKY, "training.py")
    text = (
        "import torch.multiprocessing as mp\n"
        "def work(rank):\n    import training\n"
        "if __name__ == '__main__':\n    mp.spawn(work, nprocs=1)\n"
    )
    done = start("--json", "found.json", script(tmp_path, text), cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 1, done.stderr
    assert [risk["cause"] for risk in found["risks"]] == ["log_of_zero"]
    assert found["risks"][0]["where"].startswith("training.py:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "there is no script 'nothing.py'"),
        (["--json", "no/such/folder/found.json", "train.py"], "cannot be written"),
    ],
)
def test_what_cannot_be_run_is_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    script(tmp_path, SOUND)
    done = start(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


SAVES = {
    "torch.save": "torch.save(net.state_dict(), 'net.pt')",
    "a file object": "open('net.pt', 'wb').write(b'after one update')",
    "a rename": "import os; os.replace('net.new', 'net.pt')",
    "deleting": "import os; os.remove('net.pt')",
    "a thread": "import threading\n"
    "    thread = threading.Thread(target=torch.save, args=(net.state_dict(), 'net.pt'))\n"
    "    thread.start(); thread.join()",
    "a new folder": "import os; os.makedirs('epoch-1')",
}


@pytest.mark.parametrize("way", SAVES)
def test_a_file_is_not_changed_after_the_first_update(tmp_path: Path, way: str) -> None:
    (tmp_path / "net.pt").write_bytes(b"trained for a week")
    (tmp_path / "net.new").write_bytes(b"")
    done = start(script(tmp_path, f"{RISKY}    {SAVES[way]}\n"), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "step 0\n"
    assert "Traceback" not in done.stderr
    assert (tmp_path / "net.pt").read_bytes() == b"trained for a week"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.new", "net.pt", "train.py"]


def test_what_a_script_saves_when_it_is_ended_is_not_saved(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"trained for a week")
    body = "".join(f"    {line}\n" for line in RISKY.splitlines())
    text = (
        "import atexit\natexit.register(lambda: open('log', 'w'))\n"
        f"try:\n{body}finally:\n    torch.save(net, 'net.pt')\n"
    )
    done = start(script(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "net.pt").read_bytes() == b"trained for a week"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.pt", "train.py"]
