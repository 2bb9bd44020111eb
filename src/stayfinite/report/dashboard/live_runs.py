"""Runs as the dashboard reads them while they are written, in bounded memory."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stayfinite.report.store.reading import Range, RankFile, Run, is_run, runs_in
from stayfinite.report.store.writer import SCHEMA
from stayfinite.safely import Safely

_PAUSE = 0.3  # seconds between two looks at the files
_MOST_OPEN = 8  # runs whose steps are kept


@dataclass
class Entry:
    """One run of the index; `live` when a page has asked for its steps."""

    path: Path
    glance: GlancedRun
    live: LiveRun | None = None
    asked: float = 0.0
    is_read: bool = False

    @property
    def id(self) -> str:
        return id_of(self.path)


@dataclass
class RunIndex:
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

    def known(self, identity: str) -> GlancedRun | None:
        """What the list knows of the run: its incidents, while its steps are still read."""
        entry = self.entries.get(identity)
        return entry.glance if entry is not None else None

    def look(self) -> None:
        """Find new runs, and read on in all; in open ones, all steps."""
        at_places = [[place] if is_run(place) else runs_in(place) for place in self.places]
        found = [path for paths in at_places for path in paths]
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
        opened = [entry for entry in self.entries.values() if entry.live is not None]
        for entry in sorted(opened, key=lambda each: -each.asked)[_MOST_OPEN:]:
            entry.live, entry.is_read = None, False

    def _work(self) -> None:
        safely = Safely("stayfinite ui cannot read the runs")
        while not self._stop.is_set():
            with safely:
                self.look()
            self._wake.wait(_PAUSE)
            self._wake.clear()


def id_of(path: Path) -> str:
    """What a page calls the run; no path comes from a page."""
    return hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]


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

    _seen: object = ()  # of its files: name, size and time of change; None when it is gone

    def rank_file(self, path: Path) -> RankFile:
        return Glance(path)

    @property
    def steps(self) -> int:
        found = [rank.last.get("step") for rank in self.ranks if isinstance(rank, Glance)]
        return max((step + 1 for step in found if isinstance(step, int)), default=0)

    @property
    def last(self) -> dict[str, Any]:
        return self.ranks[0].last if self.ranks and isinstance(self.ranks[0], Glance) else {}

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
            return "Its first line cannot be read, so the command that was run is unknown."
        return None

    @property
    def version(self) -> str:
        """The same for the same content, also after the server was started again."""
        return f"{sum(rank.read for rank in self.ranks)}-{int(self.result is not None)}"

    def refresh(self) -> bool:
        """Read on, if a file has changed."""
        try:
            with os.scandir(self.path) as entries:
                stats = [(entry.name, entry.stat()) for entry in entries]
            seen = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        except OSError:
            seen = None  # it is gone
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

    def columns(self, optimizer: int) -> Columns:
        """Of one optimizer, or of the FIRST; without steps if there is none."""
        found = self.optimizers
        return found.get(min(found, default=0) if optimizer == FIRST else optimizer) or Columns()

    steps = Run.steps

    @property
    def progress(self) -> float:
        """How much of the first rank's file was read."""
        try:
            size = self.ranks[0].path.stat().st_size if self.ranks else 0
        except OSError:
            size = 0
        return min(1.0, self.ranks[0].read / size) if size else float(bool(self.ranks))


FIRST = -1
_KINDS = {"step": "q", "skipped": "b"}
_KEPT = ("step", "seconds", "loss", "norm", "lr", "scale", "skipped")


