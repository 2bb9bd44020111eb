"""Pictures for the page: timeline, heat map, histogram, as SVG with every text escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from markupsafe import Markup

from stayfinite.records import Incident, TensorSummary
from stayfinite.report.html.markup import tag
from stayfinite.report.store.reading import Sample, Series
from stayfinite.text import count, plain

# Pieces of pictures: axes, ticks, and SVG in which every text is escaped.
#
# A plot is 1000 by 100 units and is stretched to the place that it gets; its labels are HTML
# beside it, so that they keep their size on a phone.

WIDTH, HEIGHT = 1000.0, 100.0
_SVG_LARGEST = 1e300  # differences of larger ones would overflow


@dataclass(frozen=True, kw_only=True)
class Label:
    """A text beside a plot, at so many percent of its width or height."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture with its labels; `note` says in words what it shows."""

    name: str
    picture: Markup
    across: tuple[Label, ...] = ()
    up: tuple[Label, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of numbers, and where in it a number lies."""

    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """From 0 to 1; what is outside lies at the end."""
        low, high, value = (self._even(each) for each in (self.low, self.high, value))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def _even(self, value: float) -> float:
        return math.log10(max(value, 1e-320)) if self.is_log else _bounded(value) / 2

    @property
    def ticks(self) -> list[float]:
        return decades(self.low, self.high) if self.is_log else round_numbers(self.low, self.high)


def _bounded(value: float) -> float:
    return min(max(value, -_SVG_LARGEST), _SVG_LARGEST)


def axis_of(values: Sequence[float]) -> Axis:
    """An axis with room for these finite values, in powers of ten where they are far apart."""
    low, high = _bounded(min(values)), _bounded(max(values))
    if low > 0 and high / low > 100:
        return Axis(low=low / 1.2, high=high * 1.2, is_log=True)
    room = (high / 2 - low / 2) * 0.12 or abs(high) * 0.1 or 1.0
    room = max(room, 1 / _SVG_LARGEST)
    return Axis(low=low - room, high=high + room)


def round_numbers(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers in the range, at most so many and one."""
    pace = max(high / most - low / most, 5e-324)
    step = 10.0 ** max(math.floor(math.log10(pace)), -300)
    step *= next(factor for factor in (1, 2, 5, 10, 100) if step * factor >= pace * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, min(last, first + most) + 1)]


def decades(low: float, high: float, most: int = 4) -> list[float]:
    """Powers of ten in the range, evenly thinned."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    pace = max(math.ceil((last - first + 1) / most), 1)
    return [10.0**exponent for exponent in range(first, last + 1, pace)]


def short(value: float) -> str:
    """A number for a label."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < 1e5:
        return f"{int(value):,}"
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def unit(value: float) -> str:
    """A length in a picture."""
    return f"{value:.1f}".removesuffix(".0")


def plot(pieces: Iterable[Markup], *, said: str, height: float = HEIGHT) -> Markup:
    """The whole picture; `said` is what a screen reader tells of it."""
    box = f"0 0 {unit(WIDTH)} {unit(height)}"
    words = {"viewBox": box, "preserveAspectRatio": "none", "role": "img", "aria-label": said}
    return tag("svg", Markup("").join(pieces), class_="sf-plot", **words)


_MOST_BARS = 56
_NEAR = 18  # percent: two labels would touch
_ROOM, _WIDEST = 95.0, 160.0  # units for a bar with a name, and for any
_HISTOGRAM_LARGEST = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}

Slot = tuple[int, int]  # sign and binary exponent; (0, 0) is zero
Bar = tuple[str, int, str]  # a class, how many, and what they are


def histogram(tensor: TensorSummary) -> Plot | None:
    """The values that are finite, with bars of their own for the others; None without any."""
    bars = _finite_bars(tensor) + _bad_bars(tensor)
    if not bars:
        return None
    places, most = _places(bars), max(number for _, number, _ in bars)
    pieces = [_bar(bar, *place, most) for bar, place in zip(bars, places, strict=True) if bar[1]]
    said = "how many values have which size: " + "; ".join(
        f"{number} {what}" for _, number, what in bars if number
    )
    return Plot(
        name="values by size",
        picture=plot(pieces, said=said),
        across=_histogram_labels(bars, places),
    )


def doublings_left(tensor: TensorSummary) -> str:
    """How often the largest value can double before its dtype ends; "-" where that is unknown."""
    end = _HISTOGRAM_LARGEST.get(tensor.dtype.removeprefix("torch."))
    largest = max(abs(tensor.min or 0.0), abs(tensor.max or 0.0))
    if end is None or not largest or not math.isfinite(largest):
        return "-"
    return f"{math.log2(end) - math.log2(largest):.1f}"


