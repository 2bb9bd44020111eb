"""A script that stands still, and children of it that go on from there, each under one order."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from stayfinite.explain.experiments.replays import CannotReplayError, Change
from stayfinite.records import Incident, from_json, to_json

_PAUSE = 0.003


@dataclass(frozen=True, kw_only=True)
class Order:
    """How a child goes on, where it writes its answer, and when it has passed the bad step.

    `until` is the tick of the clock at which the step goes bad; None while that is not known.
    """

    change: Change
    answer: str
    until: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a child; `problem` says why nothing can be said.

    The rest describes the step: the tick at which it went bad, and the batch of a loader.
    """

    incident: Incident | None = None
    problem: str | None = None
    clock: int | None = None
    is_diverging: bool = False
    rows: int = 0
    values: int = 0
    indices: tuple[str, ...] = ()
    dataset: str = ""
    why_not: str | None = None


class GoOnError(BaseException):
    """Carries a child out of the experiments and back into the script."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order


class Forks:
    """Children of the process that it is made in."""

    def __init__(self, folder: str, *, name: str, leave: Callable[[], NoReturn]) -> None:
        self._folder, self._name, self._leave = folder, name, leave
        self._count = 0
        self.is_forking = False
        self._holder: int | None = None

    def hold(self) -> None:
        """Leave a child behind that goes on from here whenever `ask` is called."""
        parent, number = os.getpid(), 0
        pid = self._fork()
        if pid:
            self._holder = pid
            return
        while True:
            number += 1
            while not os.path.exists(self._path("order", number)):
                if os.getppid() != parent:
                    self._leave()
                time.sleep(_PAUSE)
            with open(self._path("order", number), encoding="utf-8") as file:
                order = from_json(Order, file.read())
            if not self._fork():
                raise GoOnError(order)
            with contextlib.suppress(ChildProcessError):
                os.wait()

    def ask(self, change: Change, *, until: int | None, seconds: float) -> Answer:
        """What becomes of the script under this change; raises GoOnError in the child.

        CannotReplayError if there is no answer.
        """
        self._count += 1
        path = self._path("answer", self._count)
        order = Order(change=change, answer=path, until=until)
        if self._holder is not None:
            write(self._path("order", self._count), to_json(order))
            return _waited_for(path, seconds=seconds, pid=None)
        pid = self._fork()
        if not pid:
            raise GoOnError(order)
        with _ended(pid):
            return _waited_for(path, seconds=seconds, pid=pid)

    def _fork(self) -> int:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.is_forking = True
        try:
            return os.fork()
        finally:
            self.is_forking = False

    def _path(self, what: str, number: int) -> str:
        return os.path.join(self._folder, f"{what}-{self._name}-{number}.json")


def write(path: str, text: str) -> None:
    """Write the file so that whoever waits for it sees all of it."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


def _waited_for(path: str, *, seconds: float, pid: int | None) -> Answer:
    end = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise CannotReplayError("it took too long")
        if pid is not None and os.waitpid(pid, os.WNOHANG)[0] and not os.path.exists(path):
            raise CannotReplayError("the process was lost")
        time.sleep(_PAUSE)
    with open(path, encoding="utf-8") as file:
        return from_json(Answer, file.read())


@contextlib.contextmanager
def _ended(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
