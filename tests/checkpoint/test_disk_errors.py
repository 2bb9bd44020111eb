"""A full or failing disk: training goes on, and the old checkpoint is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Job, fingerprint
from torch import nn

from stayfinite.checkpoint import load_checkpoint, save_checkpoint, validate_checkpoint
from stayfinite.checkpoint.folder import generations
from stayfinite.errors import CheckpointError

CALLS = ("open", "write", "fchmod", "fsync", "close", "preadv", "link", "replace", "unlink", "stat")


class FailingDisk:
    """os's calls, of which the one with this number fails, and maybe all after it."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, code: int, *, for_good: bool) -> None:
        self.seen: list[str] = []
        self._at, self._code, self._for_good = at, code, for_good
        for name in CALLS:
            patch.setattr(os, name, self._around(name, getattr(os, name)))

    def _around(self, name: str, call: Any) -> Any:
        def shim(*args: Any, **kwargs: Any) -> Any:
            number = len(self.seen)
            self.seen.append(name)
            fails = number >= self._at if self._for_good else number == self._at
            if fails and name == "close":
                call(*args, **kwargs)  # even a failing close closes
            if fails and name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            if fails:
                raise OSError(self._code, os.strerror(self._code))
            return call(*args, **kwargs)

        return shim


@contextlib.contextmanager
def failing_disk(at: int, code: int, *, for_good: bool = False) -> Iterator[FailingDisk]:
    with pytest.MonkeyPatch.context() as patch:
        yield FailingDisk(patch, at, code, for_good=for_good)


def calls_of_a_save(job: Job, path: Path) -> list[str]:
    with failing_disk(10**9, 0) as disk:
        job.save(path)
    return disk.seen


def failure_of_save(model: nn.Module, path: Path) -> str | None:
    try:
        save_checkpoint(path, model=model)
    except CheckpointError as error:
        return str(error)
    return None


def open_files(folder: Path) -> list[str]:
    """Those in the folder, and the folder itself; threads of other tests may open others."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(each for each in found if each.startswith(str(folder)))


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_error_at_every_call_leaves_the_old_or_the_new_file(
    tmp_path: Path, code: int, for_good: bool
) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "last.ckpt"
    for _ in range(2):
        save_checkpoint(path, model=model)
    number = 0
    while True:
        old, before = path.read_bytes(), fingerprint(model)
        with failing_disk(number, code, for_good=for_good) as disk:
            failure = failure_of_save(model, path)
        where = f"call {number}: {disk.seen[number] if number < len(disk.seen) else 'none'}"
        assert failure is None or (os.strerror(code) in failure and "\n" not in failure), where
        assert failure or path.read_bytes() != old, where
        assert fingerprint(model) == before, where
        assert validate_checkpoint(path) == [], where
        older = generations(path)[1:]
        assert any(validate_checkpoint(each) == [] for each in older), where
        assert not open_files(tmp_path), where
        if number >= len(disk.seen):
            break
        number += 1
    assert failure is None
    assert number >= 20
    save_checkpoint(path, model=model)
    # What could not be read again is aside; it pushed nothing out.
    names = {each.name for each in tmp_path.iterdir()} - {"last.ckpt.damaged"}
    assert names == {"last.ckpt", "last.ckpt.1"}


def test_failed_save_before_the_rename_leaves_no_trace(tmp_path: Path) -> None:
    job = Job()
    path = job.save(tmp_path / "last.ckpt")
    old = path.read_bytes()
    first = calls_of_a_save(Job(), tmp_path / "other.ckpt").index("write")
    with failing_disk(first, errno.ENOSPC), pytest.raises(CheckpointError, match="No space left"):
        job.save(path)
    assert path.read_bytes() == old
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last.ckpt", "other.ckpt"]


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_training_goes_on_whichever_call_fails(
    tmp_path: Path, code: int, for_good: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "last.ckpt"
    for _ in range(2):
        Job().save(path)
    count = len(calls_of_a_save(Job(), path))
    expected, job, losses = Job().train(count), Job(), []
    for number in range(count):
        with failing_disk(number, code, for_good=for_good):
            saved = save_checkpoint(path, **job.members(), step=number, on_error="warn")
        assert saved in (path, None)
        assert validate_checkpoint(path) == []
        losses += job.train(1)
    assert losses == expected
    assert f"{os.strerror(code)}. What was there before is unchanged." in caplog.text
    failed = sum("could not be saved" in record.message for record in caplog.records)
    assert failed > count / 2, "most calls matter"


def test_limit_of_the_kernel(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    path = save_checkpoint(tmp_path / "last.ckpt", model=model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save_checkpoint(path, model=model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert validate_checkpoint(path, model) == []
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MB, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no filesystem can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_is_really_full(small_disk: Path) -> None:
    model = nn.Linear(300, 300)  # 361 kB: two fit, a third does not
    path = small_disk / "last.ckpt"
    for value in (1.0, 2.0):
        torch.nn.init.constant_(model.weight, value)
        save_checkpoint(path, model=model)
    torch.nn.init.constant_(model.weight, 3.0)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(path, model=model)
    load_checkpoint(path, model=model)
    assert model.weight[0, 0].item() == 2.0
    assert sorted(each.name for each in small_disk.iterdir()) == ["last.ckpt", "last.ckpt.1"]


def test_read_error_while_loading_leaves_the_model_alone(tmp_path: Path) -> None:
    job = Job()
    job.train(1)
    path = job.save(tmp_path / "last.ckpt")
    job.train(1)
    before = job.bytes()
    with failing_disk(10**9, 0) as disk:
        validate_checkpoint(path)
    for number in (n for n, name in enumerate(disk.seen) if name != "close"):
        with failing_disk(number, errno.EIO), pytest.raises(CheckpointError, match="Input/output"):
            job.load(path)
    assert job.bytes() == before


def test_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    user = os.geteuid()
    tmp_path.chmod(0o500)
    if user == 0:  # who may write everywhere
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            save_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(1, 1))
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
