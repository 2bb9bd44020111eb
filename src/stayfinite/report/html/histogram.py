"""How large the values of a tensor were: a bar for each power of two, 0 in the middle."""

from __future__ import annotations

import math
from itertools import accumulate

from markupsafe import Markup

from stayfinite.records import TensorSummary
from stayfinite.report.html.svg import HEIGHT, WIDTH, Label, Plot, plot, short, tag, unit
from stayfinite.report.wording import count

_MOST_BARS = 56
_NEAR = 18  # percent: two labels would touch
_ROOM, _WIDEST = 95.0, 160.0  # units for a bar with a name, and for any
_LARGEST = {
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
        across=_labels(bars, places),
    )


def doublings_left(tensor: TensorSummary) -> str:
    """How often the largest value can double before its dtype ends; "-" where that is unknown."""
    end = _LARGEST.get(tensor.dtype.removeprefix("torch."))
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


def _labels(bars: list[Bar], places: list[tuple[float, float]]) -> tuple[Label, ...]:
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
