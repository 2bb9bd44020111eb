"""Effects that the interpreter's audit events do not tell of."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from stayfinite.runner.audit import Audit
from stayfinite.runner.imports import after_import

# Changed by `> log` or `| tee log` around us rather than by the script.
_LOGS = frozenset(["", ".txt", ".log", ".out", ".err", ".pyc", ".pyo"])
_SCAN_SECONDS = 0.3
_replaced: list[Any] = []


def note_native_writers(audit: Audit) -> None:
    """Hear of files that torch and safetensors write without the interpreter's knowledge."""

    def torch_serialization(module: ModuleType) -> None:
        writer = module._open_zipfile_writer_file
        theirs = writer.__init__

        def __init__(self: Any, name: Any) -> None:  # noqa: N807
            audit.wrote(name)
            theirs(self, name)

        writer.__init__ = __init__

    def safetensors(module: ModuleType) -> None:
        theirs = module.serialize_file

        def serialize_file(data: Any, filename: Any, *args: Any, **options: Any) -> Any:
            audit.wrote(filename)
            return theirs(data, filename, *args, **options)

        module.serialize_file = serialize_file  # type: ignore[attr-defined]

    after_import("torch.serialization", torch_serialization)
    after_import("safetensors", safetensors)


def note_stdin(audit: Audit) -> None:
    """Hear of it when the script reads a piped standard input, which cannot be read twice."""
    theirs = sys.stdin
    if not isinstance(theirs, io.TextIOWrapper) or theirs.isatty():
        return

    class Noted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            audit.read_stdin()
            return super().readinto(buffer)

        def readall(self) -> bytes:
            audit.read_stdin()
            return super().readall()

    _replaced.append(theirs)
    raw = Noted(theirs.fileno(), "rb", closefd=False)
    raw.name = theirs.buffer.name
    sys.stdin = io.TextIOWrapper(
        io.BufferedReader(raw), encoding=theirs.encoding, errors=theirs.errors
    )
    sys.__stdin__ = sys.stdin  # type: ignore[misc]


def changed_files(folders: set[str], *, since: float, audit: Audit) -> Iterator[str]:
    """Files under the folders that changed since then; looks for a third of a second at most."""
    deadline = time.monotonic() + _SCAN_SECONDS
    todo = sorted(folders)
    while todo and time.monotonic() < deadline:
        for entry in _entries(todo.pop(0)):
            if entry.is_dir(follow_symlinks=False):
                todo.append(entry.path)
            elif _is_changed(entry, since) and not audit.is_temporary(entry.path):
                yield entry.path


def _is_changed(entry: os.DirEntry[str], since: float) -> bool:
    if os.path.splitext(entry.name)[1] in _LOGS or entry.is_symlink():
        return False
    try:
        return entry.stat().st_mtime >= since
    except OSError:
        return False


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
