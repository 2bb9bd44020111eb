"""Pictures for the page: timeline, heat map, histogram, lineage, as SVG with every text escaped.

A plot is 1000 by 100 units and is stretched to the place that it gets; its labels are HTML beside
it, so that they keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

from markupsafe import Markup

from stayfinite import text as wording
from stayfinite.records import Forecast, Hop, Incident, TensorSummary
from stayfinite.report.store.reading import Sample, Series
from stayfinite.text import count, plain, visible

WIDTH, HEIGHT = 1000.0, 100.0
_LARGEST = 1e300  # differences of larger ones would overflow


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
        low, high, value = (
            math.log10(max(each, 1e-320)) if self.is_log else _bound(each) / 2
            for each in (self.low, self.high, value)
        )
        return min(max((value - low) / (high - low), 0.0), 1.0)

    @property
    def ticks(self) -> list[float]:
        return decades(self.low, self.high) if self.is_log else round_numbers(self.low, self.high)


def _bound(value: float) -> float:
    return min(max(value, -_LARGEST), _LARGEST)


def axis_of(values: Sequence[float]) -> Axis:
    """An axis with room for these finite values, in powers of ten where they are far apart."""
    low, high = _bound(min(values)), _bound(max(values))
    if low > 0 and high / low > 100:
        return Axis(low=low / 1.2, high=high * 1.2, is_log=True)
    room = (high / 2 - low / 2) * 0.12 or abs(high) * 0.1 or 1.0
    room = max(room, 1 / _LARGEST)
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


def step_label(step: float) -> str:
    """All digits: the steps around a late one differ in the last of them."""
    return f"{int(step):,}"


def _most_steps(last: int) -> int:
    """How many steps of that length have room beside one another in a narrow window."""
    return 6 if last < 100_000 else 4


def unit(value: float) -> str:
    """A length in a picture."""
    return f"{value:.1f}".removesuffix(".0")


def visible_text(value: Any) -> Any:
    """What is put into the page: characters that would not be seen are, line ends stay."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    if value.isprintable():
        return value
    return "".join(letter if letter == "\n" else visible(letter) for letter in value)


def tag(name: str, content: Markup | str = "", **attributes: object) -> Markup:
    """An element; `class_` is `class`, and `stroke_width` is `stroke-width`."""
    words = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), visible_text(value))
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, words, visible_text(content))


def _svg(pieces: Iterable[Markup], *, said: str, height: float = HEIGHT) -> Markup:
    """The whole picture; `said` is what a screen reader tells of it."""
    box = f"0 0 {unit(WIDTH)} {unit(height)}"
    words = {"viewBox": box, "preserveAspectRatio": "none", "role": "img", "aria-label": said}
    return tag("svg", Markup("").join(pieces), class_="sf-plot", **words)


_MOST_BARS = 56
_NEAR = 18  # percent: two labels would touch
_ROOM, _WIDEST = 95.0, 160.0  # units for a bar with a name, and for any
_LARGEST_OF = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}


def doublings_left(tensor: TensorSummary) -> str:
    """How often the largest value can double before its dtype ends; "-" where that is unknown."""
    end = _LARGEST_OF.get(tensor.dtype.removeprefix("torch."))
    largest = max(abs(tensor.min or 0.0), abs(tensor.max or 0.0))
    if end is None or not largest or not math.isfinite(largest):
        return "-"
    return f"{math.log2(end) - math.log2(largest):.1f}"


@dataclass(frozen=True)
class _Bar:
    """So many values; a bar without a class is a gap."""

    kind: str
    number: int
    what: str


def histogram(tensor: TensorSummary) -> Plot | None:
    """The values that are finite, with bars of their own for the others; None without any."""
    bars = _finite_bars(tensor)
    kinds = {"-Inf": tensor.neg_inf_count, "Inf": tensor.pos_inf_count, "NaN": tensor.nan_count}
    bad = [_Bar("sf-badbar", number, name) for name, number in kinds.items() if number]
    bars += [_Bar("", 0, ""), *bad] if bad and bars else bad
    if not bars:
        return None
    wide = min(WIDTH / len(bars), _WIDEST)
    if bad and wide < _ROOM:  # those that are not finite get room for their names
        wide = (WIDTH - len(bad) * _ROOM) / (len(bars) - len(bad))
    widths = [max(wide, _ROOM) if bar.kind == "sf-badbar" else wide for bar in bars]
    lefts = list(accumulate(widths, initial=0.0))
    most, pieces = max(bar.number for bar in bars), []
    for bar, left, width in zip(bars, lefts, widths, strict=False):
        if bar.number:
            high = max(HEIGHT * bar.number / most, 2.0)  # one of a million is seen, too
            words = {"x": unit(left + width * 0.08), "width": unit(width * 0.84)}
            words |= {"y": unit(HEIGHT - high), "height": unit(high)}
            title = tag("title", f"{bar.what}: {count(bar.number, 'value')}")
            pieces.append(tag("rect", title, class_=bar.kind, **words))
    said = "; ".join(f"{bar.number} {bar.what}" for bar in bars if bar.number)
    middles = [100 * (left + width / 2) / WIDTH for left, width in zip(lefts, widths, strict=False)]
    return Plot(
        name="values by size",
        picture=_svg(pieces, said=f"how many values have which size: {said}"),
        across=_bar_labels(bars, middles),
    )