def _finite_bars(tensor: TensorSummary) -> list[Bar]:
    found = {_slot(limit): number for limit, number in tensor.histogram}
    if not found:
        return []
    exponents = [exponent for sign, exponent in found if sign]
    low, high = min(exponents, default=0), max(exponents, default=0)
    signs = {sign for sign, _ in found}
    size = math.ceil((high - low + 1) * len(signs - {0}) / _MOST_BARS) or 1
    stretches = range(low, high + 1, size)
    bars = [_stretch(found, -1, at, size) for at in reversed(stretches)] if -1 in signs else []
    bars += [("sf-zero", found.get((0, 0), 0), "zero")] if 0 in signs or len(signs) > 1 else []
    return bars + ([_stretch(found, 1, at, size) for at in stretches] if 1 in signs else [])


def _slot(limit: float) -> Slot:
    """Of a negative limit the values are below it, of a positive one below and up to it."""
    if limit == 0:
        return 0, 0
    fraction, exponent = math.frexp(abs(limit))
    is_power = fraction == 0.5
    return (1, exponent - 1 if is_power else exponent) if limit > 0 else (-1, exponent)


def _stretch(found: dict[Slot, int], sign: int, at: int, size: int) -> Bar:
    number = sum(found.get((sign, exponent), 0) for exponent in range(at, at + size))
    minus = "-" if sign < 0 else ""
    ends = [f"{minus}{short(_power(exponent))}" for exponent in (at - 1, at + size - 1)]
    return "sf-bar", number, " to ".join(ends if sign > 0 else reversed(ends))


def _power(exponent: int) -> float:
    return math.ldexp(1.0, min(exponent, 1023))


def _bad_bars(tensor: TensorSummary) -> list[Bar]:
    kinds = (
        (tensor.neg_inf_count, "-Inf"),
        (tensor.pos_inf_count, "Inf"),
        (tensor.nan_count, "NaN"),
    )
    bars: list[Bar] = [("sf-badbar", number, name) for number, name in kinds if number]
    return [("", 0, ""), *bars] if bars and tensor.histogram else bars


def _places(bars: list[Bar]) -> list[tuple[float, float]]:
    """Left side and width of each bar; those that are not finite get room for their names."""
    bad = sum(kind == "sf-badbar" for kind, _, _ in bars)
    wide = min(WIDTH / len(bars), _WIDEST)
    if bad and wide < _ROOM:
        wide = (WIDTH - bad * _ROOM) / (len(bars) - bad)
    widths = [max(wide, _ROOM) if kind == "sf-badbar" else wide for kind, _, _ in bars]
    return list(zip(accumulate(widths, initial=0.0), widths, strict=False))


def _bar(bar: Bar, left: float, wide: float, most: int) -> Markup:
    kind, number, what = bar
    high = max(HEIGHT * number / most, 2.0)  # one of a million is seen, too
    words = {"x": unit(left + wide * 0.08), "width": unit(wide * 0.84)}
    words |= {"y": unit(HEIGHT - high), "height": unit(high)}
    said = tag("title", f"{what}: {count(number, 'value')}")
    return tag("rect", said, class_=kind, **words)


def _histogram_labels(bars: list[Bar], places: list[tuple[float, float]]) -> tuple[Label, ...]:
    """Names of what is not finite, zero, and the ends of the rest where there is room for them."""
    middles = [100 * (left + wide / 2) / WIDTH for left, wide in places]
    shown = {middles[at]: bar[2] for at, bar in enumerate(bars) if bar[0] == "sf-badbar"}
    shown |= {middles[at]: "0" for at, bar in enumerate(bars) if bar[0] == "sf-zero"}
    plain = [at for at, bar in enumerate(bars) if bar[0] == "sf-bar"]
    ends = [(plain[-1], -1), (plain[0], 0)] if plain else []
    for at, side in ends:
        if all(abs(middles[at] - other) > _NEAR for other in shown):
            shown[middles[at]] = bars[at][2].split(" to ")[side]
    return tuple(Label(at=at, text=text) for at, text in sorted(shown.items()))


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
        across=_heatmap_labels(steps),
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


def _heatmap_labels(steps: list[int]) -> tuple[Label, ...]:
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


_NAMES = {"loss": "loss", "norm": "gradient norm", "scale": "loss scale", "lr": "learning rate"}
_ALWAYS = ("loss", "norm")
_MOST_TERMS = 4
_MOST_POINTS = 800

