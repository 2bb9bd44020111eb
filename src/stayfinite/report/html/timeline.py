"""Loss, gradient norm, loss scale and learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stayfinite.records import Incident
from stayfinite.report.html.svg import (
    HEIGHT,
    WIDTH,
    Axis,
    Label,
    Plot,
    axis_of,
    plot,
    round_numbers,
    short,
    tag,
    unit,
)
from stayfinite.report.store.reading import Series
from stayfinite.report.wording import count

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
