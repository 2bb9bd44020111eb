"""Runs as the dashboard reads them while they are written, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stayfinite.report.store.reading import RankFile, Run, is_run, runs_in
from stayfinite.report.store.writer import SCHEMA

logger = logging.getLogger("stayfinite")

_PAUSE = 0.3  # seconds between two looks at the files
_MOST_OPEN = 8  # runs whose steps are kept


@dataclass
class Entry:
    """One run of the shelf; `live` when a page has asked for its steps."""

    path: Path
    glance: GlancedRun
    live: LiveRun | None = None
    asked: float = 0.0
    is_read: bool = False

    @property
    def id(self) -> str:
        return id_of(self.path)


@dataclass
class Shelf:
    """The runs in some places; a place is a run directory, or a folder with several."""

    places: Sequence[Path]
    entries: dict[str, Entry] = field(default_factory=dict)
    has_looked: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)
    _wake: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="stayfinite ui", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def open(self, identity: str) -> LiveRun | None:
        """The run, whose steps are read from now on; None if there is no such run."""
        entry = self.entries.get(identity)
        if entry is None:
            return None
        entry.asked = time.monotonic()
        if entry.live is None:
            entry.live = LiveRun(entry.path)
            self._wake.set()
        return entry.live

    def look(self) -> None:
        """Find new runs, and read on in all; in open ones, all steps."""
        found = [path for place in self.places for path in _runs_at(place)]
        for gone in set(self.entries) - {id_of(path) for path in found}:
            del self.entries[gone]
        for path in sorted(found, key=lambda each: each.name, reverse=True):
            entry = self.entries.get(id_of(path)) or Entry(path, GlancedRun(path))
            entry.glance.refresh()
            self.entries[entry.id] = entry
        self.has_looked = True
        for entry in list(self.entries.values()):
            if entry.live is not None:
                entry.live.refresh()
                entry.is_read = True
        self._close_some()

    def _close_some(self) -> None:
        opened = [entry for entry in self.entries.values() if entry.live is not None]
        for entry in sorted(opened, key=lambda each: -each.asked)[_MOST_OPEN:]:
            entry.live, entry.is_read = None, False

    def _work(self) -> None:
        has_failed = False
        while not self._stop.is_set():
            try:
                self.look()
            except Exception:
                if not has_failed:
                    logger.exception("stayfinite ui cannot read the runs")
                has_failed = True
            self._wake.wait(_PAUSE)
            self._wake.clear()


def id_of(path: Path) -> str:
    """What a page calls the run; no path comes from a page."""
    return hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]


def _runs_at(place: Path) -> list[Path]:
    return [place] if is_run(place) else runs_in(place)


_STEPS = b'{"kind":"steps"'
_SKIPPED = (_STEPS, b'{"kind":"norms"', b'{"kind":"layers"')


class Glance(RankFile):
    """A rank's file without its steps, of which only the last line is kept."""

    last_line = b""

    def take(self, line: bytes) -> None:
        if line.startswith(_STEPS):
            self.last_line = line
        if not line.startswith(_SKIPPED):
            super().take(line)

    @property
    def last(self) -> dict[str, Any]:
        """The last value of each column."""
        try:
            data = json.loads(self.last_line)
            return {name: values[-1] for name, values in data.items() if isinstance(values, list)}
        except (ValueError, IndexError):
            return {}


