"""Since when a series of checkpoints is bad, by bisection."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stayfinite.checkpoint import first_bad_checkpoint, save_checkpoint
from stayfinite.errors import InputError


def series(folder: Path, bad_from: int, *, count: int = 9, suffix: str = ".pt") -> list[Path]:
    paths = []
    for number in range(count):
        path = folder / f"step{number}{suffix}"
        value = math.nan if number >= bad_from else 1.0
        state = {"weight": torch.tensor([1.0, value]), "bias": torch.ones(2)}
        save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
        os.utime(path, ns=(number * 10**9, number * 10**9))
        paths.append(path)
    return paths


@pytest.mark.parametrize("bad_from", range(5))
@pytest.mark.parametrize("count", [1, 4])
def test_first_bad_checkpoint_is_found(tmp_path: Path, bad_from: int, count: int) -> None:
    paths = series(tmp_path, bad_from, count=count)
    expected = paths[bad_from] if bad_from < count else None
    assert first_bad_checkpoint(tmp_path) == expected
    assert first_bad_checkpoint([str(path) for path in paths]) == expected


def test_safetensors_are_read_too(tmp_path: Path) -> None:
    paths = series(tmp_path, 3, count=5, suffix=".safetensors")
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    assert first_bad_checkpoint(tmp_path) == paths[3]


def test_few_files_are_read(tmp_path: Path) -> None:
    read: list[Path] = []

    def is_bad(path: Path) -> bool:
        read.append(path)
        return int(path.name) >= 700

    assert first_bad_checkpoint([str(n) for n in range(1000)], is_bad) == Path("700")
    assert len(read) <= 12


def test_empty_folder_has_no_bad_checkpoint(tmp_path: Path) -> None:
    assert first_bad_checkpoint(tmp_path) is None
    assert first_bad_checkpoint([]) is None


def test_wrong_folder_and_broken_file_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        first_bad_checkpoint(tmp_path / "nowhere")
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match=r"broken\.pt cannot be used"):
        first_bad_checkpoint(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        first_bad_checkpoint([tmp_path / "missing.safetensors"])


class Exploit:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("exploited",))


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(1), "code": Exploit()}, tmp_path / "evil.pt")
    with pytest.raises(InputError):
        first_bad_checkpoint(tmp_path)
    assert not (tmp_path / "exploited").exists()


def aged(path: Path | None, seconds: int) -> Path:
    assert path is not None
    os.utime(path, (seconds, seconds))
    return path


def test_files_of_save_checkpoint_are_read_too(tmp_path: Path) -> None:
    series(tmp_path, 2, count=4)
    assert save_checkpoint(tmp_path / "mine.ckpt", model=nn.Linear(2, 1)) is not None
    assert first_bad_checkpoint(tmp_path) is None  # the newest is good

    for path in tmp_path.glob("*.pt"):
        path.unlink()
    bad = nn.Linear(2, 1)
    nn.init.constant_(bad.weight, math.nan)
    save_checkpoint(tmp_path / "later.ckpt", model=bad, if_bad="aside")
    assert first_bad_checkpoint(tmp_path) == tmp_path / "later.ckpt.nonfinite"


def test_generations_come_in_their_order(tmp_path: Path) -> None:
    for _ in range(3):
        save_checkpoint(tmp_path / "last.ckpt", model=nn.Linear(2, 1), keep=3)
    seen: list[str] = []
    first_bad_checkpoint(tmp_path, lambda path: not seen.append(path.name))
    assert seen == ["last.ckpt", "last.ckpt.1", "last.ckpt.2"]


def test_folders_of_transformers_are_a_series(tmp_path: Path) -> None:
    for number, value in enumerate([1.0, math.nan]):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        save_file({"weight": torch.tensor([value])}, folder / "model.safetensors")
        aged(folder, 1000 + number)
    assert first_bad_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_file_without_one_model_is_judged_by_all_its_tensors(tmp_path: Path) -> None:
    for number, value in enumerate([1.0, 2.0, math.inf]):
        nets = {"generator": {"w": torch.ones(2)}, "critic": {"w": torch.tensor([1.0, value])}}
        torch.save(nets, tmp_path / f"{number}.pt")
        aged(tmp_path / f"{number}.pt", 1000 + number)
    assert first_bad_checkpoint(tmp_path) == tmp_path / "2.pt"


def test_mask_is_no_bad_value(tmp_path: Path) -> None:
    mask = torch.triu(torch.full((3, 3), -math.inf), diagonal=1)
    torch.save({"weight": torch.ones(2), "mask": mask}, tmp_path / "a.pt")
    assert first_bad_checkpoint(tmp_path) is None
