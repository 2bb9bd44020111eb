"""Adds lines to a run directory, from a thread of its own."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from stayfinite.records import Incident, to_data
from stayfinite.report.store.schema import COLUMNS, SCHEMA, End, LayerRow, RunInfo, StepRow

logger = logging.getLogger("stayfinite")

_MOST_WAITING = 4096  # handed over, each with up to some hundred steps
_PATIENCE = 5.0  # seconds for what is left at the end
_DIGITS = 7


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
        by_optimizer = sorted(rows, key=lambda row: row.optimizer)
        self._add(_steps_line(list(g)) for _, g in groupby(by_optimizer, lambda r: r.optimizer))

    def layers(self, names: Sequence[str], *, optimizer: int = 0) -> None:
        """Name the layers that later `norms` are of."""
        self._add([{"kind": "layers", "optimizer": optimizer, "names": list(names)}])

    def norms(self, row: LayerRow) -> None:
        """Record a sample of the gradients."""
        line = {"kind": "norms", "optimizer": row.optimizer, "step": row.step}
        values = {"norms": _short(row.norms), "headroom": _short(row.headroom)}
        self._add([line | values])

    def incident(self, incident: Incident) -> None:
        self._add([{"kind": "incident", "incident": to_data(incident)}])
        self.flush(timeout=1.0)

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
        if self._is_ours():
            self.flush()
        self._has_failed = True

    def _is_ours(self) -> bool:
        return self._pid == os.getpid()  # else a fork has copied it, without its thread

    def _add(self, lines: Iterable[dict[str, Any]]) -> None:
        if self._has_failed or not self._is_ours():
            return
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
            begin = {"kind": "begin", "schema": SCHEMA, "run": to_data(info)}
            lines = [begin, *lines]
        text = "".join(json.dumps(to_data(line), separators=(",", ":")) + "\n" for line in lines)
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._file, data) :]

    def _open(self, info: RunInfo) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        name = f"rank-{info.rank}"
        for candidate in (f"{name}.jsonl", f"{name}-{info.pid}.jsonl"):
            try:
                file = os.open(self.folder / candidate, flags, 0o666)
            except FileExistsError:
                continue
            self.path = self.folder / candidate
            return file
        raise FileExistsError(f"{self.folder} has the files of this process already")

    def _fail(self, why: str) -> None:
        with self._lock:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("stayfinite records no more in %s: %s", self.folder, why)


def _steps_line(rows: list[StepRow]) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": "steps", "optimizer": rows[0].optimizer}
    for name in COLUMNS:
        values = [getattr(row, name) for row in rows]
        line[name] = [int(v) for v in values] if name in ("step", "skipped") else _short(values)
    names = sorted({name for row in rows for name in row.terms or ()})
    if names:
        line["terms"] = {
            name: _short([(row.terms or {}).get(name) for row in rows]) for name in names
        }
    return line


def _short(values: Iterable[Any]) -> list[float | None]:
    """With the digits that a float32 has."""
    return [None if value is None else float(f"{float(value):.{_DIGITS}g}") for value in values]
