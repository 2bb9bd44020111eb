"""Reads run directories, also while they are being written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stayfinite.errors import RecordError
from stayfinite.records import Forecast, Incident, RunResult, from_data, from_json
from stayfinite.report.store.writer import COLUMNS, RESULT, SCHEMA, End, RunInfo

_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@dataclass(frozen=True, kw_only=True)
class Range:
    """Finite values of one column."""

    first: float
    last: float
    low: float
    high: float
    median: float


@dataclass
class Series:
    """What is known of the attempted updates of one optimizer, a list for each column."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    terms: dict[str, list[float | None]] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    @property
    def lasted(self) -> float:
        """Seconds from the beginning to the last step."""
        return next((time for time in reversed(self["time"]) if time is not None), 0.0)

    def range_of(self, column: Iterable[Any]) -> Range | None:
        """The finite values of a column in five numbers; None without any."""
        values = [value for value in column if value is not None and math.isfinite(value)]
        if not values:
            return None
        low, high, median = min(values), max(values), statistics.median(values)
        return Range(first=values[0], last=values[-1], low=low, high=high, median=median)

    def add_steps(self, columns: dict[str, list[Any]], terms: dict[str, list[Any]]) -> None:
        before, count = len(self), len(columns["step"])
        for name, values in columns.items():
            self.columns[name] += values
        for name in dict.fromkeys((*self.terms, *terms)):
            column = self.terms.setdefault(name, [None] * before)
            column += terms.get(name, [None] * count)

    def add_norms(self, step: int, norms: list[Any], headroom: list[Any]) -> None:
        self.samples.append(Sample(step=step, layers=self.layers, norms=norms, headroom=headroom))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The gradients of one step, layer by layer; `layers` are their names."""

    step: int
    layers: list[str]
    norms: list[float | None]
    headroom: list[float | None]


@dataclass
class RankFile:
    """One rank's file, as far as it was read; `more()` reads what has come since.

    A last line without its end is left for later, any other that cannot be read is counted in
    `broken` and passed over.
    """

    path: Path
    new_series: Callable[[], Any] = Series
    """Makes what keeps the steps of an optimizer; it has the `add_` functions of Series."""
    schema: int = SCHEMA
    info: RunInfo = field(default_factory=lambda: RunInfo(started=0.0))
    series: dict[int, Any] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)
    end: End | None = None
    broken: int = 0
    read: int = 0
    """The bytes that were read."""

    def more(self) -> bool:
        """Read on; whether there was anything new."""
        before = self.read
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size > before:
                file.seek(before)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self.read += len(line)
                    self.take(line)
        return self.read > before

    def take(self, line: bytes) -> None:
        """Keep what one line says."""
        try:
            data = json.loads(line)
            kind = data["kind"]
            if kind in ("steps", "layers", "norms"):
                optimizer = int(data.get("optimizer", 0))
                if optimizer not in self.series:
                    self.series[optimizer] = self.new_series()
                _add_to(self.series[optimizer], data)
            elif kind == "incident":
                self.incidents.append(from_data(Incident, data["incident"]))
            elif kind == "forecast":
                self.forecasts.append(from_data(Forecast, data["forecast"]))
            elif kind == "begin":
                self.schema = int(data["schema"])
                self.info = from_data(RunInfo, data["run"])
            elif kind == "end":
                self.end = from_data(End, {key: data[key] for key in ("exit", "code", "time")})
        except (KeyError, TypeError, ValueError, AttributeError, RecordError):
            self.broken += 1


def _add_to(series: Any, data: dict[str, Any]) -> None:
    if data["kind"] == "layers":
        series.layers = list(data["names"])
    elif data["kind"] == "norms":
        count = len(series.layers)
        norms, headroom = _numbers(data["norms"], count), _numbers(data["headroom"], count)
        series.add_norms(int(data["step"]), norms, headroom)
    else:
        count = len(data["step"])
        columns = {name: _numbers(data.get(name), count) for name in COLUMNS}
        terms = {name: _numbers(values, count) for name, values in data.get("terms", {}).items()}
        series.add_steps(columns, terms)


def _numbers(values: Any, count: int) -> list[Any]:
    if values is None:
        return [None] * count
    if len(values) != count:
        raise ValueError(f"{len(values)} values for {count}")
    if str not in set(map(type, values)):
        return list(values)
    return [_WORDS[value] if isinstance(value, str) else value for value in values]


@dataclass
class Run:
    """A run directory; `refresh()` reads what has come since."""

    path: Path
    ranks: list[RankFile] = field(default_factory=list)
    result: RunResult | None = None

    @property
    def info(self) -> RunInfo:
        return self.ranks[0].info

    @property
    def series(self) -> Any:
        """The Series of the first rank's first optimizer."""
        found = self.ranks[0].series
        return found[min(found)] if found else Series()

    @property
    def incidents(self) -> list[Incident]:
        """Those of the result, which are explained best; else as they were recorded."""
        if self.result is not None and self.result.incidents:
            return list(self.result.incidents)
        known: dict[Any, Incident] = {}
        everyone = [incident for rank in self.ranks for incident in rank.incidents]
        for number, each in enumerate(everyone):
            # A rank records an incident of another one, too, as that has told it.
            key = (each.step, each.rank, each.time) if each.world > 1 else number
            known.setdefault(key, each)
        return sorted(known.values(), key=lambda incident: incident.step)

    @property
    def forecasts(self) -> list[Forecast]:
        """Those of all ranks, by step."""
        found = [forecast for rank in self.ranks for forecast in rank.forecasts]
        return sorted(found, key=lambda forecast: forecast.step)

    @property
    def exit(self) -> str:
        """How it ended: "finite", "incident", "script-error", "killed"; "running" if it has not."""
        if self.result is not None:
            return self.result.exit
        ends = [rank.end for rank in self.ranks if rank.end is not None]
        if ends:
            return max(ends, key=lambda end: end.code).exit
        return "running" if _may_live(self.info) else "killed"

    @property
    def steps(self) -> int:
        everyone = [series for rank in self.ranks for series in rank.series.values()]
        return max((each["step"][-1] + 1 for each in everyone if len(each)), default=0)

    def rank_file(self, path: Path) -> RankFile:
        """Begins to read a file; others keep less of it."""
        return RankFile(path)

    def refresh(self) -> bool:
        """Read on; whether there was anything new."""
        known = {rank.path for rank in self.ranks}
        self.ranks += [self.rank_file(p) for p in _rank_files(self.path) if p not in known]
        self.ranks.sort(key=lambda rank: _by_rank(rank.path.name))
        news = [rank.more() for rank in self.ranks]
        try:
            result = from_json(RunResult, (self.path / RESULT).read_text(encoding="utf-8"))
        except (OSError, RecordError):
            result = None
        before, self.result = self.result, result
        return any(news) or before != self.result


