"""Pieces of pictures: axes, ticks, and SVG in which every text is escaped.

A plot is 1000 by 100 units and is stretched to the place that it gets; its labels are HTML beside
it, so that they keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stayfinite.report.html.words import shown

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
        low, high, value = (self._even(each) for each in (self.low, self.high, value))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def _even(self, value: float) -> float:
        return math.log10(max(value, 1e-320)) if self.is_log else _bounded(value) / 2

    @property
    def ticks(self) -> list[float]:
        return decades(self.low, self.high) if self.is_log else round_numbers(self.low, self.high)


def _bounded(value: float) -> float:
    return min(max(value, -_LARGEST), _LARGEST)


def axis_of(values: Sequence[float]) -> Axis:
    """An axis with room for these finite values, in powers of ten where they are far apart."""
    low, high = _bounded(min(values)), _bounded(max(values))
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


def unit(value: float) -> str:
    """A length in a picture."""
    return f"{value:.1f}".removesuffix(".0")


def tag(name: str, content: Markup | str = "", **attributes: object) -> Markup:
    """An element; `class_` is `class`, and `stroke_width` is `stroke-width`."""
    words = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), shown(value))
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, words, shown(content))


def plot(pieces: Iterable[Markup], *, said: str, height: float = HEIGHT) -> Markup:
    """The whole picture; `said` is what a screen reader tells of it."""
    box = f"0 0 {unit(WIDTH)} {unit(height)}"
    words = {"viewBox": box, "preserveAspectRatio": "none", "role": "img", "aria-label": said}
    return tag("svg", Markup("").join(pieces), class_="sf-plot", **words)
