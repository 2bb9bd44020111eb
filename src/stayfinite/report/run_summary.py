"""A recorded run in a few numbers, and two of them side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stayfinite.records import Forecast, Incident, Outcome
from stayfinite.report.store.reading import Range, Run, Sample
from stayfinite.report.store.writer import RunInfo
from stayfinite.text import forecast_words, headline, is_mended, source_line

_WORST = 5


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer over all samples: its largest norm, when that was, and its least headroom."""

    name: str
    norm: float
    step: int
    headroom: float | None


@dataclass(frozen=True, kw_only=True)
class IncidentRow:
    """An incident in a line."""

    step: int
    rank: int
    headline: str
    cause: str | None
    place: str | None
    done: str | None


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """A forecast in a line; `next_bad_step` is that of the first incident after it."""

    step: int
    rank: int
    words: str
    severity: str
    steps_left: int | None
    steps_low: int | None
    steps_high: int | None
    next_bad_step: int | None
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
    incidents: tuple[IncidentRow, ...]
    forecasts: tuple[ForecastRow, ...]
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
    ranges = {name: series.range_of(series[name]) for name in ("loss", "norm", "scale", "lr")}
    terms = {name: series.range_of(column) for name, column in series.terms.items()}
    paces = series.range_of(series["seconds"])
    rows = tuple(_row(incident) for incident in run.incidents)
    return RunSummary(
        path=str(run.path),
        started=run.info.started,
        script=run.info.script,
        steps=run.steps,
        exit=run.exit,
        is_recovered=has_recovered(run),
        ranks=len(run.ranks),
        incidents=rows,
        forecasts=forecast_rows(run),
        bad_steps=len({row.step for row in rows}),
        skipped_steps=int(max((sum(each["skipped"]) for each in everyone), default=0)),
        causes=dict(Counter(row.cause or "unknown" for row in rows).most_common()),
        loss=ranges["loss"],
        terms={name: found for name, found in terms.items() if found is not None},
        norm=ranges["norm"],
        scale=ranges["scale"],
        rate=ranges["lr"],
        seconds_per_step=paces.median if paces else None,
        seconds=max((each.lasted for each in everyone), default=0.0),
        worst_layers=worst_layers(series.samples),
        broken_lines=sum(rank.broken for rank in run.ranks),
    )


def forecast_rows(run: Run) -> tuple[ForecastRow, ...]:
    """What was foretold, oldest first, and what came."""
    bad = [incident.step for incident in run.incidents]
    return tuple(_forecast_row(forecast, bad) for forecast in run.forecasts)


def _forecast_row(forecast: Forecast, bad: list[int]) -> ForecastRow:
    return ForecastRow(
        step=forecast.step,
        rank=forecast.rank,
        words=forecast_words(forecast),
        severity=forecast.severity,
        steps_left=forecast.steps_left,
        steps_low=forecast.steps_low,
        steps_high=forecast.steps_high,
        next_bad_step=min((step for step in bad if step >= forecast.step), default=None),
        done=_done(forecast.outcome),
    )


def _done(outcome: Outcome | None) -> str | None:
    said = ": ".join(filter(None, (outcome.strategy, outcome.detail))) if outcome else ""
    return said or None


def has_recovered(run: Run) -> bool:
    """Whether its incidents were recovered from, and training went on usefully."""
    if run.exit != "incident" or (run.result is not None and run.result.recovered is False):
        return False
    return all(is_mended(incident.outcome) for incident in run.incidents)


