"""Runs of the script that are ours alone: nothing of the user's can be changed by them.

Three kinds, the strongest first. `overlay`: Linux namespaces; every file system is read-only, with
a copy-on-write view of what can be written laid over it, which is gone when the run ends; only
the loopback network is there. `landlock`: the kernel refuses to write outside our own folder.
`audit`: the interpreter refuses it, and libraries that might write by themselves are not loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
import shutil
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from stayfinite.errors import ConfigError, SandboxError

Kind = Literal["overlay", "landlock", "audit"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VARIABLE = "STAYFINITE_SANDBOX"

_MOST_FOLDERS = 2000  # below the working folder
_LARGEST_VIEW = 4 << 30  # bytes; what a run writes there is in memory
_GENERATED = frozenset(["proc", "sys", "dev", "run"])  # never data of a user's
_OF_THE_SYSTEM = frozenset(["bin", "boot", "etc", "lib", "lib32", "lib64", "sbin", "usr"])

# From the kernel's headers: <sched.h>, <sys/mount.h>, <linux/mount.h>, <linux/landlock.h>.
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_READ_ONLY = 1
_HERE, _AT_RECURSIVE = -100, 0x8000
_MOUNT_SETATTR, _CAPSET = 442, {"x86_64": 126, "aarch64": 91}
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_NO_NEW_PRIVILEGES = 38
_WRITE_FILE = 1 << 1
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove and make, of all sorts
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_SCOPE_SOCKETS, _SCOPE_SIGNALS = 1, 2


def allowed_kinds() -> tuple[Kind, ...]:
    """The kinds that may be used here, strongest first; STAYFINITE_SANDBOX names one alone."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return KINDS
    if chosen not in KINDS:
        raise ConfigError(f"{VARIABLE} is {chosen!r}; it must be one of {', '.join(KINDS)}.")
    return tuple(kind for kind in KINDS if kind == chosen)


def enter(
    folder: str,
    *,
    kinds: Sequence[Kind],
    writable: Sequence[str] = (),
    near: Sequence[str] = (),
    hidden: Sequence[str] = (),
) -> Kind:
    """Hold this process, and all that it starts, in the first kind that works here.

    What is in `folder` can be written and stays; so can the `writable` ones, which in an overlay
    are views too. The script is likely to write in the working folder and in those `near` it.
    `hidden` paths are not there in an overlay. Must come before any thread is started.
    SandboxError has the reason if no kind works.
    """
    problems = []
    for kind in kinds:
        try:
            if kind == "overlay":
                _enter_overlay(folder, hidden, near)
            elif kind == "landlock":
                _enter_landlock((folder, *writable))
        except OSError as error:
            problems.append(f"{kind}: {error.strerror or error}")
            continue
        if kind != "overlay":
            _move_temporary_files(folder)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        return kind
    raise SandboxError("; ".join(problems))


def _move_temporary_files(folder: str) -> None:
    """What the script takes for the temporary folder is one of ours."""
    own = os.path.join(folder, "tmp")
    os.makedirs(own, exist_ok=True)
    tempfile.tempdir = None
    os.environ["TMPDIR"] = own
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = os.path.join(own, name.lower())


def _call(function: Callable[..., int], *args: Any) -> int:
    result = function(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _libc() -> Any:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "only on Linux")
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError(errno.EBUSY, "there are other threads already")
    return ctypes.CDLL(None, use_errno=True)


# overlay