class GlancedRun(Run):
    """A run for the list: what it was, how far it is, how it ended."""

    _seen: tuple[Any, ...] = ()

    def rank_file(self, path: Path) -> RankFile:
        return Glance(path)

    @property
    def steps(self) -> int:
        found = [rank.last.get("step") for rank in self.ranks if isinstance(rank, Glance)]
        return max((step + 1 for step in found if isinstance(step, int)), default=0)

    @property
    def last(self) -> dict[str, Any]:
        first = self.ranks[0] if self.ranks else None
        return first.last if isinstance(first, Glance) else {}

    @property
    def has_begun(self) -> bool:
        return any(rank.read for rank in self.ranks)

    @property
    def problem(self) -> str | None:
        """Why it cannot be shown, in one line."""
        schemas = [rank.schema for rank in self.ranks if rank.schema != SCHEMA]
        if schemas:
            return (
                f"It has schema {schemas[0]}; this version reads schema {SCHEMA}. "
                "Upgrade stayfinite to read it."
            )
        if self.has_begun and not self.ranks[0].info.started:
            return "Its first line cannot be read, so it is not known what was run."
        return None

    @property
    def version(self) -> str:
        """The same for the same content, also after the server was started again."""
        return f"{sum(rank.read for rank in self.ranks)}-{int(self.result is not None)}"

    def refresh(self) -> bool:
        """Read on, if a file has changed."""
        seen = _signature(self.path)
        if seen == self._seen:
            return False
        self._seen = seen
        return super().refresh()


class LiveRun(GlancedRun):
    """A run with the steps of its first rank."""

    def rank_file(self, path: Path) -> RankFile:
        is_first = path.name.startswith("rank-0")
        return RankFile(path, new_series=Columns) if is_first else Glance(path)

    @property
    def optimizers(self) -> dict[int, Columns]:
        return self.ranks[0].series if self.ranks else {}

    def columns(self, optimizer: int | None = None) -> Columns:
        """Of one optimizer, by default the first; without steps if there is none."""
        found = self.optimizers
        if optimizer is None and found:
            optimizer = min(found)
        return found.get(optimizer or 0) or Columns()

    @property
    def steps(self) -> int:
        lasts = [columns["step"][-1] + 1 for columns in self.optimizers.values() if len(columns)]
        return max(lasts, default=0)

    @property
    def progress(self) -> float:
        """How much of the first rank's file was read."""
        if not self.ranks:
            return 0.0
        try:
            size = self.ranks[0].path.stat().st_size
        except OSError:
            return 1.0
        return min(1.0, self.ranks[0].read / size) if size else 1.0


def _signature(folder: Path) -> tuple[Any, ...]:
    try:
        with os.scandir(folder) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return ("gone",)
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


_KINDS = {"step": "q", "skipped": "b"}
_KEPT = ("step", "seconds", "loss", "norm", "lr", "scale", "skipped")


