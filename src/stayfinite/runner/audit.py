"""Whether the script changed anything that a second run would change again."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from types import FrameType
from typing import Any

from stayfinite.errors import TrainingAbortedError
from stayfinite.runner.aside import step_aside
from stayfinite.runner.plan import VARIABLE, ours

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_DEVICES = ("/dev/", "/proc/")
# Run by libraries to look at the machine or to compile into temporary folders.
_INDUCTOR = os.path.join("torch", "_inductor", "")
_HARMLESS_PROGRAMS = frozenset(
    ["uname", "ldconfig", "lscpu", "nvidia-smi", "rocm-smi", "file", "objdump", "ptxas"]
    + ["cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "as"]
)
_LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0", "::ffff:127.")


class Audit:
    """Collects the effects of this process; `on_first` is called when there is a first one.

    `before_change` is called before a file or folder is changed, and may forbid it by a
    TrainingAbortedError.
    """

    def __init__(
        self,
        *,
        keep: tuple[str, ...],
        on_first: Callable[[], None],
        before_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.effects: list[str] = []
        self._on_first = on_first
        self._before_change = before_change
        self._made: set[str] = set()
        self._temporary = _temporary_folders()
        self._keep = tuple(
            folder + os.sep
            for folder in {os.path.realpath(k) for k in keep}
            if not any(t.startswith(folder + os.sep) or t[:-1] == folder for t in self._temporary)
        )

    def install(self) -> None:
        """Begin to listen; an audit hook stays until the process ends."""
        judges = {
            "open": self._opened,
            "os.rename": self._renamed,
            "os.link": self._renamed,
            "os.symlink": lambda source, target, *_: self._renamed(target, target),
            "os.remove": self._removed,
            "os.rmdir": self._removed,
            "os.mkdir": self._made_folder,
            "os.truncate": lambda path, *_: self._changed("truncated", path),
            "sqlite3.connect": self._connected_database,
            "socket.connect": self._connected,
            "socket.sendto": self._connected,
            "subprocess.Popen": self._started,
            "os.system": lambda command: self._note("ran a shell command"),
            "os.exec": lambda path, *_: self._note(f"became {path}"),
            "os.posix_spawn": lambda path, *_: self._note(f"ran {path}"),
            "builtins.input": lambda *_: self._note("asked for input"),
        }

        def hook(event: str, args: tuple[Any, ...]) -> None:
            judge = judges.get(event)
            if judge is not None and not getattr(ours, "is_writing", False):
                try:
                    judge(*args)  # type: ignore[operator]
                except TrainingAbortedError:
                    raise
                except Exception:
                    self._note(f"did something that could not be judged ({event})")

        sys.addaudithook(hook)

    def wrote(self, path: Any) -> None:
        """Note a file that native code writes, of which the interpreter hears nothing."""
        self._changed("wrote", path)

    def read_stdin(self) -> None:
        self._note("read its standard input")

    def _opened(self, path: Any, mode: Any, flags: int) -> None:
        if flags & _WRITES and not isinstance(path, int):
            self._changed("wrote", path)

    def _renamed(self, source: Any, target: Any, *fds: int) -> None:
        self._changed("renamed", source, *fds[:1])
        self._changed("renamed", target, *fds[1:2])

    def _made_folder(self, path: Any, mode: int, fd: int = -1) -> None:
        if not os.path.lexists(self._full(os.fsdecode(path), fd)):  # else nothing will come of it
            self._changed("made", path, fd)

    def _removed(self, path: Any, fd: int = -1) -> None:
        self._changed("deleted", path, fd)

    def _connected_database(self, path: Any) -> None:
        if path not in (":memory:", "", b":memory:"):
            self._changed("wrote", path)

    def _connected(self, socket: Any, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if host and not str(host).startswith(_LOOPBACK):
            self._note(f"sent data to {host}")

    def _started(self, program: Any, args: Any, cwd: Any, env: Any) -> None:
        name = os.path.basename(os.fsdecode(program)) if program else ""
        if name in _HARMLESS_PROGRAMS or _is_compiling(sys._getframe(1)):
            return
        if not (env and VARIABLE in env):
            self._note(f"started another program ({name})")

    def _changed(self, what: str, path: Any, fd: int = -1) -> None:
        if not isinstance(path, int):
            full = self._full(os.fsdecode(path), fd)
            if self.is_temporary(full):
                return
            self._before_change()
            if not self._is_of_this_run(full):
                self._note(f"{what} {full}")

    def _full(self, path: str, fd: int) -> str:
        if fd >= 0 and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{fd}"), path)
        folder, name = os.path.split(os.path.abspath(path))
        return os.path.join(os.path.realpath(folder), name)

    def is_temporary(self, path: str) -> bool:
        """Whether a second run may write there: temporary, but not where the script lives."""
        if path.startswith(_DEVICES) or f"{os.sep}__pycache__" in path:
            return True
        path += os.sep  # an unnamed temporary file is opened by the name of its folder
        return path.startswith(self._temporary) and not path.startswith(self._keep)

    def _is_of_this_run(self, path: str) -> bool:
        """Whether the script itself made the file, in a working folder that is temporary."""
        if not (path + os.sep).startswith(self._temporary):
            return False
        if path in self._made or not os.path.lexists(path):
            self._made.add(path)
            return True
        return False

    def _note(self, effect: str) -> None:
        if effect in self.effects or len(self.effects) >= 20:
            return
        self.effects.append(effect)
        if len(self.effects) == 1:
            with step_aside("noting what the script changes"):
                self._on_first()


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether torch.compile is at work, which starts compilers, workers and tools of its own."""
    while frame is not None:
        if _INDUCTOR in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _temporary_folders() -> tuple[str, ...]:
    caches = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    folders = [tempfile.gettempdir(), "/dev/shm", *filter(None, caches)]
    return tuple(sorted({os.path.realpath(folder) + os.sep for folder in folders}))
