"""What a run was made with: versions, command line, commit, the script's own files."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from stayfinite.report.store.schema import RunInfo

RUNS = "stayfinite-runs"
_PACKAGES = (
    ("stayfinite", "torch", "numpy", "lightning", "pytorch-lightning", "transformers")
    + ("accelerate", "pytorch-ignite", "safetensors")
)  # fmt: skip
_MOST_SOURCES = 200
_LARGEST_SOURCE = 1 << 20
_GIT_SECONDS = 2.0


def new_run_folder(script: str, *, started: float, within: str | os.PathLike[str] = RUNS) -> Path:
    """A path for a run that begins now; nothing is made yet."""
    clock = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
    stem = Path(script).stem or "run"
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem)
    folder = Path(within).absolute() / f"{clock}-{name}"
    number = 2
    while os.path.lexists(folder):
        folder = folder.with_name(f"{clock}-{name}-{number}")
        number += 1
    return folder


def run_info(
    *,
    started: float,
    script: str = "",
    command: tuple[str, ...] = (),
    rank: int = 0,
    world: int = 1,
    seed: int | None = None,
    config: dict[str, Any] | None = None,
) -> RunInfo:
    """The facts of this process; takes some milliseconds, and none of it can fail."""
    folder = Path(script).parent if script else Path.cwd()
    commit, is_dirty = commit_of(folder)
    return RunInfo(
        started=started,
        script=script,
        command=command or tuple(sys.orig_argv),
        cwd=os.getcwd(),
        rank=rank,
        world=world,
        pid=os.getpid(),
        host=socket.gethostname(),
        python=platform.python_version(),
        platform=platform.platform(),
        versions=_versions(),
        commit=commit,
        is_dirty=is_dirty,
        seed=seed,
        config=config or {},
        sources=_sources(folder) if script else {},
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit_of(folder: Path) -> tuple[str | None, bool]:
    """The commit that is checked out there, and whether files differ from it; None without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, False
    return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _sources(folder: Path) -> dict[str, str]:
    """The Python files beside the script, and in packages beside it."""
    found: dict[str, str] = {}
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")])[:_MOST_SOURCES]:
        try:
            if path.stat().st_size <= _LARGEST_SOURCE:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
                found[path.relative_to(folder).as_posix()] = digest
        except OSError:
            continue
    return found