def _enter_overlay(folder: str, hidden: Sequence[str], near: Sequence[str]) -> None:
    libc, cwd = _libc(), os.getcwd()
    elsewhere = [os.path.expanduser("~"), tempfile.gettempdir(), "/var/tmp"]
    places = {os.path.realpath(place): _MOST_FOLDERS for place in (cwd, *near)}
    places = {**dict.fromkeys(map(os.path.realpath, elsewhere), 0), **places}
    could_write = os.access(cwd, os.W_OK)
    sockets = _bound_sockets()
    is_root = _unshare(libc)
    _bring_loopback_up()
    _mount(libc, None, "/", None, _RECURSIVE | _PRIVATE)  # nothing of it reaches the system
    own, uppers = os.open(folder, os.O_PATH), os.path.join(folder, "view")
    os.makedirs(uppers, exist_ok=True)
    with open("/proc/self/mountinfo", "rb") as file:
        escaped = [line.split()[4] for line in file]
    octal = re.compile(rb"\\([0-7]{3})")
    points = {os.fsdecode(octal.sub(lambda m: bytes([int(m[1], 8)]), path)) for path in escaped}
    try:
        _set_read_only(libc, "/", True, recursive=True)
        if os.path.isdir("/dev/shm"):
            _mount(libc, "tmpfs", "/dev/shm", "tmpfs", 0, f"size={_room()}")
        _mount(libc, "tmpfs", uppers, "tmpfs", 0, f"size={_room()},mode=700")
        # Named from here: the full path is hidden once the folder above it has a view.
        os.chdir(uppers)
        _lay_views(libc, points, places, is_root=is_root)
        _mount(libc, f"/proc/self/fd/{own}", folder, None, _BIND)
        _set_read_only(libc, folder, False)
    finally:
        os.close(own)
    for path in sockets:  # else the script could still talk to a server of the system's
        with contextlib.suppress(OSError):
            _mount(libc, "/dev/null", path, None, _BIND)
    os.chdir(cwd)  # by its name, which leads into the view now
    if could_write and not os.access(cwd, os.W_OK):
        raise OSError(errno.EROFS, f"no view can be laid over {cwd}")
    for path in hidden:
        with contextlib.suppress(OSError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    if not is_root:
        _drop_capabilities(libc)
    with contextlib.suppress(OSError):
        _enter_landlock((), scope_only=True)


def _unshare(libc: Any) -> bool:
    """Part from the system's mounts, network and IPC; true if root could do so by itself."""
    new = _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            _call(libc.unshare, new)
            return True
    user, group = os.geteuid(), os.getegid()
    _call(libc.unshare, new | _NEW_USER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return False


def _lay_views(libc: Any, points: set[str], places: dict[str, int], *, is_root: bool) -> None:
    """An overlay over each folder that may hold files of the user's, as high up as possible.

    `points` are the mount points; `places` are where the script is likely to write, with
    how many folders below each. What is written goes to the working folder.
    """
    top = [f"/{name}" for name in os.listdir("/") if name not in _GENERATED | _OF_THE_SYSTEM]
    todo = [path for path in top if os.path.isdir(path) and not os.path.islink(path)]
    number = 0
    while todo:
        path = todo.pop()
        if any(point.startswith(path + "/") for point in points):
            # A view of it would not have what is mounted inside, so each part gets its own.
            with contextlib.suppress(OSError), os.scandir(path) as entries:
                todo += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            continue
        number += 1
        with contextlib.suppress(OSError):  # then it stays read-only
            _lay_view(libc, path, str(number), places, is_root=is_root)


def _lay_view(libc: Any, path: str, name: str, places: dict[str, int], *, is_root: bool) -> None:
    upper, work = f"{name}u", f"{name}w"
    os.mkdir(work)
    _make_like(upper, path)
    if not is_root:
        _make_folders(upper, path, places)
    lower = path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    _mount(libc, "overlay", path, "overlay", 0, options + ("" if is_root else ",userxattr"))


def _make_like(upper: str, path: str) -> None:
    facts = os.stat(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(upper)
    with contextlib.suppress(OSError):  # an owner that this namespace does not know
        os.chown(upper, facts.st_uid, facts.st_gid)
    os.chmod(upper, stat.S_IMODE(facts.st_mode))


def _make_folders(upper: str, path: str, places: dict[str, int]) -> None:
    """Make the folders towards the places, and so many below, in the upper layer.

    In a user namespace the kernel copies no folder that belongs to another user, or to another
    group than the user's first one, and nothing could be written there.
    """
    for place, most in places.items():
        if not place.startswith(path + "/"):
            continue
        folder = path
        for name in place.removeprefix(path + "/").split("/"):
            folder = os.path.join(folder, name)
            _make_like(upper + folder.removeprefix(path), folder)
        for folder, names, _ in itertools.islice(os.walk(place), most):
            for name in names:
                each = os.path.join(folder, name)
                if not os.path.islink(each):
                    _make_like(upper + each.removeprefix(path), each)


def _mount(
    libc: Any, what: str | None, where: str, kind: str | None, flags: int, options: str = ""
) -> None:
    words = [None if word is None else os.fsencode(word) for word in (what, where, kind)]
    _call(libc.mount, *words, ctypes.c_ulong(flags), os.fsencode(options))


def _set_read_only(libc: Any, path: str, is_set: bool, *, recursive: bool = False) -> None:
    attributes = struct.pack("=QQQQ", *((_READ_ONLY, 0) if is_set else (0, _READ_ONLY)), 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    words = (ctypes.c_uint(flags), attributes, ctypes.c_size_t(len(attributes)))
    _call(libc.syscall, _MOUNT_SETATTR, _HERE, os.fsencode(path), *words)


def _room() -> int:
    """Bytes that a run may write before its disk is full: a quarter of the free memory."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return min(_LARGEST_VIEW, int(line.split()[1]) * 1024 // 4)
    return _LARGEST_VIEW // 4


def _bound_sockets() -> list[str]:
    """Files by which programs of this system can be talked to."""
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as file:
        rows = [line.rstrip(b"\n").split(None, 7) for line in file]
        names = {row[7] for row in rows if len(row) == 8 and row[7].startswith(b"/")}
        return sorted(map(os.fsdecode, names))
    return []


def _bring_loopback_up() -> None:
    import fcntl

    set_flags, is_up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, set_flags, struct.pack("16sh14x", b"lo", is_up_and_running))


def _drop_capabilities(libc: Any) -> None:
    # Only good for undoing the above; the user had none of them outside.
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        header = struct.pack("=Ii", 0x20080522, 0)
        _call(libc.syscall, number, header, bytes(24))


# landlock


def _enter_landlock(folders: Sequence[str], *, scope_only: bool = False) -> None:
    """Refuse changes of files outside the folders, and signals to processes that are not ours."""
    libc = _libc()
    version = _call(libc.syscall, _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    handled = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    scope = _SCOPE_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    if scope_only and not scope:
        return
    rules = struct.pack("=QQQ", 0 if scope_only else handled, 0, scope)
    size = ctypes.c_size_t(len(rules))
    ruleset = _call(libc.syscall, _CREATE_RULESET, rules, size, ctypes.c_uint(0))
    try:
        if not scope_only:
            for path in (*folders, "/dev/shm"):
                _allow(libc, ruleset, path, handled)
            _allow(libc, ruleset, "/dev", _WRITE_FILE | (handled & _TRUNCATE))
        _call(libc.prctl, _NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0)))
        _call(libc.syscall, _RESTRICT_SELF, ruleset, ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow(libc: Any, ruleset: int, path: str, access: int) -> None:
    try:
        parent = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    try:
        rule = struct.pack("=Qi", access, parent)
        _call(libc.syscall, _ADD_RULE, ruleset, ctypes.c_int(1), rule, ctypes.c_uint(0))
    finally:
        os.close(parent)