class Columns:
    """Takes the place of a Series; one thread adds, others read under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.layers: list[str] = []
        self.heat = Heat()
        self.lasted = 0.0
        self.samples = ()  # they are in the heat
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
        with self.lock:
            self.heat.add(step, self.layers, _packed(norms), _packed(headroom))

    def range_of(self, column: array[Any]) -> Range | None:
        """The finite values of a column in five numbers; None without any."""
        with self.lock:
            known = _finite(column)
        if not len(known):
            return None
        ends = {"first": known[0], "last": known[-1], "low": known.min(), "high": known.max()}
        found = {part: float(value) for part, value in ends.items()}
        return Range(**found, median=float(np.median(known)))

    def view(self, name: str) -> np.ndarray[Any, Any]:
        """The column itself, not a copy: only under `lock`, and gone before it is given back."""
        column = self.terms[name.removeprefix("term:")] if name.startswith("term:") else self[name]
        return np.frombuffer(column, dtype=column.typecode)


def _finite(column: array[Any]) -> np.ndarray[Any, Any]:
    values = np.frombuffer(column, dtype=column.typecode)
    found: np.ndarray[Any, Any] = values[np.isfinite(values) & (values != UNKNOWN)]
    return found


def _packed(values: list[Any], name: str = "") -> array[Any]:
    kind = _KINDS.get(name, "f")
    try:
        return array(kind, values)
    except TypeError:
        missing = UNKNOWN if kind == "f" else 0
        return array(kind, [missing if value is None else value for value in values])


Column = np.ndarray[Any, np.dtype[np.float32]]

MOST = 512  # columns; when there are more, two become one
UNKNOWN = float(np.finfo(np.float32).min)
"""What was not recorded; NaN is a value like any other here."""


class Heat:
    """Columns of samples, each the worst of as many samples as the others have.

    A column has two rows, norms and headroom, with a value for each layer that was known then.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.steps: list[int] = []
        self._columns: list[Column] = []
        self._each = 1  # samples in a column
        self._inside = 0  # samples in the last one

    def add(self, step: int, layers: list[str], norms: Any, headroom: Any) -> None:
        places = [self.names.setdefault(name, len(self.names)) for name in layers]
        column = np.full((2, len(self.names)), UNKNOWN, np.float32)
        column[:, places] = norms, headroom
        if self.steps and self._inside < self._each:
            self._columns[-1] = _worst(self._columns[-1], column)
            self._inside += 1
            return
        self.steps.append(step)
        self._columns.append(column)
        self._inside = 1
        if len(self.steps) > MOST:
            self._inside += self._each if len(self.steps) % 2 == 0 else 0
            self._columns = self._merged(list(range(len(self.steps))), 2)
            self.steps = self.steps[::2]
            self._each *= 2

    def table(
        self, kind: str, *, most: int, first: int = 0, last: int = 1 << 62
    ) -> tuple[list[int], Column]:
        """Steps and values (layers x steps), at most so many columns; headroom if kind says so."""
        chosen = [at for at, step in enumerate(self.steps) if first <= step <= last]
        each = -(-len(chosen) // max(most, 1)) or 1
        values = np.empty((len(self.names), -(-len(chosen) // each)), np.float32)
        for at, column in enumerate(self._merged(chosen, each)):
            values[:, at] = _widened(column, len(self.names))[int(kind == "headroom")]
        return [self.steps[at] for at in chosen[::each]], values

    def history(self, name: str) -> dict[str, list[Any]] | None:
        """One layer at every column; None if there is no such layer."""
        at = self.names.get(name)
        if at is None:
            return None
        values = [_widened(column, at + 1)[:, at].tolist() for column in self._columns]
        norms, headroom = zip(*values, strict=True)
        return {"steps": list(self.steps), "norms": list(norms), "headroom": list(headroom)}

    def _merged(self, chosen: list[int], each: int) -> list[Column]:
        """So many columns become one."""
        groups = [chosen[start : start + each] for start in range(0, len(chosen), each)]
        return [functools.reduce(_worst, [self._columns[at] for at in group]) for group in groups]


def _worst(one: Column, other: Column) -> Column:
    """The larger norm, NaN before Inf before any number, and the smaller headroom."""
    size = max(one.shape[1], other.shape[1])
    (norm, room), (other_norm, other_room) = _widened(one, size), _widened(other, size)
    room = np.where(room == UNKNOWN, other_room, room)
    rooms = np.minimum(room, np.where(other_room == UNKNOWN, room, other_room))
    return np.stack([np.maximum(norm, other_norm), rooms])  # UNKNOWN is the least number


def _widened(column: Column, size: int) -> Column:
    """With room for layers that came later."""
    missing = max(size - column.shape[1], 0)
    return np.pad(column, ((0, 0), (0, missing)), constant_values=UNKNOWN) if missing else column
