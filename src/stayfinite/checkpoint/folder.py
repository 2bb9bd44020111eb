"""Checkpoints in a folder: older ones beside the newest, each written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import re
import secrets
import shutil
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


def generation_of(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def generations(path: Path) -> list[Path]:
    """The checkpoints under this name that exist, newest first."""
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    found = (re.fullmatch(re.escape(path.name) + r"(?:\.([1-9]\d*))?", name) for name in names)
    return [generation_of(path, n) for n in sorted(int(match[1] or 0) for match in found if match)]


def install(temporary: Path, path: Path, *, keep: int, is_whole: Callable[[Path], bool]) -> None:
    """Make the temporary file or folder the newest generation; at most `keep` stay.

    The one before is read again first. If it is damaged it is put aside as path.damaged, so that
    it pushes no good one out; what is there already stays, since it may be anything. A folder
    can take no other's place: between two renames there is only the one before, as path.1.
    """
    judged = _identity(path)
    is_good = judged is not None and is_whole(path)
    with locked_folder(path.parent) as folder:
        if _identity(path) != judged:  # another writer has put its own there since
            is_good = os.path.lexists(path) and is_whole(path)
        older = generation_of(path, 1) if is_good else Path(f"{path}.damaged")
        if is_good:
            _make_room(path)
        if os.path.lexists(path) and not os.path.lexists(older):
            try:
                os.link(path, older)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                os.replace(path, older)
        elif path.is_dir():
            _remove_folder(path, of=path)
        try:
            os.replace(temporary, path)
        except OSError:
            if not os.path.lexists(path) and os.path.lexists(older):
                os.replace(older, path)
            raise
        if folder is not None:
            os.fsync(folder)  # puts the names in the folder on the disk
        for old in generations(path)[keep:] if is_good else ():
            try:
                _remove_folder(old, of=path) if old.is_dir() else os.unlink(old)
            except OSError as error:  # the new checkpoint is safe: no reason to fail
                logger.warning("stayfinite could not remove the old checkpoint %s: %s", old, error)


def _identity(path: Path) -> tuple[int, ...] | None:
    """Tells one file or folder from another of the same name; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _make_room(path: Path) -> None:
    """Free the name path.1 by moving up; a gap that an interrupted save left is filled."""
    with contextlib.suppress(OSError):
        if os.path.samefile(path, generation_of(path, 1)):  # an interrupted save got as far
            return
    last = 1
    while os.path.lexists(generation_of(path, last)):
        last += 1
    for number in range(last, 1, -1):
        os.replace(generation_of(path, number - 1), generation_of(path, number))


_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".index.json")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in the folder, oldest first; not those in folders that are none."""
    # One that is being written, or was when its writer was killed, is none.
    paths = [path for path in folder.iterdir() if not path.match(f".*{_TEMPORARY}")]
    parts: set[Path] = set()
    for path in paths:
        if path.name.endswith(".index.json"):
            with contextlib.suppress(CheckpointError, OSError):
                parts |= shards_of(path).keys()
    return sorted((path for path in paths if path not in parts and _is_checkpoint(path)), key=age)


def _is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return is_checkpoint_folder(path)
    try:
        return path.name.endswith(_ENDINGS) or header_of(path)[1]
    except CheckpointError:
        return False


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


try:
    import fcntl
except ImportError:  # Windows has no such locks; only the tidying up is lost
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = ".saving"


def temporary_beside(path: Path, token: str) -> Path:
    """Where the next generation of `path` is written."""
    return path.with_name(f".{path.name}.{token}{_TEMPORARY}")


@contextlib.contextmanager
def folder_beside(path: Path, token: str) -> Iterator[Path]:
    """A temporary folder, which may be renamed within the block and is removed if that fails.

    As with files, a lock tells other writers that it is no orphan.
    """
    temporary = temporary_beside(path, token)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(path.parent):
        _remove_orphans(path)
        temporary.mkdir(exist_ok=True)
        lock = contextlib.ExitStack()
        lock.enter_context(locked_folder(temporary))
    try:
        with lock:
            yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_folder(folder: Path, *, of: Path) -> None:
    """Delete a generation; if that is interrupted, what is left of it is an orphan."""
    orphan = temporary_beside(of, secrets.token_hex(4))
    os.replace(folder, orphan)
    shutil.rmtree(orphan)


@contextlib.contextmanager
def written_beside(
    path: Path, pieces: Iterable[memoryview], *, is_private: bool = False
) -> Iterator[Path]:
    """A new temporary file in the folder of `path`, complete and on the disk, with path's mode.

    One that is private can be read by its owner only, whatever was there before.

    Within the block it can be renamed; whatever goes wrong, it is removed again. Its descriptor
    stays open and locked all the time, which tells other writers that it is no orphan.
    """
    temporary = temporary_beside(path, secrets.token_hex(4))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with locked_folder(path.parent):
        _remove_orphans(path)
        descriptor = os.open(temporary, flags, 0o600 if is_private else 0o666)
        _lock(descriptor, wait=False)  # says that its writer lives
    try:
        for piece in pieces:
            while piece:
                piece = piece[os.write(descriptor, piece) :]
        if not is_private:
            _keep_mode(descriptor, path)
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # reading back asks the disk, not the memory
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        with contextlib.suppress(OSError):  # it is on the disk since fsync
            os.close(descriptor)


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


def _remove_orphans(path: Path) -> None:
    """Delete what killed processes left of this path; a living writer holds a lock on its file."""
    if fcntl is None:
        return
    for orphan in path.parent.glob(f".{glob.escape(path.name)}.????????{_TEMPORARY}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(orphan, os.O_RDONLY)
            try:
                if _lock(descriptor, wait=False):
                    shutil.rmtree(orphan) if orphan.is_dir() else os.unlink(orphan)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[int | None]:
    """One process at a time; gives the folder's descriptor, None where folders cannot be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=True)
        yield descriptor
    finally:
        with contextlib.suppress(OSError):  # nothing was written through it
            os.close(descriptor)  # unlocks


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Whether we have the lock; filesystems without locks never give it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
