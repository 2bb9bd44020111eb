"""Puts a new text in place of a file's: all of it or nothing, with the old one kept beside it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def keep_copy(path: Path) -> Path:
    """A copy beside the file, FILE.orig; one that is there already is left, and .orig.1 made."""
    data, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    copy, number = path.with_name(f"{path.name}.orig"), 0
    while True:
        try:
            descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            break
        except FileExistsError:
            number += 1
            copy = path.with_name(f"{path.name}.orig.{number}")
    with open(descriptor, "wb") as file:
        file.write(data)
    return copy


def replace_text(path: Path, text: str) -> None:
    """Write the text in one move, with the permissions that the file had."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, stat.S_IMODE(path.stat().st_mode))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
