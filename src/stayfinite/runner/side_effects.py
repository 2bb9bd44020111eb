"""Whether the script changed anything that a second run would change again."""

from __future__ import annotations

import functools
import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

from stayfinite.errors import TrainingAbortedError
from stayfinite.runner.imports import after_import
from stayfinite.runner.plan import VARIABLE, Effect, ours
from stayfinite.safely import step_aside

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_DEVICES = ("/dev/", "/proc/")
_MEMORY = "/dev/shm/"
_MOST_NOTED, _MOST_MADE = 20, 1000
# Run by libraries to look at the machine or to compile into temporary folders.
_INDUCTOR = os.path.join("torch", "_inductor", "")
_HARMLESS_PROGRAMS = frozenset(
    ["uname", "ldconfig", "lscpu", "nvidia-smi", "rocm-smi", "file", "objdump", "ptxas"]
    + ["cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "as"]
)
_LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0", "::ffff:127.")
# Compiled code that writes files only through the interpreter, or where we hear of it.
_UNHEARD_OF_PYTHON = frozenset(["_dbm", "_gdbm"])
_HEARD_PACKAGES = frozenset(
    ["torch", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "PIL", "yaml", "safetensors"]
    + ["functorch", "markupsafe", "psutil", "regex", "kiwisolver", "contourpy", "mypyc", "_yaml"]
    + ["optree"]
)


class Audit:
    """Tells `on_effect` of each effect of this process before it happens; it may raise.

    Only TrainingAbortedError leaves, and keeps the effect from happening.
    """

    def __init__(self, on_effect: Callable[[Effect], None]) -> None:
        self._on_effect = on_effect

    def install(self) -> None:
        """Begin to listen; an audit hook stays until the process ends."""
        judges: dict[str, Callable[..., None]] = {
            "open": self._opened,
            "os.rename": self._renamed,
            "os.link": self._renamed,
            "os.symlink": lambda source, target, *_: self.wrote(target, "made"),
            "os.remove": lambda path, fd=-1: self.wrote(path, "deleted", fd),
            "os.rmdir": lambda path, fd=-1: self.wrote(path, "deleted", fd),
            "os.mkdir": self._made_folder,
            "os.truncate": lambda path, *_: self.wrote(path, "truncated"),
            "os.chmod": lambda path, mode, fd=-1: self.wrote(path, "changed the rights of", fd),
            "os.chown": lambda path, *_: self.wrote(path, "changed the owner of"),
            "os.utime": lambda path, *_: self.wrote(path, "changed the times of"),
            "os.setxattr": lambda path, *_: self.wrote(path, "changed attributes of"),
            "os.removexattr": lambda path, *_: self.wrote(path, "changed attributes of"),
            "sqlite3.connect": self._connected_database,
            "socket.connect": self._connected,
            "socket.sendto": self._connected,
            "socket.sendmsg": self._connected,
            "subprocess.Popen": self._started,
            "os.system": lambda command: self._tell("ran a shell command"),
            "os.exec": lambda path, *_: self._tell(f"became {path}"),
            "os.posix_spawn": lambda path, *_: self._tell(f"ran {path}"),
            "os.kill": self._signalled,
            "os.killpg": self._signalled,
            "builtins.input": lambda *_: self._tell("asked for input"),
        }

        def hook(event: str, args: tuple[Any, ...]) -> None:
            judge = judges.get(event)
            if judge is not None and not getattr(ours, "is_writing", False):
                try:
                    judge(*args)
                except TrainingAbortedError:
                    raise
                except Exception:
                    self._tell(f"did something that could not be judged ({event})")

        sys.addaudithook(hook)

    def install_for_libraries(self) -> None:
        """Also tell of libraries that might write files without the interpreter's knowledge."""

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "import" and args[1]:
                self._loaded(str(args[0]), str(args[1]))

        sys.addaudithook(hook)

    def wrote(self, path: Any, how: str = "wrote", fd: int = -1) -> None:
        """A file is about to be changed, by the interpreter or by native code."""
        if not isinstance(path, int):
            full = _full(os.fsdecode(path), fd)
            is_new = not os.path.lexists(full)
            self._on_effect(Effect(words=f"{how} {full}", path=full, is_new=is_new))

    def read_stdin(self) -> None:
        self._tell("read its standard input")

    def _tell(self, words: str) -> None:
        self._on_effect(Effect(words=words))

    def _opened(self, path: Any, mode: Any, flags: int) -> None:
        if flags & _WRITES:
            self.wrote(path)

    def _renamed(self, source: Any, target: Any, *fds: int) -> None:
        self.wrote(source, "renamed", *fds[:1])
        self.wrote(target, "renamed", *fds[1:2])

    def _made_folder(self, path: Any, mode: int, fd: int = -1) -> None:
        if not os.path.lexists(_full(os.fsdecode(path), fd)):  # else nothing will come of it
            self.wrote(path, "made", fd)

    def _connected_database(self, path: Any) -> None:
        if path not in (":memory:", "", b":memory:"):
            self.wrote(path)

    def _connected(self, socket: Any, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if host and not str(host).startswith(_LOOPBACK):
            self._tell(f"sent data to {host}")

    def _started(self, program: Any, args: Any, cwd: Any, env: Any) -> None:
        name = os.path.basename(os.fsdecode(program)) if program else ""
        if name in _HARMLESS_PROGRAMS or _is_compiling(sys._getframe(1)):
            return
        if not (env and VARIABLE in env):
            self._tell(f"started another program ({name})")

    def _signalled(self, pid: int, number: int) -> None:
        if number and pid > 0 and os.getsid(pid) != os.getsid(0):
            self._tell(f"sent a signal to process {pid}")

    def _loaded(self, module: str, file: str) -> None:
        package = module.partition(".")[0]
        is_standard = file.startswith((sys.base_prefix, sys.base_exec_prefix))
        is_standard = (
            is_standard and "site-packages" not in file and package not in _UNHEARD_OF_PYTHON
        )
        if not (is_standard or package in _HEARD_PACKAGES):
            self._tell(f"uses {package}, which may write files")


class Effects:
    """Notes what a run of the user's own changes.

    `noted` are effects that a second run would have too, less those on temporary files; `made` are
    all paths that are new, the topmost ones of each tree.
    """

    def __init__(self, *, keep: Sequence[str], on_first: Callable[[], None]) -> None:
        self.noted: list[Effect] = []
        self.made: list[str] = []
        self._on_first = on_first
        caches = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
        folders = [tempfile.gettempdir(), "/dev/shm", *filter(None, caches)]
        self._temporary = tuple(sorted({os.path.realpath(folder) + os.sep for folder in folders}))
        self._keep = tuple(
            folder + os.sep
            for folder in {os.path.realpath(k) for k in keep}
            if not any(t.startswith(folder + os.sep) or t[:-1] == folder for t in self._temporary)
        )

    def note(self, effect: Effect) -> None:
        """Remember the effect; of the first one somebody is told at once."""
        path = effect.path
        if path is not None:
            is_made = any(path == made or path.startswith(made + os.sep) for made in self.made)
            if is_made or path.startswith(_DEVICES) or f"{os.sep}__pycache__" in path:
                return
            if effect.is_new and len(self.made) < _MOST_MADE:
                self.made.append(path)
            if self.is_temporary(path):
                return
        if len(self.noted) < _MOST_NOTED and effect not in self.noted:
            self.noted.append(effect)
            if len(self.noted) == 1:
                with step_aside("noting what the script changes"):
                    self._on_first()

    def clear(self) -> None:
        """Begin anew, in a child process."""
        self.noted.clear()
        self.made.clear()

    def is_temporary(self, path: str) -> bool:
        """Whether the path is in a temporary folder, and not where the script lives."""
        path += os.sep  # an unnamed temporary file is opened by the name of its folder
        return path.startswith(self._temporary) and not path.startswith(self._keep)


class Refusal:
    """Keeps this process from changing anything outside its own folders."""

    def __init__(self, folders: Sequence[str], *, on_refused: Callable[[Effect], None]) -> None:
        self._own = tuple(os.path.realpath(folder) + os.sep for folder in folders)
        self._on_refused = on_refused

    def judge(self, effect: Effect) -> None:
        """Raise TrainingAbortedError if the effect is not allowed."""
        path = effect.path
        if path is not None:
            is_memory = path.startswith(_MEMORY)
            if (path + os.sep).startswith(self._own) or (is_memory and effect.is_new):
                return
            if path.startswith(_DEVICES) and not is_memory:
                return
        self._on_refused(effect)
        raise TrainingAbortedError(f"this run is not the user's own, and {effect.words}.")


def _full(path: str, fd: int) -> str:
    if fd >= 0 and not os.path.isabs(path):
        path = os.path.join(os.readlink(f"/proc/self/fd/{fd}"), path)
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether torch.compile is at work, which starts compilers, workers and tools of its own."""
    while frame is not None:
        if _INDUCTOR in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


_replaced: list[Any] = []


def note_native_writers(audit: Audit) -> None:
    """Hear of files that torch and safetensors write without the interpreter's knowledge."""

    def note(owner: Any, name: str, *, at: int = 1, keyword: str = "") -> None:
        """Tell of the file that the function is given there, before it is called."""
        theirs = getattr(owner, name)

        @functools.wraps(theirs)
        def noted(*args: Any, **options: Any) -> Any:
            if len(args) > at or keyword in options:
                audit.wrote(args[at] if len(args) > at else options[keyword])
            return theirs(*args, **options)

        setattr(owner, name, noted)

    def torch_itself(module: ModuleType) -> None:
        # Native classes whose methods open a file by themselves; public names only lead to them.
        native = module._C
        kineto = getattr(native._autograd, "_ProfilerResult", None)
        for kind in (native.ScriptModule, kineto):
            if kind is not None:
                note(kind, "save")

    for name in ("mkfifo", "mknod"):  # these have no audit event
        if hasattr(os, name):
            note(os, name, at=0)
    # The class behind torch.save, which hands the path to native code.
    after_import(
        "torch.serialization",
        lambda module: note(module._open_zipfile_writer_file, "__init__", keyword="name"),
    )
    after_import("torch", torch_itself)
    after_import("safetensors", lambda module: note(module, "serialize_file", keyword="filename"))


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
