"""Runs as the dashboard reads them: at a glance for the list, whole for those that are open."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stayfinite.report.dashboard.columns import Columns
from stayfinite.report.store.reading import RankFile, Run
from stayfinite.report.store.schema import SCHEMA

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
