"""`stayfinite check`: a table, JSON, and an exit code that scripts can use."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from checkpoints import Job, Net
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import stayfinite
from stayfinite.checkpoint import save_checkpoint
from stayfinite.checkpoint.inspect import check, size_on_disk
from stayfinite.cli import main
from stayfinite.cli.check import check_command

SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])

MODELS = """
import torch
from torch import nn

def small():
    return nn.Linear(2, 1)

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(20, 10)

built = nn.Linear(2, 1)
number = 3

def broken():
    raise RuntimeError("no weights today")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_of_the_test.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delitem(sys.modules, "models_of_the_test", raising=False)
    return tmp_path


def run(*words: Any) -> Any:
    return CliRunner().invoke(main, ["check", *map(str, words)])


def test_surface_is_frozen() -> None:
    surface = {p.opts[0]: p.type.name for p in check_command.params if isinstance(p, click.Option)}
    assert surface == {"--model": "text", "--against": "text", "--json": "boolean"}


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from stayfinite.cli import main\n"
        "try: main(['check', '--help'])\n"
        "except SystemExit as request: assert request.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)\n"
    )
    env = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "module:factory" in done.stdout


def test_good_checkpoint_is_0(folder: Path) -> None:
    job = Job()
    job.train(1)
    path = job.save(folder / "last.ckpt")
    done = run(path)
    assert done.exit_code == 0
    *table, verdict = done.stdout.splitlines()
    assert verdict == f"good  {path}: stayfinite, step 1"
    for part in ("model", "optimizer", "scheduler", "scaler", "ema", "random"):
        assert any(line.startswith(f"│ {part} ") for line in table)
    assert done.stderr == ""


def test_problems_are_1_and_all_of_them_are_shown(folder: Path) -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, math.nan)
    nn.init.constant_(model.bias, math.inf)
    torch.save(model.state_dict(), folder / "a.pt")
    done = run(folder / "a.pt")
    assert done.exit_code == 1
    assert "model.weight" in done.stdout
    assert "model.bias" in done.stdout
    assert "2 problems" in done.stdout


def test_damaged_tensor_is_1_and_a_cut_file_is_2(folder: Path) -> None:
    model = nn.Linear(2, 1)
    path = save_checkpoint(folder / "a.ckpt", model=model)
    assert path is not None
    good = path.read_bytes()
    at = good.index(model.weight.detach().numpy().tobytes())
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    done = run(path)
    assert done.exit_code == 1
    assert "the checksum differs" in done.stdout
    path.write_bytes(good[:-1])
    done = run(path)
    assert done.exit_code == 2
    assert done.stdout.startswith("not readable")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_unreadable_is_2(folder: Path, content: bytes) -> None:
    (folder / "a.ckpt").write_bytes(content)
    assert run(folder / "a.ckpt").exit_code == 2
    assert run(folder / "none.ckpt").exit_code == 2


