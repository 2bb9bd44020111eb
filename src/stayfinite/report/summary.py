"""A recorded run in a few numbers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from stayfinite.records import Incident
from stayfinite.report.store.reading import Run, Series
from stayfinite.report.wording import headline

_WORST = 5
_NOT_RECOVERED = {"stop", "abort", "warn", "none"}  # strategies that mend nothing


@dataclass(frozen=True, kw_only=True)
class Range:
    """Finite values of one column."""

    first: float
    last: float
    low: float
    high: float
    median: float


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer over all samples: its largest norm, when that was, and its least headroom."""

    name: str
    norm: float
    step: int
    headroom: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """An incident in a line."""

    step: int
    rank: int
    headline: str
    cause: str | None
    place: str | None
    done: str | None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What `stayfinite show` tells."""

    path: str
    started: float
    script: str
    steps: int
    exit: str
    is_recovered: bool
    ranks: int
    incidents: tuple[Row, ...]
    bad_steps: int
    skipped_steps: int
    causes: dict[str, int]
    loss: Range | None
    terms: dict[str, Range]
    norm: Range | None
    scale: Range | None
    rate: Range | None
    seconds_per_step: float | None
    seconds: float
    worst_layers: tuple[Layer, ...]
    broken_lines: int

    @property
    def ended(self) -> str:
        """`exit` in a word that also says whether its incidents were recovered from."""
        return "recovered" if self.is_recovered else self.exit


def summary_of(run: Run) -> RunSummary:
    """The run as it is recorded now."""
    series = run.series
    everyone = [each for rank in run.ranks for each in rank.series.values()]
    return summarised(
        run,
        spread_of=lambda name: spread(series[name]),
        terms={name: spread(column) for name, column in series.terms.items()},
        skipped=int(max((sum(each["skipped"]) for each in everyone), default=0)),
        seconds=max((each["time"][-1] for each in everyone if len(each)), default=0.0),
        layers=worst_layers(series),
    )


def summarised(
    run: Run,
    *,
    spread_of: Callable[[str], Range | None],
    terms: dict[str, Range | None],
    skipped: int,
    seconds: float,
    layers: tuple[Layer, ...] = (),
) -> RunSummary:
    """The summary, from whoever keeps the columns; `spread_of` is asked for each by name."""
    rows = tuple(incident_row(incident) for incident in run.incidents)
    paces = spread_of("seconds")
    return RunSummary(
        path=str(run.path),
        started=run.info.started,
        script=run.info.script,
        steps=run.steps,
        exit=run.exit,
        is_recovered=_has_recovered(run),
        ranks=len(run.ranks),
        incidents=rows,
        bad_steps=len({row.step for row in rows}),
        skipped_steps=skipped,
        causes=dict(Counter(row.cause or "unknown" for row in rows).most_common()),
        loss=spread_of("loss"),
        terms={name: found for name, found in terms.items() if found is not None},
        norm=spread_of("norm"),
        scale=spread_of("scale"),
        rate=spread_of("lr"),
        seconds_per_step=paces.median if paces else None,
        seconds=seconds,
        worst_layers=layers,
        broken_lines=sum(rank.broken for rank in run.ranks),
    )


def _has_recovered(run: Run) -> bool:
    """Whether its incidents were recovered from, and training went on usefully."""
    if run.exit != "incident" or (run.result is not None and run.result.recovered is False):
        return False
    return all(map(_is_recovered, run.incidents))


def _is_recovered(incident: Incident) -> bool:
    return incident.outcome is not None and incident.outcome.strategy not in _NOT_RECOVERED


def spread(column: Iterable[Any]) -> Range | None:
    """The finite values of a column in five numbers; None without any."""
    values = [value for value in column if value is not None and math.isfinite(value)]
    if not values:
        return None
    return Range(
        first=values[0],
        last=values[-1],
        low=min(values),
        high=max(values),
        median=statistics.median(values),
    )


def worst_layers(series: Series, most: int = _WORST) -> tuple[Layer, ...]:
    """Those with the largest gradients; one that is not finite is the worst of all."""
    peaks: dict[str, tuple[float, int]] = {}
    rooms: dict[str, float] = {}
    for sample in series.samples:
        for name, norm, room in zip(sample.layers, sample.norms, sample.headroom, strict=True):
            peaks[name] = max(peaks.get(name, (-1.0, 0)), (_size(norm), sample.step))
            if room is not None:
                rooms[name] = min(rooms.get(name, room), room)
    worst = sorted(peaks, key=lambda name: -peaks[name][0])[:most]
    return tuple(
        Layer(name=name, norm=peaks[name][0], step=peaks[name][1], headroom=rooms.get(name))
        for name in worst
    )


def _size(norm: float | None) -> float:
    if norm is None:
        return 0.0
    return math.inf if math.isnan(norm) else norm


def incident_row(incident: Any) -> Row:
    origin, diagnosis, outcome = incident.origin, incident.diagnosis, incident.outcome
    line = f"{origin.file}:{origin.line}" if origin and origin.file else None
    done = outcome and ": ".join(part for part in (outcome.strategy, outcome.detail) if part)
    return Row(
        step=incident.step,
        rank=incident.rank,
        headline=headline(incident),
        cause=diagnosis.cause if diagnosis else None,
        place=line,
        done=done or None,
    )
