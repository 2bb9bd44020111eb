"""Recorded runs in the terminal: one, two side by side, or a list."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stayfinite.report.run_summary import Comparison, Measure, RunSummary
from stayfinite.report.store.reading import Range
from stayfinite.text import count, duration, moment, plain

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
        table.add_row(f"... and {count(left, 'more forecast')}: --json has all")
    return table


def _layers(summary: RunSummary) -> Table:
    table = _table("layers with the largest gradients", "norm", "at step", "doublings left")
    for layer in summary.worst_layers:
        room = "-" if layer.headroom is None else f"{layer.headroom:.1f}"
        table.add_row(plain(layer.name), number(layer.norm), number(layer.step), room)
    return table


def as_comparison(comparison: Comparison) -> RenderableType:
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
        counts = f"{each.steps:,}", number(len(each.incidents)), number(len(each.forecasts))
        table.add_row(plain(name), moment(each.started), plain(script), *counts, ended)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
