"""Adds lines to a run directory, from a thread of its own.

A run directory has a file `rank-0.jsonl`, and one for each other rank. Lines are only added, each
is a JSON object with its `kind`:

- `begin`: `schema` and `run`, a RunInfo.
- `steps`: columns, a value for each of several steps of one optimizer, null where it is not known.
- `layers`: the names of the layers, whenever they change; of one optimizer.
- `norms`: of one sampled step, a value for each layer: the norm of its gradient, and its headroom,
  the doublings that are left until the largest element overflows its dtype.
- `incident`: a record. `forecast`: likewise.
- `end`: `exit`, `code` and `time`.

`result.json` is there when `stayfinite run` has ended: its incidents are explained best.
Non-finite numbers are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import operator
import os
import platform
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from stayfinite.records import Forecast, Incident, to_data

logger = logging.getLogger("stayfinite")

RUNS = "stayfinite-runs"
SCHEMA = 1
RESULT = "result.json"
_IGNORE = ".gitignore"
COLUMNS = ("step", "time", "seconds", "loss", "norm", "lr", "scale", "skipped")
"""Of a `steps` line. `time` is in seconds since the beginning, `seconds` what the step took,
`skipped` is 1 where the update was left out; `terms` has more columns, by the name of a term."""

_MOST_WAITING = 4096  # handed over, each with up to some hundred steps
_PATIENCE = 5.0  # seconds for what is left at the end
_DIGITS = 7
_FRAMEWORKS = ("lightning", "pytorch-lightning", "transformers", "accelerate", "pytorch-ignite")
_PACKAGES = ("stayfinite", "torch", "numpy", *_FRAMEWORKS, "safetensors")
_MOST_SOURCES = 200
_LARGEST_SOURCE = 1 << 20
_GIT_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What was run, with what, and where."""

    started: float
    script: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""
    rank: int = 0
    world: int = 1
    pid: int = 0
    host: str = ""
    python: str = ""
    platform: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    is_dirty: bool = False
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Files of the script's folder, each with its checksum; what `compare` tells of code."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How the process ended."""

    exit: str
    code: int = 0
    time: float = 0.0


@dataclass(slots=True)
class StepRow:
    """One attempted update."""

    step: int
    time: float
    seconds: float | None = None
    loss: float | None = None
    norm: float | None = None
    lr: float | None = None
    scale: float | None = None
    skipped: bool = False
    terms: dict[str, float] | None = None
    optimizer: int = 0


@dataclass(slots=True)
class LayerRow:
    """The sampled gradients of one step."""

    step: int
    norms: list[float]
    headroom: list[float]
    optimizer: int = 0


class StoreWriter:
    """One rank's file in a run directory, made with the first line.

    Nothing here raises or waits: lines are written by a thread, and when a disk is full or gone,
    that is logged once and the rest is not recorded.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        info: Callable[[], RunInfo],
        *,
        in_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`info` is asked in the thread, before the first line; `in_thread` is called before it."""
        self.folder = Path(folder)
        self.path: Path | None = None
        self._make_info, self._in_thread = info, in_thread
        self._waiting: queue.Queue[list[dict[str, Any]]] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._file: int | None = None
        self._has_failed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def steps(self, rows: Sequence[StepRow]) -> None:
        """Record attempted updates, in order."""
        of = operator.attrgetter("optimizer")
        groups = itertools.groupby(sorted(rows, key=of), key=of)
        self._add(_steps_line(list(group)) for _, group in groups)

    def layers(self, names: Sequence[str], *, optimizer: int = 0) -> None:
        """Name the layers that later `norms` are of."""
        self._add([{"kind": "layers", "optimizer": optimizer, "names": list(names)}])

    def norms(self, row: LayerRow) -> None:
        """Record a sample of the gradients."""
        values = {"norms": _short(row.norms), "headroom": _short(row.headroom)}
        self._add([{"kind": "norms", "optimizer": row.optimizer, "step": row.step, **values}])

    def incident(self, incident: Incident) -> None:
        self._add([{"kind": "incident", "incident": to_data(incident)}])
        self.flush(timeout=1.0)

    def forecast(self, forecast: Forecast) -> None:
        self._add([{"kind": "forecast", "forecast": to_data(forecast)}])

    def end(self, end: End) -> None:
        """Record how it ended, and wait a little until all is written."""
        self._add([{"kind": "end", **to_data(end)}])
        self.close()

    def flush(self, timeout: float = _PATIENCE) -> bool:
        """Wait until all is written, at most so many seconds; whether it is."""
        end = time.monotonic() + timeout
        while self._waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.002)
        return not self._waiting.unfinished_tasks

    def close(self) -> None:
        """Write what is left; later calls record nothing."""
        if self._pid == os.getpid():
            self.flush()
        self._has_failed = True

    def _add(self, lines: Iterable[dict[str, Any]]) -> None:
        if self._has_failed or self._pid != os.getpid():
            return  # the thread is not there in a fork
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stayfinite store", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(list(lines))
        except queue.Full:
            self._fail("its disk is too slow")

    def _work(self) -> None:
        self._in_thread()
        while True:
            lines = self._waiting.get()
            try:
                if not self._has_failed:
                    self._write(lines)
            except Exception as error:
                self._fail(str(error))
            finally:
                self._waiting.task_done()

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._file is None:
            info = self._make_info()
            self._file = self._open(info)
            lines = [{"kind": "begin", "schema": SCHEMA, "run": to_data(info)}, *lines]
        text = "".join(json.dumps(to_data(line), separators=(",", ":")) + "\n" for line in lines)
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._file, data) :]

    def _open(self, info: RunInfo) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.folder.parent.name == RUNS:
            ignore = self.folder.parent / _IGNORE
            with contextlib.suppress(FileExistsError), open(ignore, "x") as written:
                written.write("*\n")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        for name in (f"rank-{info.rank}.jsonl", f"rank-{info.rank}-{info.pid}.jsonl"):
            with contextlib.suppress(FileExistsError):
                file = os.open(self.folder / name, flags, 0o666)
                self.path = self.folder / name
                return file
        raise FileExistsError(f"{self.folder} has the files of this process already")

    def _fail(self, why: str) -> None:
        with self._lock:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("stayfinite stops recording in %s: %s", self.folder, why)


