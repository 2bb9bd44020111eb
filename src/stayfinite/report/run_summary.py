"""A recorded run in a few numbers, two side by side or a list, as data and in the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stayfinite.records import Forecast, Incident
from stayfinite.report.store.reading import Range, Run, Sample
from stayfinite.report.store.writer import RunInfo
from stayfinite.text import (
    count,
    done_words,
    duration,
    forecast_words,
    headline,
    is_mended,
    moment,
    plain,
    source_line,
)

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
    is_spike: bool


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

    @property
    def forecast_count(self) -> int:
        """Without the spikes, of which a noisy loss has many."""
        return sum(not row.is_spike for row in self.forecasts)


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
    """What was foretold, oldest first, and what came; then the spikes, which may be many."""
    incidents = run.incidents
    ordered = sorted(run.forecasts, key=lambda forecast: forecast.is_spike)
    return tuple(_forecast_row(forecast, incidents) for forecast in ordered)


def next_bad_step(forecast: Forecast, incidents: Iterable[Incident]) -> int | None:
    """The step of the first incident that came after the forecast, or with it."""
    steps = (incident.step for incident in incidents)
    return min((step for step in steps if step >= forecast.step), default=None)


def _forecast_row(forecast: Forecast, incidents: Iterable[Incident]) -> ForecastRow:
    return ForecastRow(
        step=forecast.step,
        rank=forecast.rank,
        words=forecast_words(forecast),
        severity=forecast.severity,
        steps_left=forecast.steps_left,
        steps_low=forecast.steps_low,
        steps_high=forecast.steps_high,
        next_bad_step=next_bad_step(forecast, incidents),
        done=done_words(forecast.outcome) or None,
        is_spike=forecast.is_spike,
    )


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
        done=done_words(incident.outcome) or None,
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
class RunComparison:
    """What `stayfinite compare` tells."""

    before: str
    after: str
    lines: tuple[Measure, ...]
    changes: tuple[Difference, ...]


def compare(before: Run, after: Run) -> RunComparison:
    """What became of the first run in the second."""
    return RunComparison(
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
        yield of("forecasts", "forecast_count", -1)
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


_COLOURS = {
    "finite": "green",
    "recovered": "green",
    "incident": "red",
    "script-error": "yellow",
    "killed": "yellow",
}
_MOST_INCIDENTS = 20
_NOISE = 0.05  # a smaller difference is neither better nor worse


def console() -> Console:
    return Console(highlight=False)


def number(value: Any) -> str:
    """A number as short as it can be read; "-" for none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else plain(str(value))
    is_whole = float(value).is_integer() and abs(value) < 1e9
    return f"{int(value):,}" if is_whole else f"{value:.4g}"


def as_summary(summary: RunSummary) -> RenderableType:
    """One run."""
    parts: list[RenderableType] = [_facts(summary)]
    if summary.incidents:
        parts += [Text(), _incidents(summary)]
    if summary.forecasts:
        parts += [Text(), _forecasts(summary)]
    if summary.worst_layers:
        parts += [Text(), _layers(summary)]
    if summary.broken_lines:
        lines = count(summary.broken_lines, "line")
        parts += [Text(f"{lines} of the record could not be read.", "yellow")]
    return Group(*parts)


def _facts(summary: RunSummary) -> Table:
    ended, bad = summary.ended, Text("0", "green")
    if summary.is_recovered:
        ended = f"by itself, recovered from {count(len(summary.incidents), 'incident')}"
    if summary.bad_steps:
        causes = ", ".join(f"{cause} {times}" for cause, times in summary.causes.items())
        bad = Text(f"{summary.bad_steps:,} ({causes})", "red")
    ranks = f" on {summary.ranks} ranks" if summary.ranks > 1 else ""
    rows: list[tuple[str, str | Text]] = [
        ("run", plain(summary.path)),
        ("script", plain(summary.script) or "-"),
        ("started", moment(summary.started)),
        ("ended", Text(ended, _COLOURS.get(summary.ended, ""))),
        ("steps", f"{summary.steps:,}{ranks} in {duration(summary.seconds)}"),
        ("bad steps", bad),
        ("skipped steps", f"{summary.skipped_steps:,}"),
    ]
    ranges = [("loss", summary.loss), ("gradient norm", summary.norm)]
    ranges += [(f"loss term {plain(name)}", found) for name, found in summary.terms.items()]
    ranges += [("loss scale", summary.scale), ("learning rate", summary.rate)]
    rows += [(name, _range(found)) for name, found in ranges if found is not None]
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, "dim"), value if isinstance(value, Text) else Text(value))
    return table


