"""All runs that the dashboard can show, read on by a thread."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stayfinite.report.dashboard.live import GlancedRun, LiveRun
from stayfinite.report.store.reading import is_run, runs_in

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