def _finite_bars(tensor: TensorSummary) -> list[_Bar]:
    # By sign and binary exponent; (0, 0) is zero. Of a negative limit the values are below it,
    # of a positive one below and up to it.
    found: dict[tuple[int, int], int] = {}
    for limit, number in tensor.histogram:
        fraction, exponent = math.frexp(abs(limit))
        is_power = limit > 0 and fraction == 0.5
        found[((limit > 0) - (limit < 0), exponent - is_power)] = number
    if not found:
        return []
    signs = {sign for sign, _ in found}
    exponents = [exponent for sign, exponent in found if sign]
    low, high = min(exponents, default=0), max(exponents, default=0)
    size = math.ceil((high - low + 1) * len(signs - {0}) / _MOST_BARS) or 1

    def bar(sign: int, at: int) -> _Bar:
        number = sum(found.get((sign, exponent), 0) for exponent in range(at, at + size))
        limits = [math.ldexp(sign, min(exponent, 1023)) for exponent in (at - 1, at + size - 1)]
        return _Bar("sf-bar", number, " to ".join(map(short, sorted(limits))))

    stretches = range(low, high + 1, size)
    bars = [bar(-1, at) for at in reversed(stretches)] if -1 in signs else []
    bars += [_Bar("sf-zero", found.get((0, 0), 0), "zero")] if 0 in signs or len(signs) > 1 else []
    return bars + ([bar(1, at) for at in stretches] if 1 in signs else [])


def _bar_labels(bars: list[_Bar], middles: list[float]) -> tuple[Label, ...]:
    """Names of what is not finite, zero, and the ends of the rest where there is room for them."""
    shown = {
        at: "0" if bar.kind == "sf-zero" else bar.what
        for at, bar in zip(middles, bars, strict=True)
        if bar.kind in ("sf-zero", "sf-badbar")
    }
    finite = [at for at, bar in enumerate(bars) if bar.kind == "sf-bar"]
    for at, side in ((finite[-1], -1), (finite[0], 0)) if finite else ():
        if all(abs(middles[at] - other) > _NEAR for other in shown):
            shown[middles[at]] = bars[at].what.split(" to ")[side]
    return tuple(Label(at=at, text=text) for at, text in sorted(shown.items()))


LEVELS = 9
_MOST_ROWS = 40
_MOST_COLUMNS = 160
_TALL = 10.0
_BAD = LEVELS  # the level of a norm that is not finite


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
    samples = series.samples
    size = max(math.ceil(len(samples) / _MOST_COLUMNS), 1)  # samples in one column
    columns = [samples[start : start + size] for start in range(0, len(samples), size)]
    known = [layers for layers, _ in groupby(samples, key=lambda sample: sample.layers)]
    names = list(dict.fromkeys(name for layers in known for name in layers))
    if not names:
        return None
    row_of = _row_labels(names)
    labels = list(dict.fromkeys(row_of.values()))
    grid = _grid(columns, row_of, labels)
    sizes = [each for row in grid for each in row if each is not None and math.isfinite(each)]
    low, high = (min(sizes), max(sizes)) if sizes else (0.0, 0.0)
    levels = [[_level(each, low, high) for each in row] for row in grid]
    pieces = []
    for at, (label, row) in enumerate(zip(labels, grid, strict=True)):
        seen = [each for each in row if each is not None and math.isfinite(each)]
        ends = f": {short(10 ** min(seen))} to {short(10 ** max(seen))}" if seen else ""
        title = tag("title", f"{plain(label)}{ends}")
        pieces.append(tag("g", title + _boxes(levels[at], at * _TALL)))
    said = f"gradient norms of {count(len(labels), 'row')} of layers over the steps"
    rows = f", in {count(len(labels), 'row')} of which each shows its largest"
    is_shortened = len(labels) < len(names)
    return HeatMap(
        picture=_svg(pieces, said=said, height=_TALL * len(labels)),
        rows=tuple(labels),
        across=_column_labels([column[0].step for column in columns]),
        low=short(10**low),
        high=short(10**high),
        has_bad=any(_BAD in row for row in levels),
        note=f"{count(len(names), 'layer')}{rows * is_shortened}; "
        f"{count(len(samples), 'sampled step')}",
    )