def _range(found: Range) -> str:
    if found.low == found.high:
        return number(found.first)
    first, last, low, high = map(number, (found.first, found.last, found.low, found.high))
    return f"{first} to {last}; between {low} and {high}, median {number(found.median)}"


def _incidents(summary: RunSummary) -> Table:
    table = _table("incident", "where", "cause", "done")
    for row in summary.incidents[:_MOST_INCIDENTS]:
        cells = (row.headline, row.place, row.cause, row.done)
        table.add_row(*(plain(cell or "-") for cell in cells))
    left = len(summary.incidents) - _MOST_INCIDENTS
    if left > 0:
        table.add_row(f"... and {count(left, 'more incident')}: --json has all")
    return table


def _forecasts(summary: RunSummary) -> Table:
    table = _table("forecast", "made at step", "next bad step", "done")
    for row in summary.forecasts[:_MOST_INCIDENTS]:
        steps = number(row.step), number(row.next_bad_step)
        table.add_row(plain(row.words), *steps, plain(row.done or "-"))
    left = len(summary.forecasts) - _MOST_INCIDENTS
    if left > 0:
        table.add_row(f"... and {left} more: --json has all")
    return table


def _layers(summary: RunSummary) -> Table:
    table = _table("layers with the largest gradients", "norm", "at step", "doublings left")
    for layer in summary.worst_layers:
        room = "-" if layer.headroom is None else f"{layer.headroom:.1f}"
        table.add_row(plain(layer.name), number(layer.norm), number(layer.step), room)
    return table


def as_comparison(comparison: RunComparison) -> RenderableType:
    """Two runs side by side, and what is different in how they were made."""
    table = _table("", "before", "after", "")
    for line in comparison.lines:
        table.add_row(line.name, number(line.before), number(line.after), _verdict(line))
    table.columns[1].justify = table.columns[2].justify = "right"
    parts: list[RenderableType] = [
        Text.assemble(("before  ", "dim"), plain(comparison.before)),
        Text.assemble(("after   ", "dim"), plain(comparison.after)),
        Text(),
        table,
        Text(),
    ]
    changes = _table("changed", "", "before", "after")
    for change in comparison.changes:
        values = (_said(change.before), _said(change.after))
        changes.add_row(change.kind, plain(change.name), *values)
    parts.append(changes if comparison.changes else Text("Made with the same code and options."))
    return Group(*parts)


def _verdict(line: Measure) -> Text:
    old, new = line.before, line.after
    is_known = isinstance(old, int | float) and isinstance(new, int | float)
    if not line.better or not is_known or abs(new - old) <= _NOISE * max(abs(old), abs(new)):
        return Text()
    is_better = (new - old) * line.better > 0
    return Text("better", "green") if is_better else Text("worse", "red")


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return "-" if value is None else plain(str(value))


def as_list(summaries: Iterable[RunSummary]) -> RenderableType:
    """Runs, a line for each."""
    table = _table("run", "started", "script", "steps", "incidents", "forecasts", "ended")
    for each in summaries:
        ended = Text(each.ended, _COLOURS.get(each.ended, ""))
        name, script = Path(each.path).name, Path(each.script).name
        counts = f"{each.steps:,}", number(len(each.incidents)), number(each.forecast_count)
        table.add_row(plain(name), moment(each.started), plain(script), *counts, ended)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