def _steps_line(rows: list[StepRow]) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": "steps", "optimizer": rows[0].optimizer}
    for name in COLUMNS:
        values = [getattr(row, name) for row in rows]
        line[name] = [int(v) for v in values] if name in ("step", "skipped") else _short(values)
    names = sorted({name for row in rows for name in row.terms or ()})
    if names:
        terms = [row.terms or {} for row in rows]
        line["terms"] = {name: _short(each.get(name) for each in terms) for name in names}
    return line


def _short(values: Iterable[Any]) -> list[float | None]:
    """With the digits that a float32 has."""
    return [None if value is None else float(f"{float(value):.{_DIGITS}g}") for value in values]


def new_run_folder(script: str, *, started: float, within: str | os.PathLike[str] = RUNS) -> Path:
    """A path for a run that begins now; nothing is made yet."""
    clock = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
    stem = Path(script).stem or "run"
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem)
    names = (f"{clock}-{name}" + f"-{n}" * (n > 1) for n in itertools.count(1))
    folders = (Path(within).absolute() / name for name in names)
    return next(folder for folder in folders if not os.path.lexists(folder))


def forget_run(folder: str | os.PathLike[str]) -> None:
    """Remove a run that nobody asked for, and the folder of runs if there is no other."""
    path = Path(folder)
    shutil.rmtree(path, ignore_errors=True)
    runs = path.parent
    if runs.name == RUNS and [each.name for each in runs.iterdir()] == [_IGNORE]:
        shutil.rmtree(runs, ignore_errors=True)


def run_info(
    *,
    started: float,
    script: str = "",
    command: tuple[str, ...] = (),
    rank: int = 0,
    world: int = 1,
    seed: int | None = None,
    config: dict[str, Any] | None = None,
) -> RunInfo:
    """The facts of this process; takes some milliseconds, and none of it can fail."""
    folder = Path(script).parent if script else Path.cwd()
    commit, is_dirty = commit_of(folder)
    return RunInfo(
        started=started,
        script=script,
        command=command or tuple(sys.orig_argv),
        cwd=os.getcwd(),
        rank=rank,
        world=world,
        pid=os.getpid(),
        host=socket.gethostname(),
        python=platform.python_version(),
        platform=platform.platform(),
        versions=versions_of(_PACKAGES),
        commit=commit,
        is_dirty=is_dirty,
        seed=seed,
        config=config or {},
        sources=_sources(folder) if script else {},
    )


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit_of(folder: Path) -> tuple[str | None, bool]:
    """The commit that is checked out there, and whether files differ from it; None without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, False
    return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _sources(folder: Path) -> dict[str, str]:
    """The Python files beside the script, and in packages beside it."""
    found: dict[str, str] = {}
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")])[:_MOST_SOURCES]:
        with contextlib.suppress(OSError):
            if path.stat().st_size <= _LARGEST_SOURCE:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
                found[path.relative_to(folder).as_posix()] = digest
    return found
