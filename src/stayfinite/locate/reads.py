"""The files that a script reads its data from, heard of by an audit hook."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import deque
from types import CodeType
from typing import Any, NamedTuple

from stayfinite.locate.samples import sample_under_way
from stayfinite.locate.source import Place, user_places

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CODE = (".py", ".pyc", ".pyi", ".so", ".pyd", ".dll", ".pth", ".toml")
_SYSTEM = ("/proc/", "/dev/", "/sys/", "/etc/", "/usr/lib/", "/usr/share/")
_LIBRARIES = tuple(
    {sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib")}
)
_listening: list[Reads] = []
_is_installed = False


class Read(NamedTuple):
    """A file that was opened; by which of the user's functions, and for which sample."""

    path: str
    code: CodeType | None
    sample: Any


class Reads:
    """The last files that were opened for reading while it listened."""

    def __init__(self) -> None:
        self._last: deque[Read] = deque(maxlen=64)
        self.count = 0

    def listen(self) -> None:
        """Hear of files from now on, until `stop`. The hook itself stays with the process."""
        global _is_installed
        if self not in _listening:
            _listening.append(self)
        if not _is_installed:
            _is_installed = True
            sys.addaudithook(_hook)

    def stop(self) -> None:
        if self in _listening:
            _listening.remove(self)

    def opened(self, path: str) -> None:
        frame = sys._getframe(2)
        place = next((p for p in user_places(frame) if not _is_of_package(p)), None)
        if place is None:
            return  # nobody's data: a library at its own work
        if not self._last or self._last[-1].path != path:
            self.count += 1
        self._last.append(Read(path, place.code, sample_under_way(frame)))

    def for_sample(self, sample: Any) -> list[str]:
        """The files that were opened last while this sample was read."""
        found: list[str] = []
        for read in reversed(self._last):
            if read.sample is not None and read.sample == sample:
                found.append(read.path)
            elif found:
                break
        return list(dict.fromkeys(reversed(found)))

    def by(self, code: CodeType | None) -> str | None:
        """The file that was opened last, if this function is who opened it."""
        last = self._last[-1] if self._last else None
        return last.path if last is not None and last.code is code else None

    def latest(self) -> str | None:
        return self._last[-1].path if self._last else None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or not _listening:
        return
    try:
        path, _, flags = args
        if flags & _WRITES or isinstance(path, int) or not isinstance(path, (str, bytes)):
            return
        full = os.path.abspath(os.fsdecode(path))
        if _is_data(full):
            for reads in _listening:
                reads.opened(full)
    except Exception:
        return  # an error here would be raised out of the user's own open()


def _is_of_package(place: Place) -> bool:
    """Whether it is in an installed package, such as one that reads files for others."""
    return "-packages" in place.code.co_filename


def _is_data(path: str) -> bool:
    if path.endswith(_CODE) or path.startswith((*_SYSTEM, *_LIBRARIES)):
        return False
    return f"{os.sep}__pycache__" not in path and f"{os.sep}stayfinite-" not in path
