"""Older checkpoints beside the newest: path, path.1 (the one before), path.2, ...

The newest always has its plain name. It takes the place of the one before in a single rename, and
an old one goes only when the newest and the one before it have just been read and found whole.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from stayfinite.checkpoint.files import locked_folder, sync_folder

logger = logging.getLogger("stayfinite")

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def generations(path: Path) -> list[Path]:
    """The checkpoints under this name that exist, newest first."""
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    found = (re.fullmatch(re.escape(path.name) + r"(?:\.([1-9]\d*))?", name) for name in names)
    return [numbered(path, n) for n in sorted(int(match[1] or 0) for match in found if match)]


def install(temporary: Path, path: Path, *, keep: int, is_whole: Callable[[Path], bool]) -> None:
    """Make the temporary file the newest generation; at most `keep` stay.

    The one before is read again first. If it is damaged it is put aside as path.damaged, so that
    it pushes no good one out; what is there already stays, since it may be anything.
    """
    is_good = os.path.lexists(path) and is_whole(path)
    older = numbered(path, 1) if is_good else Path(f"{path}.damaged")
    with locked_folder(path.parent) as folder:
        if is_good:
            _make_room(path)
        if os.path.lexists(path) and not os.path.lexists(older):
            _step_back(path, older)
        try:
            os.replace(temporary, path)
        except OSError:
            _undo_step_back(path, older)
            raise
        sync_folder(folder)
        if is_good:
            _remove_older(path, keep)


def _make_room(path: Path) -> None:
    """Free the name path.1 by moving up; a gap that an interrupted save left is filled."""
    if _is_same(path, numbered(path, 1)):  # an interrupted save got as far as this
        return
    last = 1
    while os.path.lexists(numbered(path, last)):
        last += 1
    for number in range(last, 1, -1):
        os.replace(numbered(path, number - 1), numbered(path, number))


def _step_back(path: Path, older: Path) -> None:
    """Give the present file its older name too; where there are no links, instead."""
    try:
        os.link(path, older)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.replace(path, older)


def _undo_step_back(path: Path, older: Path) -> None:
    if not os.path.lexists(path) and os.path.lexists(older):
        os.replace(older, path)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _remove_older(path: Path, keep: int) -> None:
    for old in generations(path)[keep:]:
        try:
            os.unlink(old)
        except OSError as error:  # the new checkpoint is safe: no reason to fail
            logger.warning("stayfinite could not remove the old checkpoint %s: %s", old, error)
