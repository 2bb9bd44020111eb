"""Files that are written whole or not at all, and are on the disk when we say so."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

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
