"""Files written whole or not at all, and work that is handed to a thread of its own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
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


def replace_file(path: str | os.PathLike[str], text: str, *, is_durable: bool = False) -> None:
    """Write the text so that a reader sees the old content or the new one, never a part.

    A file that is there keeps its permissions; a durable one is on the disk before this returns.
    """
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


logger = logging.getLogger("stayfinite")
Job = Callable[[], None]
_MOST_WAITING = 100
_PATIENCE_AT_EXIT = 5.0  # seconds


class Background:
    """Runs jobs one after the other in a thread of its own, which starts with the first.

    A job that raises is tried again after each of `pauses`, in seconds; the first one that fails
    for good is logged. When too many wait, new ones are dropped. At the end of the process what
    is left gets a few seconds.
    """

    def __init__(self, name: str, *, pauses: tuple[float, ...] = ()) -> None:
        self._name, self._pauses = name, pauses
        self._waiting: queue.Queue[Job] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._has_complained = False

    def run(self, job: Job) -> None:
        """Have it run soon; returns at once."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
            atexit.register(self.flush)
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            self._complain("too many messages are waiting for %s; the rest are dropped")

    def flush(self, timeout: float = _PATIENCE_AT_EXIT) -> bool:
        """Wait until all is done, at most so many seconds; whether it is."""
        end = time.monotonic() + timeout
        while self._waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)
        return not self._waiting.unfinished_tasks

    def _work(self) -> None:
        while True:
            job = self._waiting.get()
            try:
                self._try(job)
            finally:
                self._waiting.task_done()

    def _try(self, job: Job) -> None:
        for pause in (*self._pauses, None):
            try:
                job()
                return
            except Exception:
                if pause is None:
                    self._complain("%s could not be notified of an incident", trace=True)
                else:
                    time.sleep(pause)

    def _complain(self, message: str, *, trace: bool = False) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning(message, self._name, exc_info=trace)