class Columns:
    """Takes the place of a Series; one thread adds, others read under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.layers: list[str] = []
        self.heat = Heat()
        self.lasted = 0.0
        self.terms: dict[str, array[Any]] = {}
        self._columns = {name: array(_KINDS.get(name, "f")) for name in _KEPT}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def __getitem__(self, name: str) -> array[Any]:
        return self._columns[name]

    def add_steps(self, columns: dict[str, list[Any]], terms: dict[str, list[Any]]) -> None:
        new = {name: _packed(columns[name], name) for name in _KEPT}
        more = {name: _packed(values) for name, values in terms.items()}
        before, count = len(self), len(columns["step"])
        with self.lock:
            for name, values in new.items():
                self._columns[name].extend(values)
            for name in dict.fromkeys((*self.terms, *more)):
                if name not in self.terms:
                    self.terms[name] = array("f", [UNKNOWN]) * before
                self.terms[name].extend(more.get(name) or array("f", [UNKNOWN]) * count)
            self.lasted = next((t for t in reversed(columns["time"]) if t is not None), self.lasted)

    def add_norms(self, step: int, norms: list[Any], headroom: list[Any]) -> None:
        sampled = np.array(_packed(norms)), np.array(_packed(headroom))
        with self.lock:
            self.heat.add(step, self.layers, *sampled)

    def view(self, name: str) -> np.ndarray[Any, Any]:
        """The column itself, not a copy: only under `lock`, and gone before it is given back."""
        column = self.terms[name.removeprefix("term:")] if name.startswith("term:") else self[name]
        return np.frombuffer(column, dtype=column.typecode)


def _packed(values: list[Any], name: str = "") -> array[Any]:
    kind = _KINDS.get(name, "f")
    try:
        return array(kind, values)
    except TypeError:
        missing = UNKNOWN if kind == "f" else 0
        return array(kind, [missing if value is None else value for value in values])


Row = np.ndarray[Any, np.dtype[np.float32]]

MOST = 512  # columns; when there are more, two become one
UNKNOWN = float(np.finfo(np.float32).min)
"""What was not recorded; NaN is a value like any other here."""


class Heat:
    """Columns of samples, each the worst of as many samples as the others have.

    The worst norm is the largest, NaN before Inf before any number; the worst headroom the least.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.steps: list[int] = []
        self.norms: list[Row] = []
        self.headroom: list[Row] = []
        self._each = 1  # samples in a column
        self._inside = 0  # samples in the last one

    def add(self, step: int, layers: list[str], norms: Row, headroom: Row) -> None:
        places = [self.names.setdefault(name, len(self.names)) for name in layers]
        rows = [_spread(values, places, len(self.names)) for values in (norms, headroom)]
        if self.steps and self._inside < self._each:
            self.norms[-1] = worst_norm(self.norms[-1], rows[0])
            self.headroom[-1] = least(self.headroom[-1], rows[1])
            self._inside += 1
            return
        self.steps.append(step)
        self.norms.append(rows[0])
        self.headroom.append(rows[1])
        self._inside = 1
        if len(self.steps) > MOST:
            self._halve()

    def table(self, kind: str, *, most: int, first: int = 0, last: int = 1 << 62) -> Table:
        """Steps and values (layers x steps), at most so many columns; headroom if kind says so."""
        rows, pick = (self.headroom, least) if kind == "headroom" else (self.norms, worst_norm)
        chosen = [n for n, step in enumerate(self.steps) if first <= step <= last]
        each = -(-len(chosen) // max(most, 1)) or 1
        groups = [chosen[start : start + each] for start in range(0, len(chosen), each)]
        merged = [_fold([self._full(rows[n]) for n in group], pick) for group in groups]
        steps = [self.steps[group[0]] for group in groups]
        if not merged:
            return steps, np.empty((len(self.names), 0), np.float32)
        return steps, np.stack(merged, axis=1).astype(np.float32)

    def history(self, name: str) -> dict[str, list[Any]] | None:
        """One layer at every column; None if there is no such layer."""
        place = self.names.get(name)
        if place is None:
            return None
        return {
            "steps": list(self.steps),
            "norms": [float(self._full(row)[place]) for row in self.norms],
            "headroom": [float(self._full(row)[place]) for row in self.headroom],
        }

    def _full(self, row: Row) -> Row:
        return _lengthened(row, len(self.names))

    def _halve(self) -> None:
        pairs = range(0, len(self.steps), 2)
        self._inside += self._each if len(self.steps) % 2 == 0 else 0
        self.norms = [_fold(self.norms[n : n + 2], worst_norm) for n in pairs]
        self.headroom = [_fold(self.headroom[n : n + 2], least) for n in pairs]
        self.steps = self.steps[::2]
        self._each *= 2


Table = tuple[list[int], Row]


def worst_norm(one: Row, other: Row) -> Row:
    one, other = _alike(one, other)
    return np.maximum(one, other)  # NaN wins, and what is unknown is the least number


def least(one: Row, other: Row) -> Row:
    one, other = _alike(one, other)
    known = np.where(one == UNKNOWN, other, one)
    return np.minimum(known, np.where(other == UNKNOWN, known, other))


def _fold(rows: list[Row], pick: Any) -> Row:
    found = rows[0]
    for row in rows[1:]:
        found = pick(found, row)
    return found


def _alike(one: Row, other: Row) -> tuple[Row, Row]:
    size = max(len(one), len(other))
    return _lengthened(one, size), _lengthened(other, size)


def _lengthened(row: Row, size: int) -> Row:
    missing = size - len(row)
    return np.pad(row, (0, missing), constant_values=UNKNOWN) if missing else row


def _spread(values: Row, places: list[int], size: int) -> Row:
    row = np.full(size, UNKNOWN, np.float32)
    row[places] = values
    return row