Point = tuple[int, float]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The steps that are shown, both ends included."""

    first: int
    last: int

    @property
    def axis(self) -> Axis:
        room = 0.5 if self.first == self.last else 0.0
        return Axis(low=self.first - room, high=self.last + room)


def around(step: int, *, steps: int, before: int = 40, after: int = 20) -> Window:
    """The steps near this one; all of a short run."""
    last = max(min(step + after, steps - 1), step)
    if last < 2 * (before + after) and steps <= 2 * (before + after):
        return Window(first=0, last=max(steps - 1, step))
    return Window(first=max(0, min(step - before, last - before - after)), last=last)


def timeline(series: Series, window: Window, *, incidents: Sequence[Incident]) -> list[Plot]:
    """A plot for each column that says something; none where nothing was recorded."""
    near = [each for each in incidents if window.first <= each.step <= window.last]
    marks = [incident.step for incident in near]
    bad = {incident.step for incident in near if _has_bad_loss(incident)}
    skipped = [step for step, was in _within(series, window, series["skipped"]) if was]
    plots = []
    for name, column in _columns(series):
        points = list(_within(series, window, column))
        points = _with_bad(points, bad) if name == "loss" else points
        if points and (name in _ALWAYS or _varies(points) or name == "scale"):
            made = _plot(_NAMES.get(name, name), points, window, marks=marks, skipped=skipped)
            plots.append(made)
    return plots


def _columns(series: Series) -> Iterator[tuple[str, Sequence[float | None]]]:
    yield "loss", series["loss"]
    for name, column in list(series.terms.items())[:_MOST_TERMS]:
        yield f"loss term {name}", column
    yield from ((name, series[name]) for name in ("norm", "scale", "lr"))


def _within(
    series: Series, window: Window, column: Sequence[float | None]
) -> Iterator[tuple[int, float]]:
    for step, value in zip(series["step"], column, strict=True):
        if value is not None and window.first <= step <= window.last:
            yield step, value


def _has_bad_loss(incident: Incident) -> bool:
    return any(each.has_nan and each.location == "loss" for each in incident.reports)


def _with_bad(points: list[Point], bad: set[int]) -> list[Point]:
    """The incident knows that a loss was bad, also where the step itself was not recorded."""
    good = [point for point in points if point[0] not in bad]
    return sorted([*good, *((step, math.nan) for step in bad)], key=lambda point: point[0])


def _varies(points: list[Point]) -> bool:
    return any(value != points[0][1] for _, value in points)


def _plot(
    name: str, points: list[Point], window: Window, *, marks: list[int], skipped: list[int]
) -> Plot:
    good = [value for _, value in points if math.isfinite(value)]
    bad = [step for step, value in points if not math.isfinite(value)]
    across, up = window.axis, axis_of(good or [0.0])
    said = _said(name, points, good, bad)
    pieces = [_rule(up.at(tick)) for tick in up.ticks]
    pieces += [_upright(across.at(step), "sf-mark") for step in marks]
    pieces += [_dot(across.at(step), 0.97, "sf-skip") for step in skipped[:_MOST_POINTS]]
    pieces.append(tag("path", class_="sf-line", d=_path(_thinned(points), across, up)))
    pieces += [_dot(across.at(x), 1 - up.at(y), "sf-dot") for x, y in _lonely(points, window)]
    pieces += [_dot(across.at(step), 0.06, "sf-bad") for step in bad[:_MOST_POINTS]]
    return Plot(
        name=name,
        picture=plot(pieces, said=said),
        across=_steps(window, across),
        up=tuple(Label(at=100 * (1 - up.at(tick)), text=short(tick)) for tick in up.ticks),
        note=said,
    )


def _said(name: str, points: list[Point], good: list[float], bad: list[int]) -> str:
    steps = f"{name}, steps {points[0][0]} to {points[-1][0]}"
    seen = f": {short(good[0])} to {short(good[-1])}" if good else ""
    return f"{steps}{seen}" + (f", {count(len(bad), 'value')} not finite" if bad else "")


def _steps(window: Window, across: Axis) -> tuple[Label, ...]:
    numbers = round_numbers(window.first, window.last, 6) if window.first < window.last else []
    whole = [number for number in numbers if number == int(number)] or [window.first]
    return tuple(Label(at=100 * across.at(each), text=short(each)) for each in whole)


def _lonely(points: list[Point], window: Window) -> list[Point]:
    """The finite points, where they are few among the steps."""
    if len(points) > min(0.8 * (window.last - window.first), _MOST_POINTS / 4):
        return []
    return [point for point in points if math.isfinite(point[1])]


def _path(points: list[Point], across: Axis, up: Axis) -> str:
    """A line through the finite points, broken where one is not."""
    words, is_on = [], False
    for step, value in points:
        if not math.isfinite(value):
            is_on = False
            continue
        at = f"{unit(WIDTH * across.at(step))} {unit(HEIGHT * (1 - up.at(value)))}"
        words.append(f"L{at}" if is_on else f"M{at}h0")
        is_on = True
    return "".join(words)


def _thinned(points: list[Point]) -> list[Point]:
    """Few enough points for a picture: of each stretch the lowest, the highest and a bad one."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(3 * len(points) / _MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        good = [point for point in stretch if math.isfinite(point[1])]
        ends = {min(good, key=_value), max(good, key=_value)} if good else set()
        bad = next((point for point in stretch if not math.isfinite(point[1])), None)
        kept += sorted(ends | ({bad} if bad else set()), key=lambda point: point[0])
    return kept


def _value(point: Point) -> float:
    return point[1]


def _rule(share: float) -> Markup:
    y = unit(HEIGHT * (1 - share))
    return tag("path", class_="sf-rule", d=f"M0 {y}H{unit(WIDTH)}")


def _upright(share: float, kind: str) -> Markup:
    return tag("path", class_=kind, d=f"M{unit(WIDTH * share)} 0V{unit(HEIGHT)}")


def _dot(share: float, down: float, kind: str) -> Markup:
    return tag("path", class_=kind, d=f"M{unit(WIDTH * share)} {unit(HEIGHT * down)}h0")
