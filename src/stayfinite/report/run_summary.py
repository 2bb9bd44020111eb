"""A recorded run in a few numbers, and two of them side by side."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stayfinite.records import Incident
from stayfinite.report.store.reading import Run, Series
from stayfinite.text import headline

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


_STEADY = 100  # steps; the pace of fewer is mostly that of the start


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measure of both runs; `better` is -1 where less is better, 1 where more is, else 0."""

    name: str
    before: Any
    after: Any
    better: int = 0


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that is not the same: an option, a version, a file."""

    kind: str
    name: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `stayfinite compare` tells."""

    before: str
    after: str
    lines: tuple[Line, ...]
    changes: tuple[Change, ...]


def compare(
    before: Run, after: Run, *, summarise: Callable[[Run], RunSummary] = summary_of
) -> Comparison:
    """What became of the first run in the second."""
    return Comparison(
        before=str(before.path),
        after=str(after.path),
        lines=tuple(_lines(summarise(before), summarise(after))),
        changes=tuple(_changes(before, after)),
    )


def _lines(old: RunSummary, new: RunSummary) -> Iterator[Line]:
    yield Line(name="ended", before=old.ended, after=new.ended)
    yield Line(name="steps", before=old.steps, after=new.steps)
    yield Line(name="bad steps", before=old.bad_steps, after=new.bad_steps, better=-1)
    yield Line(name="skipped steps", before=old.skipped_steps, after=new.skipped_steps, better=-1)
    yield from _ranged("gradient norm", old.norm, new.norm, ("high",), better=-1)
    yield from _ranged("gradient norm", old.norm, new.norm, ("median",))
    yield from _ranged("loss", old.loss, new.loss, ("low", "high", "last"), better=-1)
    for term in sorted({*old.terms, *new.terms}):
        found = old.terms.get(term), new.terms.get(term)
        yield from _ranged(f"loss term {term}", *found, ("low", "high", "last"), better=-1)
    yield from _ranged("loss scale", old.scale, new.scale, ("low", "high"))
    paces = old.seconds_per_step, new.seconds_per_step
    is_long = min(old.steps, new.steps) >= _STEADY
    yield Line(name="seconds per step", before=paces[0], after=paces[1], better=-int(is_long))
    yield Line(name="seconds", before=old.seconds, after=new.seconds)


_WORDS = {"low": "lowest", "high": "highest", "median": "median", "last": "last"}


def _ranged(
    name: str, old: Range | None, new: Range | None, parts: tuple[str, ...], *, better: int = 0
) -> Iterator[Line]:
    if old is None and new is None:
        return
    for part in parts:
        values = getattr(old, part, None), getattr(new, part, None)
        yield Line(name=f"{name}, {_WORDS[part]}", before=values[0], after=values[1], better=better)


def _changes(before: Run, after: Run) -> Iterator[Change]:
    old, new = before.info, after.info
    yield from _differences("option", old.config, new.config)
    yield from _differences("version", old.versions, new.versions)
    yield from _differences("file", old.sources, new.sources)
    facts = ("script", "command", "commit", "seed", "world", "python")
    yield from _differences(
        "run", {name: getattr(old, name) for name in facts}, {n: getattr(new, n) for n in facts}
    )


def _differences(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield Change(kind=kind, name=name, before=old.get(name), after=new.get(name))