def _row_labels(names: list[str]) -> dict[str, str]:
    """The row of each layer: itself, or what it belongs to where there are too many."""
    depth = max(name.count(".") for name in names) + 1
    for keep in range(depth, 0, -1):
        groups = {name: ".".join(name.split(".")[:keep]) for name in names}
        if len(set(groups.values())) <= _MOST_ROWS:
            return groups
    size = math.ceil(len(names) / _MOST_ROWS)
    return {name: f"{names[at - at % size]} ..." for at, name in enumerate(names)}


def _grid(
    columns: list[list[Sample]], row_of: dict[str, str], labels: list[str]
) -> list[list[float | None]]:
    """Of each row the decimal logarithms of its largest norms; None where it has none above 0."""
    found = []
    for column in columns:
        largest = dict.fromkeys(labels, 0.0)
        for layers, same in groupby(column, key=lambda sample: sample.layers):
            # A norm that is not known is 0, one that is NaN infinite.
            sizes = [
                [math.inf if n is not None and math.isnan(n) else n or 0.0 for n in sample.norms]
                for sample in same
            ]
            for name, peak in zip(layers, map(max, zip(*sizes, strict=True)), strict=True):
                largest[row_of[name]] = max(largest[row_of[name]], peak)
        found.append([math.log10(size) if size > 0 else None for size in largest.values()])
    return [list(row) for row in zip(*found, strict=True)]


def _level(size: float | None, low: float, high: float) -> int | None:
    if size is None:
        return None
    if not math.isfinite(size):
        return _BAD
    share = (size - low) / (high - low) if high > low else 0.5
    return min(int(share * LEVELS), LEVELS - 1)


def _boxes(row: list[int | None], top: float) -> Markup:
    """One path for each level; neighbours of one level are one rectangle."""
    wide, at = WIDTH / len(row), 0
    paths: dict[int, str] = {}
    for level, run in groupby(row):
        cells = len(list(run))
        if level is not None:
            size = unit(wide * cells)
            box = f"M{unit(wide * at)} {unit(top)}h{size}v{unit(_TALL)}h-{size}z"
            paths[level] = paths.get(level, "") + box
        at += cells
    return Markup("").join(
        tag("path", class_="sf-hbad" if level == _BAD else f"sf-h{level}", d=path)
        for level, path in sorted(paths.items())
    )


def _column_labels(steps: list[int]) -> tuple[Label, ...]:
    """Round steps, each at the column that has it."""
    if len(steps) < 2:
        return (Label(at=50, text=step_label(steps[0])),)
    numbers = round_numbers(steps[0], steps[-1], _most_steps(steps[-1]))
    columns = [next(at for at, s in enumerate(steps) if s >= number - 1e-9) for number in numbers]
    return tuple(
        Label(at=100 * (at + 0.5) / len(steps), text=step_label(steps[at]))
        for at in dict.fromkeys(columns)
    )


_NAMES = {"loss": "loss", "norm": "gradient norm", "scale": "loss scale", "lr": "learning rate"}
_ALWAYS = ("loss", "norm", "scale")
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


def timeline(
    series: Series,
    window: Window,
    *,
    incidents: Sequence[Incident],
    forecasts: Sequence[Forecast] = (),
) -> list[Plot]:
    """A plot for each column that says something; none where nothing was recorded."""

    def within(column: Sequence[float | None]) -> Iterator[Point]:
        for step, value in zip(series["step"], column, strict=True):
            if value is not None and window.first <= step <= window.last:
                yield step, value

    near = [each for each in incidents if window.first <= each.step <= window.last]
    marks = [incident.step for incident in near]
    bands = [band for each in forecasts if (band := _band(each, window)) is not None]
    skipped = [step for step, was in within(series["skipped"]) if was]
    columns = {"loss": series["loss"]}
    columns |= {f"loss term {k}": v for k, v in list(series.terms.items())[:_MOST_TERMS]}
    columns |= {name: series[name] for name in ("norm", "scale", "lr")}
    plots = []
    for name, column in columns.items():
        points = list(within(column))
        if name == "loss":
            points = _with_bad_losses(points, near)
        varies = any(value != points[0][1] for _, value in points)
        if points and (name in _ALWAYS or varies):
            plots.append(_plot(_NAMES.get(name, name), points, window, marks, skipped, bands))
    return plots