def test_model_that_fits_or_not(folder: Path) -> None:
    save_checkpoint(folder / "a.ckpt", model=nn.Linear(2, 1))
    assert run("a.ckpt", "--model", "models_of_the_test:small").exit_code == 0
    assert run("a.ckpt", "--model", "models_of_the_test:built").exit_code == 0
    done = run("a.ckpt", "--model", "models_of_the_test:Large")
    assert done.exit_code == 1
    assert "model.inner.weight" in done.stdout
    assert str(folder) not in sys.path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "must be module:factory"),
        ("no_such_module:build", "ModuleNotFoundError"),
        ("models_of_the_test:missing", "AttributeError"),
        ("models_of_the_test:broken", "RuntimeError: no weights today"),
        ("models_of_the_test:number", "gave a int; it must give a torch.nn.Module"),
    ],
)
def test_model_that_cannot_be_had_is_one_line(folder: Path, name: str, message: str) -> None:
    save_checkpoint(folder / "a.ckpt", model=nn.Linear(2, 1))
    done = run("a.ckpt", "--model", name)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_json_has_everything(folder: Path) -> None:
    model = Net()
    model.norm.running_var[0] = -1.0
    save_checkpoint(folder / "a.ckpt", model=model, step=4, if_bad="aside")
    done = run("a.ckpt.nonfinite", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    (problem,) = found.pop("problems")
    assert (problem["kind"], problem["key"]) == ("variance", "model.norm.running_var")
    assert found == {
        "schema": 1,
        "path": "a.ckpt.nonfinite",
        "good": False,
        "layout": "stayfinite",
        "step": 4,
        "parts": found["parts"],
        "comparison": None,
    }
    tensors = (*Net().parameters(), *Net().buffers(), torch.ones(1))
    assert found["parts"][0] == {
        "name": "model",
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "dtypes": ["float32", "int64"],
        "largest": 1.0,
    }
    assert [part["name"] for part in found["parts"]] == ["model", "random"]


def test_against_tells_what_differs(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    save_checkpoint(folder / "old.ckpt", model=model)
    torch.save(model.state_dict(), folder / "same.pt")
    done = run("old.ckpt", "--against", "same.pt")
    assert (done.exit_code, "4 the same to the byte, 0 changed" in done.stdout) == (0, True)

    with torch.no_grad():
        model[0].weight.mul_(1e4)
        model[1].bias.add_(0.1)
    save_checkpoint(folder / "new.ckpt", model=model)
    done = run("new.ckpt", "--against", "old.ckpt")
    assert done.exit_code == 0
    assert "2 the same to the byte, 2 changed" in done.stdout
    assert "its largest magnitude went from" in done.stdout

    save_checkpoint(folder / "other.ckpt", model=nn.Sequential(nn.Linear(2, 4).half()))
    done = run("other.ckpt", "--against", "old.ckpt", "--json")
    assert done.exit_code == 1
    kinds = {(p["key"], p["kind"]) for p in json.loads(done.stdout)["problems"]}
    assert {
        ("model.0.weight", "shape"),
        ("model.0.weight", "dtype"),
        ("model.1.weight", "missing"),
    } <= kinds


def series(folder: Path, *values: float) -> Path:
    made = folder / "ckpts"
    made.mkdir()
    for number, value in enumerate(values):
        path = made / f"step-{number}.pt"
        torch.save({"model": {"w": torch.tensor([value])}, "step": number}, path)
        os.utime(path, (1000 + number, 1000 + number))
    return made


def test_every_checkpoint_of_a_folder_is_checked(folder: Path) -> None:
    made = series(folder, 1.0, 2.0, math.nan)
    done = run("ckpts")
    assert done.exit_code == 1
    *table, verdict = done.stdout.splitlines()
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in table if "step-" in line
    ]
    assert [row[:3] for row in rows] == [
        ["good", "step-0.pt", "0"],
        ["good", "step-1.pt", "1"],
        ["bad", "step-2.pt", "2"],
    ]
    assert "model.w: holds NaN" in rows[2][3]
    assert verdict == f"2 of 3 in ckpts good; the newest good one is {Path('ckpts/step-1.pt')}"

    (made / "cut.ckpt").write_bytes(b"cut")
    assert run("ckpts").exit_code == 2
    for bad in ("cut.ckpt", "step-2.pt"):
        (made / bad).unlink()
    assert run("ckpts").exit_code == 0


def test_folder_as_json_has_each_checkpoint(folder: Path) -> None:
    series(folder, 1.0, math.inf)
    found = json.loads(run("ckpts", "--json").stdout)
    assert (found["schema"], found["path"], found["good"]) == (1, "ckpts", False)
    assert [(each["step"], each["good"]) for each in found["checkpoints"]] == [
        (0, True),
        (1, False),
    ]


def test_folder_is_not_compared_with_one(folder: Path) -> None:
    series(folder, 1.0, 2.0)
    done = run("ckpts", "--against", "ckpts/step-0.pt")
    assert done.exit_code == 2
    assert "--against compares one checkpoint, and ckpts has 2." in done.stderr


def test_empty_folder_is_2(folder: Path) -> None:
    (folder / "none").mkdir()
    done = run("none")
    assert done.exit_code == 2
    assert done.stdout.startswith("not readable")


def test_absurd_rate_is_said(folder: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e27)
    save_checkpoint(folder / "a.ckpt", model=model, optimizer=optimizer)
    done = run("a.ckpt")
    assert "the learning rate is 1e+27, which is far too large" in done.stdout
    assert "good, 1 warning" in done.stdout


def test_against_something_unreadable_is_2(folder: Path) -> None:
    save_checkpoint(folder / "a.ckpt", model=nn.Linear(2, 1))
    assert run("a.ckpt", "--against", "none.ckpt").exit_code == 2


@pytest.mark.parametrize("layout", ["ours", "torch", "safetensors"])
def test_progress_comes_as_the_file_is_read(folder: Path, layout: str) -> None:
    model, path = nn.Linear(3000, 1500), folder / "a"
    if layout == "ours":
        save_checkpoint(path, model=model)
    elif layout == "torch":
        torch.save(model.state_dict(), path)
    else:
        save_file(model.state_dict(), path)
    told: list[int] = []
    check(path, progress=told.append)
    assert len(told) > 3
    assert 0.99 < sum(told) / size_on_disk(path) <= 1


def test_progress_bar_is_shown_on_a_terminal_only(folder: Path, monkeypatch: Any) -> None:
    path = save_checkpoint(folder / "a.ckpt", model=nn.Linear(2, 1))
    assert run(path).stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "a.ckpt" in run(path).stderr