def _may_live(info: RunInfo) -> bool:
    """Whether the process may be there still; of another machine's nothing is known."""
    if info.host == socket.gethostname() and info.pid and sys.platform != "win32":
        try:
            os.kill(info.pid, 0)
        except OSError as error:  # else it is another user's
            return not isinstance(error, ProcessLookupError)
    return True


def read_run(path: str | os.PathLike[str]) -> Run:
    """The run in this directory; RecordError if it is none, or of a newer version."""
    run = Run(Path(path))
    run.refresh()
    if not run.ranks:
        raise RecordError(f"{run.path} is not a run directory: it has no file rank-0.jsonl.")
    newer = [rank.schema for rank in run.ranks if rank.schema != SCHEMA]
    if newer:
        raise RecordError(
            f"{run.path} has schema {newer[0]}; this version reads schema {SCHEMA}. "
            "Upgrade stayfinite to read it."
        )
    return run


def is_run(path: Path) -> bool:
    return bool(_rank_files(path))


def runs_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The run directories in a folder, newest first."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(filter(is_run, found), key=lambda path: path.name, reverse=True)


def _rank_files(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    files = [name for name in names if name.startswith("rank-") and name.endswith(".jsonl")]
    return [folder / name for name in sorted(files, key=_by_rank)]


def _by_rank(name: str) -> tuple[int, str]:
    rank, _, process = name.removeprefix("rank-").removesuffix(".jsonl").partition("-")
    return (int(rank) if rank.isdigit() else 1 << 30), process
