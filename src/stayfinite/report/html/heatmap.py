"""Gradient norms, layers by steps, as a map in levels of colour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from stayfinite.report.html.svg import WIDTH, Label, plot, round_numbers, short, tag, unit
from stayfinite.report.store.reading import Sample, Series
from stayfinite.report.wording import count, plain

LEVELS = 9
_MOST_ROWS = 40
_MOST_COLUMNS = 160
_TALL = 10.0
_BAD = LEVELS  # the level of a norm that is not finite

Grid = list[list[float | None]]


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """The picture, a label for each of its rows, and what the colours mean."""

    picture: Markup
    rows: tuple[str, ...]
    across: tuple[Label, ...]
    low: str
    high: str
    has_bad: bool
    note: str


def heat_map(series: Series) -> HeatMap | None:
    """None without samples of the gradients."""
    samples = list(_stretches(series.samples))
    known = [layers for layers, _ in groupby(series.samples, key=lambda sample: sample.layers)]
    names = list(dict.fromkeys(name for layers in known for name in layers))
    if not names:
        return None
    groups = _groups(names)
    labels = list(dict.fromkeys(groups.values()))
    grid = _grid(samples, groups, labels)
    sizes = [each for row in grid for each in row if each is not None and math.isfinite(each)]
    low, high = (min(sizes), max(sizes)) if sizes else (0.0, 0.0)
    levels = [[_level(each, low, high) for each in row] for row in grid]
    steps = [stretch[0].step for stretch in samples]
    return HeatMap(
        picture=_picture(labels, grid, levels),
        rows=tuple(labels),
        across=_labels(steps),
        low=short(10**low),
        high=short(10**high),
        has_bad=any(_BAD in row for row in levels),
        note=_note(names, labels, series.samples),
    )


def _stretches(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    """The samples, several of them in one column where there are many."""
    size = max(math.ceil(len(samples) / _MOST_COLUMNS), 1)
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def _groups(names: list[str]) -> dict[str, str]:
    """The row of each layer: itself, or what it belongs to where there are too many."""
    depth = max(name.count(".") for name in names) + 1
    for keep in range(depth, 0, -1):
        groups = {name: ".".join(name.split(".")[:keep]) for name in names}
        if len(set(groups.values())) <= _MOST_ROWS:
            return groups
    size = math.ceil(len(names) / _MOST_ROWS)
    return {name: f"{names[at - at % size]} ..." for at, name in enumerate(names)}


def _grid(stretches: list[Sequence[Sample]], groups: dict[str, str], labels: list[str]) -> Grid:
    """Of each row the decimal logarithms of its largest norms; None where there is none."""
    row_of = {label: at for at, label in enumerate(labels)}
    columns = []
    for stretch in stretches:
        largest = [0.0] * len(labels)
        for layers, same in groupby(stretch, key=lambda sample: sample.layers):
            peaks = map(max, zip(*(_sizes(sample.norms) for sample in same), strict=True))
            for name, peak in zip(layers, peaks, strict=True):
                at = row_of[groups[name]]
                largest[at] = max(largest[at], peak)
        columns.append([_log(size) for size in largest])
    return [list(row) for row in zip(*columns, strict=True)]


def _sizes(norms: list[float | None]) -> list[float]:
    """One that is not known is 0, one that is not finite infinite."""
    known = [0.0 if norm is None else norm for norm in norms]
    return [math.inf if math.isnan(norm) else norm for norm in known]


def _log(norm: float) -> float | None:
    """A norm of 0 has no logarithm, and no colour."""
    return math.log10(norm) if norm > 0 else None


def _level(size: float | None, low: float, high: float) -> int | None:
    if size is None:
        return None
    if not math.isfinite(size):
        return _BAD
    share = (size - low) / (high - low) if high > low else 0.5
    return min(int(share * LEVELS), LEVELS - 1)


def _picture(labels: list[str], grid: Grid, levels: list[list[int | None]]) -> Markup:
    pieces = [
        tag("g", tag("title", _row_said(label, sizes)) + _cells(row, at * _TALL))
        for at, (label, sizes, row) in enumerate(zip(labels, grid, levels, strict=True))
    ]
    said = f"gradient norms of {count(len(labels), 'row')} of layers over the steps"
    return plot(pieces, said=said, height=_TALL * len(labels))


def _row_said(label: str, sizes: list[float | None]) -> str:
    known = [size for size in sizes if size is not None and math.isfinite(size)]
    if not known:
        return plain(label)
    return f"{plain(label)}: {short(10 ** min(known))} to {short(10 ** max(known))}"


def _cells(row: list[int | None], top: float) -> Markup:
    """One path for each level; neighbours of one level are one rectangle."""
    wide = WIDTH / len(row)
    boxes: dict[int, list[str]] = {}
    for level, run in groupby(range(len(row)), key=lambda at: row[at]):
        cells = list(run)
        if level is not None:
            size = unit(wide * len(cells))
            box = f"M{unit(wide * cells[0])} {unit(top)}h{size}v{unit(_TALL)}h-{size}z"
            boxes.setdefault(level, []).append(box)
    paths = (tag("path", class_=_colour(level), d="".join(d)) for level, d in sorted(boxes.items()))
    return Markup("").join(paths)


def _colour(level: int) -> str:
    return "sf-hbad" if level == _BAD else f"sf-h{level}"


def _labels(steps: list[int]) -> tuple[Label, ...]:
    """Round steps, each at the column that has it."""
    if len(steps) < 2:
        return (Label(at=50, text=short(steps[0])),)
    labels = {}
    for number in round_numbers(steps[0], steps[-1], 6):
        column = next(at for at, step in enumerate(steps) if step >= number - 1e-9)
        labels[column] = short(steps[column])
    return tuple(Label(at=100 * (at + 0.5) / len(steps), text=t) for at, t in labels.items())


def _note(names: list[str], labels: list[str], samples: Sequence[Sample]) -> str:
    layers = count(len(names), "layer")
    rows = f", in {count(len(labels), 'row')} of which each shows its largest" * (
        len(labels) < len(names)
    )
    return f"{layers}{rows}; {count(len(samples), 'sampled step')}"