def worst_layers(samples: Iterable[Sample]) -> tuple[Layer, ...]:
    """Those with the largest gradients; one that is not finite is the worst of all."""
    peaks: dict[str, tuple[float, int]] = {}
    rooms: dict[str, float] = {}
    for sample in samples:
        for name, norm, room in zip(sample.layers, sample.norms, sample.headroom, strict=True):
            size = 0.0 if norm is None else math.inf if math.isnan(norm) else norm
            peaks[name] = max(peaks.get(name, (-1.0, 0)), (size, sample.step))
            if room is not None:
                rooms[name] = min(rooms.get(name, room), room)
    worst = sorted(peaks.items(), key=lambda item: -item[1][0])[:_WORST]
    return tuple(
        Layer(name=name, norm=norm, step=step, headroom=rooms.get(name))
        for name, (norm, step) in worst
    )


def _row(incident: Incident) -> IncidentRow:
    diagnosis = incident.diagnosis
    return IncidentRow(
        step=incident.step,
        rank=incident.rank,
        headline=headline(incident),
        cause=diagnosis.cause if diagnosis else None,
        place=source_line(incident.origin) or None,
        done=_done(incident.outcome),
    )


_STEADY = 100  # steps; the pace of fewer is mostly that of the start


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure of both runs; `better` is -1 where less is better, 1 where more is, else 0."""

    name: str
    before: Any
    after: Any
    better: int = 0


@dataclass(frozen=True, kw_only=True)
class Difference:
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
    lines: tuple[Measure, ...]
    changes: tuple[Difference, ...]


def compare(before: Run, after: Run) -> Comparison:
    """What became of the first run in the second."""
    return Comparison(
        before=str(before.path),
        after=str(after.path),
        lines=tuple(_measures(summary_of(before), summary_of(after))),
        changes=tuple(_differences(before.info, after.info)),
    )


def _measures(old: RunSummary, new: RunSummary) -> Iterator[Measure]:
    def of(name: str, field: str, better: int = 0) -> Measure:
        return Measure(
            name=name, before=getattr(old, field), after=getattr(new, field), better=better
        )

    yield of("ended", "ended")
    yield of("steps", "steps")
    yield of("bad steps", "bad_steps", -1)
    yield of("skipped steps", "skipped_steps", -1)
    if old.forecasts or new.forecasts:
        yield Measure(
            name="forecasts", before=len(old.forecasts), after=len(new.forecasts), better=-1
        )
    yield from _ranges("gradient norm", old.norm, new.norm, ("high",), better=-1)
    yield from _ranges("gradient norm", old.norm, new.norm, ("median",))
    yield from _ranges("loss", old.loss, new.loss, ("low", "high", "last"), better=-1)
    for term in sorted({*old.terms, *new.terms}):
        found = old.terms.get(term), new.terms.get(term)
        yield from _ranges(f"loss term {term}", *found, ("low", "high", "last"), better=-1)
    yield from _ranges("loss scale", old.scale, new.scale, ("low", "high"))
    yield of("seconds per step", "seconds_per_step", -int(min(old.steps, new.steps) >= _STEADY))
    yield of("seconds", "seconds")


_WORDS = {"low": "lowest", "high": "highest", "median": "median", "last": "last"}


def _ranges(
    name: str, old: Range | None, new: Range | None, parts: tuple[str, ...], *, better: int = 0
) -> Iterator[Measure]:
    for part in parts if old or new else ():
        values = {"before": getattr(old, part, None), "after": getattr(new, part, None)}
        yield Measure(name=f"{name}, {_WORDS[part]}", **values, better=better)


def _differences(old: RunInfo, new: RunInfo) -> Iterator[Difference]:
    facts = ("script", "command", "commit", "seed", "world", "python")
    kinds: dict[str, Callable[[RunInfo], Mapping[str, Any]]] = {
        "option": lambda info: info.config,
        "version": lambda info: info.versions,
        "file": lambda info: info.sources,
        "run": lambda info: {name: getattr(info, name) for name in facts},
    }
    for kind, values_of in kinds.items():
        before, after = values_of(old), values_of(new)
        for name in sorted({*before, *after}):
            values = {"before": before.get(name), "after": after.get(name)}
            if values["before"] != values["after"]:
                yield Difference(kind=kind, name=name, **values)
