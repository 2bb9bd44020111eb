"""Capsules of scripts with several ranks: replayed with as many, after the script is gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch.distributed
from click.testing import CliRunner

import stayfinite
from stayfinite.capsule import read_capsule
from stayfinite.capsule.file import Capsule, CodeReference, SourceFile
from stayfinite.capsule.make import with_files
from stayfinite.cli import main
from stayfinite.records import Incident

CASE = Path(__file__).parents[1] / "cases" / "ddp-one-rank-bad-file"
SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])
WISH = ("run", "--no-record", "--prove", "0", "--trace", "--with-batch", "--capsule")
needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="torch was built without gloo"
)

TRAIN = """
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from losses import masked_mean

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
covered = random.randrange(2, 40)  # not seeded: another step in every run
for step in range(40):
    mask = torch.ones(8, 1)
    if dist.get_rank() == 1 and step == covered:
        mask.zero_()
    optimizer.zero_grad()
    masked_mean(model(torch.randn(8, 4)).square(), mask).backward()
    optimizer.step()
"""
LOSSES = """
def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()
"""


def start(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return forks.run_text(words, cwd=cwd, env=env)


def replayed(capsule: Path) -> dict[str, str]:
    """What the replay found, all of it as the capsule says."""
    words = ("-m", "stayfinite", "replay", "--trust", "--json", capsule.name)
    done = start(*words, cwd=capsule.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])["compared"]
    assert all(each["same"] for each in found), found
    return {each["what"]: each["here"] for each in found}


@needs_gloo
def test_ranks_that_a_script_spawns_go_bad_again_elsewhere(tmp_path: Path) -> None:
    work, capsule = tmp_path / "project", tmp_path / "a.capsule"
    work.mkdir()
    shutil.copy(CASE / "train.py", work)
    done = start("-m", "stayfinite", *WISH, str(capsule), "train.py", cwd=work)
    assert done.returncode == 3, done.stderr
    shutil.rmtree(work)
    truth = json.loads((CASE / "truth.json").read_text())
    found = replayed(capsule)
    assert found["line"] == f"train.py:{truth['line']}"
    assert found["step"] == str(truth["first_bad_step"])
    assert read_capsule(capsule).incident.rank == truth["rank"]
    small = CliRunner().invoke(main, ["minimise", str(capsule)])
    assert small.exit_code == 2
    assert "The value came in as data" in small.output


@needs_gloo
def test_ranks_that_torchrun_starts_go_bad_again_elsewhere(tmp_path: Path) -> None:
    work, capsule = tmp_path / "project", tmp_path / "a.capsule"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    (work / "losses.py").write_text(LOSSES)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = start(*launch, "-m", "stayfinite", *WISH, str(capsule), "train.py", cwd=work)
    assert "stayfinite replay" in done.stderr, done.stderr
    shutil.rmtree(work)
    found = replayed(capsule)
    assert (found["operation"], found["line"]) == ("aten.div.Tensor", "losses.py:3")
    read = read_capsule(capsule)
    assert read.code.command == (*launch, "train.py")
    assert {"seeds-rank-0-0.json", "seeds-rank-1-0.json"} <= set(read.seeds)
    small = start("-m", "stayfinite", "minimise", "-o", "small.py", str(capsule), cwd=tmp_path)
    assert small.returncode == 0, small.stderr
    assert start("small.py", cwd=tmp_path).returncode == 1


def test_files_that_only_the_first_process_loads_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_in_the_parent.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("only_in_the_parent")
    own = SourceFile(name="train.py", text=b"pass")
    before = Capsule(incident=Incident(step=1), code=CodeReference(kind="script"), sources=(own,))
    after = with_files(before, str(tmp_path))
    assert [each.name for each in after.sources] == ["train.py", "only_in_the_parent.py"]
    assert set(after.code.digests) == {"only_in_the_parent.py"}
    assert with_files(after, str(tmp_path)) is after
    monkeypatch.delitem(sys.modules, "only_in_the_parent")