@dataclass(frozen=True, kw_only=True)
class Band:
    """Between which steps the first bad value is expected, and about when."""

    first: int
    last: int
    about: int | None


def _band(forecast: Forecast, window: Window) -> Band | None:
    """The part of it that is in the window; None where that is nothing, or there is no telling."""
    about = None if forecast.steps_left is None else forecast.step + forecast.steps_left
    ends = [forecast.steps_low, forecast.steps_left, forecast.steps_high]
    known = [forecast.step + each for each in ends if each is not None]
    if not known or min(known) > window.last or max(known) < window.first:
        return None
    is_seen = about is not None and window.first <= about <= window.last
    return Band(
        first=max(min(known), window.first),
        last=min(max(known), window.last),
        about=about if is_seen else None,
    )


def _with_bad_losses(points: list[Point], incidents: list[Incident]) -> list[Point]:
    """An incident knows that a loss was bad, also where the step itself was not recorded."""
    seen = [(each.step, report) for each in incidents for report in each.reports]
    bad = {step for step, report in seen if report.has_nan and report.location == "loss"}
    good = [point for point in points if point[0] not in bad]
    return sorted([*good, *((step, math.nan) for step in bad)], key=lambda point: point[0])


def _plot(
    name: str,
    points: list[Point],
    window: Window,
    marks: list[int],
    skipped: list[int],
    bands: Sequence[Band] = (),
) -> Plot:
    good = [point for point in points if math.isfinite(point[1])]
    bad = [step for step, value in points if not math.isfinite(value)]
    across, up = window.axis, axis_of([value for _, value in good] or [0.0])
    said = f"{name}, steps {points[0][0]} to {points[-1][0]}"
    said += f": {short(good[0][1])} to {short(good[-1][1])}" if good else ""
    said += f", {count(len(bad), 'value')} not finite" if bad else ""

    def x(step: int) -> str:
        return unit(WIDTH * across.at(step))

    def y(value: float) -> str:
        return unit(HEIGHT * (1 - up.at(value)))

    def path(kind: str, d: str) -> Markup:
        return tag("path", class_=kind, d=d)

    pieces = [path("sf-rule", f"M0 {y(tick)}H{unit(WIDTH)}") for tick in up.ticks]
    pieces += [
        path("sf-band", f"M{x(band.first)} 0H{x(band.last)}V{unit(HEIGHT)}H{x(band.first)}z")
        for band in bands
    ]
    expected = [band.about for band in bands if band.about is not None]
    pieces += [path("sf-expected", f"M{x(step)} 0V{unit(HEIGHT)}") for step in expected]
    pieces += [path("sf-mark", f"M{x(step)} 0V{unit(HEIGHT)}") for step in marks]
    pieces += [
        path("sf-skip", f"M{x(step)} {unit(HEIGHT * 0.97)}h0") for step in skipped[:_MOST_POINTS]
    ]
    line, is_on = "", False
    for step, value in _thin(points):  # broken where one is not finite
        if math.isfinite(value):
            line += f"L{x(step)} {y(value)}" if is_on else f"M{x(step)} {y(value)}h0"
        is_on = math.isfinite(value)
    pieces.append(path("sf-line", line))
    if len(points) <= min(0.8 * (window.last - window.first), _MOST_POINTS / 4):  # few: as dots
        pieces += [path("sf-dot", f"M{x(step)} {y(value)}h0") for step, value in good]
    pieces += [path("sf-bad", f"M{x(step)} {unit(HEIGHT * 0.06)}h0") for step in bad[:_MOST_POINTS]]
    most = _most_steps(window.last)
    numbers = round_numbers(window.first, window.last, most) if window.first < window.last else []
    steps = [number for number in numbers if number == int(number)] or [window.first]
    return Plot(
        name=name,
        picture=_svg(pieces, said=said),
        across=tuple(Label(at=100 * across.at(each), text=step_label(each)) for each in steps),
        up=tuple(Label(at=100 * (1 - up.at(tick)), text=short(tick)) for tick in up.ticks),
        note=said,
    )


