"""Checkpoints in a folder: older ones beside the newest, each written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from stayfinite.checkpoint.foreign import folder_files, shards_of
from stayfinite.checkpoint.stream import header_of
from stayfinite.checkpoint.values import tree_of
from stayfinite.errors import CheckpointError

# Older checkpoints beside the newest: path, path.1 (the one before), path.2, ...
#
# The newest always has its plain name. It takes the place of the one before in a single rename,
# and an old one goes only when the newest and the one before it have just been read and found
# whole.

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


_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".index.json")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in the folder, oldest first; not those in folders that are none."""
    paths = [path for path in folder.iterdir() if not is_temporary(path)]
    parts = {
        shard for path in paths if path.name.endswith(".index.json") for shard in _shards(path)
    }
    found = [path for path in paths if path not in parts and _is_checkpoint(path)]
    return sorted(found, key=age)


def is_checkpoint_folder(path: Path) -> bool:
    """Whether the folder is itself one checkpoint."""
    return path.is_dir() and (is_dcp_folder(path) or "model" in folder_files(path))


def is_dcp_folder(path: Path) -> bool:
    """Whether torch.distributed.checkpoint has saved it."""
    return (path / ".metadata").is_file()


def age(path: Path) -> tuple[float, int, str]:
    """When it was saved; of two with one time the newer generation counts more."""
    generation = path.suffix[1:]
    try:
        header, is_ours = header_of(path) if path.is_file() else (None, False)
        saved_at = tree_of(header.metadata)["saved_at"] if header and is_ours else None
    except (CheckpointError, KeyError, TypeError):
        saved_at = None
    time = saved_at if isinstance(saved_at, (int, float)) else path.stat().st_mtime
    return time, -int(generation) if generation.isdecimal() else 0, path.name


def _is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return is_checkpoint_folder(path)
    return path.name.endswith(_ENDINGS) or _is_ours(path)


def _shards(index: Path) -> list[Path]:
    try:
        return list(shards_of(index))
    except (CheckpointError, OSError):
        return []


def _is_ours(path: Path) -> bool:
    try:
        return header_of(path)[1]
    except CheckpointError:
        return False


try:
    import fcntl
except ImportError:  # Windows has no such locks; only the tidying up is lost
    fcntl = None  # type: ignore[assignment]

_ENDING = ".saving"


@contextlib.contextmanager
def written_beside(
    path: Path, pieces: Iterable[memoryview], *, is_private: bool = False
) -> Iterator[Path]:
    """A new temporary file in the folder of `path`, complete and on the disk, with path's mode.

    One that is private can be read by its owner only, whatever was there before.

    Within the block it can be renamed; whatever goes wrong, it is removed again. Its descriptor
    stays open and locked all the time, which tells other writers that it is no orphan.
    """
    temporary, descriptor = _create(path, 0o600 if is_private else 0o666)
    try:
        for piece in pieces:
            _write_all(descriptor, piece)
        if not is_private:
            _keep_mode(descriptor, path)
        os.fsync(descriptor)
        _forget_cached(descriptor)
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        with contextlib.suppress(OSError):  # it is on the disk since fsync
            os.close(descriptor)


def is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(_ENDING)


def _create(path: Path, mode: int) -> tuple[Path, int]:
    with locked_folder(path.parent):
        _remove_orphans(path)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_ENDING}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        descriptor = os.open(temporary, flags, mode)
        _lock(descriptor, wait=False)  # says that its writer lives
    return temporary, descriptor


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _keep_mode(descriptor: int, path: Path) -> None:
    """A file that is replaced gives its mode and, where we may, its owner to the new one."""
    try:
        before = os.stat(path)
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError, AttributeError):
        if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(descriptor, before.st_uid, before.st_gid)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _forget_cached(descriptor: int) -> None:
    """So that reading the file back asks the disk, not the memory it was written from."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _remove_orphans(path: Path) -> None:
    """Delete what killed processes left of this path; a living writer holds a lock on its file."""
    if fcntl is None:
        return
    for orphan in path.parent.glob(f".{_escaped(path.name)}.????????{_ENDING}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(orphan, os.O_RDONLY)
            try:
                if _lock(descriptor, wait=False):
                    os.unlink(orphan)
            finally:
                os.close(descriptor)


def _escaped(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[int | None]:
    """One process at a time; gives the folder's descriptor, None where folders cannot be opened."""
    descriptor = _open_folder(folder)
    if descriptor is None:
        yield None
        return
    try:
        _lock(descriptor, wait=True)
        yield descriptor
    finally:
        with contextlib.suppress(OSError):  # nothing was written through it
            os.close(descriptor)  # unlocks


def _open_folder(folder: Path) -> int | None:
    return os.open(folder, os.O_RDONLY) if hasattr(os, "O_DIRECTORY") else None


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Whether we have the lock; filesystems without locks never give it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def sync_folder(descriptor: int | None) -> None:
    """Put the names in the folder on the disk."""
    if descriptor is not None:
        os.fsync(descriptor)
