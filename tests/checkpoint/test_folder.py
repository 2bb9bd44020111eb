"""Generations: the newest at its plain name, older ones beside it, bad ones nowhere."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Job
from torch import nn

from stayfinite.checkpoint import (
    folder,
    latest_good,
    load_checkpoint,
    save_checkpoint,
    validate_checkpoint,
)
from stayfinite.checkpoint.folder import generations


def save(path: Path, step: int, **options: Any) -> Path:
    saved = save_checkpoint(path, model=nn.Linear(1, 1), step=step, **options)
    assert saved is not None
    return saved


def steps(path: Path) -> list[int | None]:
    return [load_checkpoint(each).step for each in generations(path)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spoil(path: Path) -> None:
    """Change a byte on the disk; the other names of the file have their own copy."""
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_so_many_generations_stay(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "last.ckpt"
    for step in range(1, 8):
        save(path, step, keep=keep)
        assert steps(path) == list(range(step, max(0, step - keep), -1))
    assert names(tmp_path) == ["last.ckpt", *(f"last.ckpt.{n}" for n in range(1, keep))]


def test_fewer_generations_can_be_kept_later(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for step in range(1, 6):
        save(path, step, keep=5)
    save(path, 6)
    assert steps(path) == [6, 5]


def test_damaged_file_is_put_aside_and_pushes_no_good_one_out(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for step in (1, 2):
        save(path, step)
    spoil(path)
    save(path, 3)
    assert steps(path) == [3, 1]
    assert names(tmp_path) == ["last.ckpt", "last.ckpt.1", "last.ckpt.damaged"]
    save(path, 4)
    assert steps(path) == [4, 3]


def test_file_that_we_cannot_read_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(b"somebody's life work")
    save(path, 1)
    spoil(path)
    save(path, 2)
    assert (tmp_path / "last.pt.damaged").read_bytes() == b"somebody's life work"
    assert steps(path) == [2]


def test_file_of_another_kind_at_the_path_is_kept_as_a_generation(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save(nn.Linear(1, 1).state_dict(), path)
    save(path, 1)
    assert validate_checkpoint(f"{path}.1") == []
    assert load_checkpoint(f"{path}.1").layout == "torch"


def test_order_of_the_calls_makes_it_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "last.ckpt", 1)
    told: list[str] = []

    def listen(name: str) -> None:
        call = getattr(os, name)

        def heard(*args: Any, **kwargs: Any) -> Any:
            what = "folder" if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode) else ""
            told.append(f"{name} {what}".strip())
            return call(*args, **kwargs)

        monkeypatch.setattr(os, name, heard)

    for name in ("write", "fsync", "preadv", "link", "replace"):
        listen(name)
    save(path, 2)
    written = max(i for i, call in enumerate(told) if call == "write")
    synced, read = told.index("fsync"), told.index("preadv")
    linked, renamed = told.index("link"), told.index("replace")
    assert written < synced < read < linked < renamed < told.index("fsync folder")
    assert "preadv" not in told[linked:]


def test_file_mode_is_kept(tmp_path: Path) -> None:
    path = save(tmp_path / "last.ckpt", 1)
    before = os.umask(0o027)
    try:
        other = save(tmp_path / "other.ckpt", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(other.stat().st_mode) == 0o640
    path.chmod(0o604)
    save(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owner_is_kept(tmp_path: Path) -> None:
    path = save(tmp_path / "last.ckpt", 1)
    os.chown(path, 1234, 2345)
    save(path, 2)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)


def test_link_goes_on_pointing_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = save(tmp_path / "real" / "a.ckpt", 1)
    link = tmp_path / "link.ckpt"
    link.symlink_to(real)
    assert save(link, 2) == real
    assert link.is_symlink()
    assert load_checkpoint(link).step == 2
    assert steps(real) == [2, 1]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_filesystem_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "last.ckpt"
    for step in (1, 2, 3):
        save(path, step)
    assert steps(path) == [3, 2]


def test_names_with_special_characters(tmp_path: Path) -> None:
    path = tmp_path / "a[1]*? é.ckpt"
    for step in (1, 2, 3):
        save(path, step)
    assert steps(path) == [3, 2]
    assert len(names(tmp_path)) == 2


def test_what_killed_processes_left_is_removed_and_living_ones_are_not_disturbed(
    tmp_path: Path,
) -> None:
    dead = tmp_path / ".last.ckpt.0123abcd.saving"
    dead.write_bytes(b"half a file")
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    living = tmp_path / ".last.ckpt.89abcdef.saving"
    words = [sys.executable, "-c", holder + "print(flush=True); sys.stdin.read()", str(living)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        save(tmp_path / "last.ckpt", 1)
        assert names(tmp_path) == [living.name, "last.ckpt"]
        process.communicate()
    save(tmp_path / "last.ckpt", 2)
    assert names(tmp_path) == ["last.ckpt", "last.ckpt.1"]


def test_many_writers_of_one_path(tmp_path: Path) -> None:
    """As when every rank saves: the last one wins, and nothing is torn or left over."""
    path, failures = tmp_path / "last.ckpt", []

    def work(first: int) -> None:
        try:
            for step in range(first, first + 5):
                save(path, step)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(steps(path)) == 2
    assert names(tmp_path) == ["last.ckpt", "last.ckpt.1"]


@pytest.mark.parametrize("was_there", [False, True])
def test_one_that_another_writer_saves_just_before_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_there: bool
) -> None:
    path, wait = tmp_path / "last.ckpt", folder.locked_folder
    if was_there:
        save(path, 1)
        spoil(path)
    writers = [0]

    def another_was_quicker(parent: Path) -> Any:
        writers[0] += 1
        if writers[0] == 2:  # ours has been written and is about to take its place
            save(path, 2)
        return wait(parent)

    monkeypatch.setattr(folder, "locked_folder", another_was_quicker)
    save(path, 3)
    assert steps(path) == [3, 2]
    assert names(tmp_path) == ["last.ckpt", "last.ckpt.1", "last.ckpt.damaged"][: 2 + was_there]


# latest_good


def test_latest_good_is_the_newest_without_error(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    assert latest_good(tmp_path) is None
    assert latest_good(tmp_path / "none") is None
    for step in (1, 2, 3):
        save(path, step, keep=3)
    assert latest_good(tmp_path) == path
    spoil(path)
    assert latest_good(tmp_path) == tmp_path / "last.ckpt.1"
    assert latest_good(path) == tmp_path / "last.ckpt.1"
    spoil(tmp_path / "last.ckpt.1")
    assert latest_good(tmp_path) == tmp_path / "last.ckpt.2"
    spoil(tmp_path / "last.ckpt.2")
    assert latest_good(tmp_path) is None


def test_latest_good_goes_by_the_time_of_saving_not_of_copying(tmp_path: Path) -> None:
    first, second = save(tmp_path / "b.ckpt", 1), save(tmp_path / "a.ckpt", 2)
    os.utime(first, (2e9, 2e9))
    assert latest_good(tmp_path) == second


def test_latest_good_looks_at_others_files_too(tmp_path: Path) -> None:
    good, bad = tmp_path / "epoch1.pt", tmp_path / "epoch2.pt"
    torch.save({"model": nn.Linear(1, 1).state_dict()}, good)
    torch.save({"model": {"weight": torch.tensor([[float("nan")]])}}, bad)
    (tmp_path / "notes.txt").write_text("no checkpoint")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    os.utime(good, (1, 1))
    assert latest_good(tmp_path) == good
    assert latest_good(tmp_path, model=nn.Linear(1, 1)) == good
    assert latest_good(tmp_path, model=nn.Linear(2, 1)) is None


def test_latest_good_leaves_out_what_is_bad(tmp_path: Path) -> None:
    job = Job()
    path = job.save(tmp_path / "last.ckpt")
    job.model.scale.fill_(float("nan"))
    job.save(path, if_bad="aside")
    assert latest_good(tmp_path) == path