def _thin(points: list[Point]) -> list[Point]:
    """Few enough points for a picture: of each stretch the lowest, the highest and a bad one."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(3 * len(points) / _MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        good = [point for point in stretch if math.isfinite(point[1])]
        ends = [pick(good, key=itemgetter(1)) for pick in (min, max)] if good else []
        bad = [point for point in stretch if not math.isfinite(point[1])][:1]
        kept += sorted({*ends, *bad})
    return kept


ROW = 52  # pixels, as in the style sheet
_LANE = 22
_MOST = 12  # stations; of more the middle is left out
_VERBS = {
    "birth": "first appeared",
    "foreign": "came in",
    "conversion": "became",
    "spread": "still",
}


@dataclass(frozen=True, kw_only=True)
class Station:
    """A row beside the graph."""

    kind: str
    value: str = ""
    what: str
    where: str = ""
    code: str = ""
    lane: int = 0


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The graph and its rows; `lanes` are the passes, from left to right."""

    picture: Markup
    stations: tuple[Station, ...]
    lanes: tuple[str, ...]


def lineage(incident: Incident) -> Lineage | None:
    """None where the way is not known."""
    hops = incident.origin.lineage if incident.origin else ()
    if not hops:
        return None
    lanes = tuple(dict.fromkeys(hop.phase for hop in hops))
    stations = tuple(_stations(incident, hops, lanes))
    picture = _picture(stations, width=_LANE * (len(lanes) + 1))
    return Lineage(picture=picture, stations=stations, lanes=lanes)


def _stations(incident: Incident, hops: Sequence[Hop], lanes: tuple[str, ...]) -> Iterator[Station]:
    left, lane = 0, 0
    shown = _hops_to_show(hops)
    for at, hop in enumerate(hops):
        if at not in shown:
            left += 1
            continue
        lane = lanes.index(hop.phase)
        if left:
            yield Station(kind="more", what=wording.count(left, "more op"), lane=lane)
            left = 0
        module = f"module {wording.plain(hop.module)}" if hop.module else ""
        yield Station(
            kind=hop.kind,
            value=wording.KINDS[hop.nan_type],
            what=_what(hop),
            where=", ".join(filter(None, (wording.hop_line(hop), module))),
            code=wording.plain(hop.code.strip()),
            lane=lane,
        )
    value, what = wording.seen_kind(incident), f"noticed in {wording.noticed(incident)}"
    yield Station(kind="end", value=value, what=what, lane=lane)


def _what(hop: Hop) -> str:
    if hop.kind == "foreign" and hop.phase == "init":
        return "was there before this step"
    at = f" at {wording.short_op(hop.op)}" if hop.op else ""
    return f"{_VERBS.get(hop.kind, 'began')}{at}"


def _hops_to_show(hops: Sequence[Hop]) -> set[int]:
    """All, or the first and last ones and every change."""
    if len(hops) <= _MOST:
        return set(range(len(hops)))
    turns = [at for at, hop in enumerate(hops) if hop.kind != "spread"]
    changes = [at for at in range(1, len(hops)) if hops[at].phase != hops[at - 1].phase]
    ends = {0, 1, 2, len(hops) - 2, len(hops) - 1}
    return ends | set((turns + changes)[: _MOST - len(ends)])


def _picture(stations: Sequence[Station], *, width: int) -> Markup:
    places = [(_LANE * (each.lane + 1), ROW * at + ROW / 2) for at, each in enumerate(stations)]
    rail = f"M{unit(places[0][0])} {unit(places[0][1])}"
    for (x, y), (to_x, to_y) in pairwise(places):  # a soft bend where the lane changes
        middle = unit((y + to_y) / 2)
        bend = f"C{unit(x)} {middle} {unit(to_x)} {middle} {unit(to_x)} {unit(to_y)}"
        rail += f"V{unit(to_y)}" if x == to_x else bend
    pieces = [tag("path", class_="sf-rail", d=rail)]
    pieces += [_node(each.kind, *place) for each, place in zip(stations, places, strict=True)]
    high = ROW * len(stations)
    words = {"viewBox": f"0 0 {width} {high}", "aria-hidden": "true"}
    return tag("svg", Markup("").join(pieces), class_="sf-graph", width=width, height=high, **words)


def _node(kind: str, x: float, y: float) -> Markup:
    def dot(name: str, r: int, down: int = 0) -> Markup:
        return tag("circle", class_=f"sf-n-{name}", r=r, cx=unit(x), cy=unit(y + down))

    if kind == "more":
        return Markup("").join(dot("more", 2, down) for down in (-8, 0, 8))
    if kind in ("spread", "conversion"):
        return dot(kind, 5 if kind == "spread" else 7)
    if kind == "end":
        box = {"x": unit(x - 8), "y": unit(y - 8), "width": "16", "height": "16"}
        return tag("rect", class_="sf-n-end", rx=3, **box)
    return dot("birth", 9) + dot("core", 3)
