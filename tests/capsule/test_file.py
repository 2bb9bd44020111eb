"""The file of a capsule: whole, private, and never in the place of something else."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from capsules import small_capsule
from torch import nn

from stayfinite.capsule import file as file_module
from stayfinite.capsule import read_capsule, write_capsule
from stayfinite.capsule.file import Capsule, SourceFile, pack, unpack
from stayfinite.capsule.make import environment, own_code, put_state, state_of, usable
from stayfinite.checkpoint.modules import Members
from stayfinite.errors import CapsuleError
from stayfinite.records import NaNReport, NaNType, TensorSummary


def test_everything_comes_back(tmp_path: Path) -> None:
    made = small_capsule()
    read = read_capsule(write_capsule(tmp_path / "a.capsule", made))
    assert (read.incident, read.code, read.sources) == (made.incident, made.code, made.sources)
    assert (read.seeds, read.versions, read.notes) == (made.seeds, made.versions, made.notes)
    assert torch.equal(read.batch[0][0], made.batch[0][0])
    assert torch.equal(read.batch[0][1]["mask"], made.batch[0][1]["mask"])
    assert read.birth is not None
    assert made.birth is not None
    assert read.birth.nan_type is made.birth.nan_type
    assert torch.equal(read.birth.operation.arguments["self"], torch.ones(3))
    assert isinstance(read.birth.operation.arguments["other"], TensorSummary)
    assert not read.birth.operation.is_whole
    assert read.birth.forward is not None
    assert read.birth.forward.is_whole
    assert read.state is not None
    assert read.state.tensors is not None
    assert read.state.tensors.keys() == {"model.weight"}


def test_capsule_with_the_older_names_of_kinds_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small_capsule()
    report = NaNReport(True, NaNType.NEG_INF, "loss")
    made = replace(made, incident=replace(made.incident, reports=(report,)))

    def as_before(capsule: Capsule) -> Any:
        tree, tensors = pack(capsule)
        text = json.dumps(tree).replace('"pos_inf"', '"inf"').replace('"neg_inf"', '"-inf"')
        return json.loads(text), tensors

    monkeypatch.setattr(file_module, "pack", as_before)
    file = write_capsule(tmp_path / "a.capsule", made)
    assert rb"\"nan_type\":\"inf\"" in file.read_bytes()
    read = read_capsule(file)
    assert read.birth is not None
    assert read.birth.nan_type is NaNType.POS_INF
    assert read.incident.reports == (report,)


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "a.capsule"
    for _ in range(2):
        write_capsule(path, small_capsule())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
    assert os.listdir(tmp_path) == ["a.capsule"]


def test_nothing_but_a_capsule_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for name in ("thesis.tex", ".", "none/a.capsule"):
        with pytest.raises(CapsuleError):
            write_capsule(tmp_path / name, small_capsule())
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_what_is_too_large_is_not_written(tmp_path: Path) -> None:
    huge = replace(small_capsule(), batch=(torch.zeros(200 << 20, dtype=torch.uint8),))
    with pytest.raises(CapsuleError, match="are possible"):
        write_capsule(tmp_path / "a.capsule", huge)
    assert os.listdir(tmp_path) == []


def test_sources_are_unpacked_into_their_folder_only(tmp_path: Path) -> None:
    found = unpack(small_capsule(), tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")}
    assert files == {"project/train.py", "project/parts/net.py", "project-1/net.py"}
    assert found.project == tmp_path / "project"
    assert tmp_path / "project-1" in found.paths


def test_unpacking_refuses_a_name_that_leads_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    bad = replace(small_capsule(), sources=(SourceFile(name="../out.py", text=b""),))
    with pytest.raises(CapsuleError, match="not a plain name"):
        unpack(bad, folder)
    assert os.listdir(tmp_path) == ["in"]


def test_state_comes_back_to_the_byte() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    members = Members(models=(net,), optimizers=(optimizer,))
    state, note = state_of(members)
    assert state is not None
    assert note is None
    before = {name: value.clone() for name, value in net.state_dict().items()}
    moment = optimizer.state[net[0].weight]["exp_avg"].clone()
    optimizer.step()
    net(torch.randn(4, 2))
    put_state(state, members)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(optimizer.state[net[0].weight]["exp_avg"], moment)


def test_state_of_another_model_is_refused() -> None:
    state, _ = state_of(Members(models=(nn.Linear(2, 3),)))
    assert state is not None
    with pytest.raises(CapsuleError, match="another one"):
        put_state(state, Members(models=(nn.Linear(3, 3),)))


def test_large_state_is_only_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stayfinite.capsule.make._LARGEST_STATE", 16)
    state, note = state_of(Members(models=(nn.Linear(2, 3),)))
    assert state is not None
    assert state.tensors is None
    assert note is not None
    assert set(state.digests) == {"model.weight", "model.bias"}
    assert all(len(each) == 32 for each in state.digests.values())
    with pytest.raises(CapsuleError, match="hashes"):
        put_state(state, Members(models=(nn.Linear(2, 3),)))


def test_own_files_are_found_and_installed_ones_are_not() -> None:
    here = Path(__file__).resolve()
    names = [each.name for each in own_code(str(here.parents[1]), str(here)).sources]
    assert "capsule/test_file.py" in names
    assert "support/capsules.py" in names
    assert not any(name.startswith(("torch/", "pytest/", "_pytest/")) for name in names)


def test_only_harmless_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    found = environment()
    assert found["PYTHONHASHSEED"] == "0"
    assert "s3cret" not in found.values()
    hostile = {"LD_PRELOAD": "x.so", "OMP_NUM_THREADS": "1\nX=2", "MKL_NUM_THREADS": "2"}
    assert usable(hostile) == {"MKL_NUM_THREADS": "2"}
