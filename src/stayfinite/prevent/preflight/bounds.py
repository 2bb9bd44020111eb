"""Intervals: between which numbers the elements of a tensor can lie, and why.

A bound is reached at once (the 0 of a ReLU), or only when rounding does it: `low_at` and `high_at`
say how large the argument must grow for that. A sigmoid is exactly 1 above 17, and 0 below -104.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stayfinite.detect.memory import undisturbed

INF = math.inf
MANY = 64
End = tuple[float, float]
"""A bound, and the size of the argument at which it is reached; 0: at once."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What somebody does who expects Inf or NaN.
_HANDLERS = words(
    """clamp clamp_min clamp_max nan_to_num isinf isnan isfinite minimum fmin eq ne nansum nanmean
    isposinf isneginf"""
)


class Bounds(NamedTuple):
    """low and high, and the size of the argument at which each is reached; 0: at once."""

    low: float = -INF
    high: float = INF
    low_at: float = 0.0
    high_at: float = 0.0

    @property
    def ends(self) -> tuple[End, End]:
        return (self.low, self.low_at), (self.high, self.high_at)

    def holds(self, point: float) -> bool:
        return self.low <= point <= self.high


ANY = Bounds()
POSITIVE = Bounds(0.0, INF)
UNIT = Bounds(0.0, 1.0)


def exactly(value: float) -> Bounds:
    return Bounds(value, value)


def between(low: End, high: End) -> Bounds:
    return Bounds(low[0], high[0], low[1], high[1])


def hull(*parts: Bounds) -> Bounds:
    """What any of them can be."""
    return between(min(part.ends[0] for part in parts), _highest(part.ends[1] for part in parts))


def _highest(ends: Iterable[End]) -> End:
    """Of equal ones that which is reached first."""
    return max(ends, key=lambda end: (end[0], -end[1]))


def negative(a: Bounds) -> Bounds:
    return Bounds(-a.high, -a.low, a.high_at, a.low_at)


def sum_of(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(
        -INF if -INF in (a.low, b.low) else a.low + b.low,
        INF if INF in (a.high, b.high) else a.high + b.high,
        max(a.low_at, b.low_at),
        max(a.high_at, b.high_at),
    )


def difference_of(a: Bounds, b: Bounds) -> Bounds:
    return sum_of(a, negative(b))


def product_of(a: Bounds, b: Bounds) -> Bounds:
    corners = [_product(x, y) for x in a.ends for y in b.ends]
    return between(min(corners), _highest(corners))


def _product(a: End, b: End) -> End:
    """A 0 is reached by the nearer way, anything else by both."""
    if a[0] == 0 or b[0] == 0:
        return 0.0, min(at for value, at in (a, b) if value == 0)
    return a[0] * b[0], max(a[1], b[1])


def quotient_of(a: Bounds, b: Bounds) -> Bounds:
    """A bound of 0 opens the range to Inf, one on both sides of 0 to anything."""
    if b.low < 0 < b.high or b.low == b.high == 0:
        return ANY
    if b.low < 0:
        return quotient_of(negative(a), negative(b))
    low = (0.0, INF) if b.high == INF else (1 / b.high, b.high_at)
    return product_of(a, between(low, (INF if b.low == 0 else 1 / b.low, b.low_at)))


def even(a: Bounds, function: Callable[[float], float]) -> Bounds:
    """An even function that grows with the size of its argument."""
    ends = [(value_at(function, value), at) for value, at in a.ends]
    return between((0.0, 0.0) if a.low < 0 < a.high else min(ends), _highest(ends))


def image_of(a: Bounds, function: Callable[[float], float]) -> Bounds:
    """A function that never falls; where it has no value the bound is open."""
    return Bounds(
        value_at(function, a.low, -INF), value_at(function, a.high, INF), a.low_at, a.high_at
    )


def larger(a: Bounds, b: Bounds) -> Bounds:
    return between(max(a.ends[0], b.ends[0]), _highest((a.ends[1], b.ends[1])))


def smaller(a: Bounds, b: Bounds) -> Bounds:
    return negative(larger(negative(a), negative(b)))


def at_least(a: Bounds, low: float) -> Bounds:
    """Clamped from below."""
    bottom = a.ends[0] if a.low > low else (low, 0.0)
    return between(a.ends[1] if bottom[0] > a.high else bottom, a.ends[1])


def total_of(a: Bounds, count: int) -> Bounds:
    """The sum of so many such elements; many do not all vanish by rounding at once."""
    n = max(count, 1)
    low, high = (
        (value * n if value else 0.0, INF if at and n > MANY else at) for value, at in a.ends
    )
    return between(low, high)


def round_to(a: Bounds, dtype: torch.dtype) -> Bounds:
    """The bounds as the dtype holds them: 1e-8 is 0 in float16."""
    if not dtype.is_floating_point or dtype is torch.float64:
        return a
    kind = np.float16 if dtype is torch.float16 else np.float32
    with np.errstate(over="ignore", under="ignore"):
        return a._replace(low=float(kind(a.low)), high=float(kind(a.high)))


def value_at(function: Callable[[float], float], x: float, otherwise: float = INF) -> float:
    try:
        value = float(function(x))
    except OverflowError:
        return INF
    except (ValueError, ZeroDivisionError):
        return otherwise
    return otherwise if math.isnan(value) else value


Open = Literal["layer", "other", "ratio", "data", "log", "parameter"]
"""Why a bound is open, the most telling first: the output of a layer, something nobody bounds, a
quotient, data, the log of a probability, a parameter."""


@dataclass(slots=True, eq=False)
class Reach:
    """The values that a tensor can take.

    `learned`: training changes it; `fed`: it depends on data; `frozen`: on parameters that are
    not trained now. `guarded`: its values were chosen by a look at them, as torch.where does.
    `peaks`: its largest element is `high`. `chance`: how likely it is that nothing was selected
    or counted in it. `read`: the program looked at it and may have gone another way.
    """

    bounds: Bounds = ANY
    learned: bool = False
    fed: bool = False
    op: str = ""
    made_from: tuple[Reach, ...] = ()
    open: Open | None = None
    frozen: bool = False
    guarded: bool = False
    peaks: bool = False
    unwritten: bool = False
    settled: bool = False
    is_index: bool = False
    read: bool = False
    chance: float | None = None
    users: list[Reach] = field(default_factory=list)

    @property
    def varies(self) -> bool:
        return self.learned or self.fed

    @property
    def is_raw(self) -> bool:
        """Whether it is data, and nothing that a model has made of it."""
        return self.fed and not (self.learned or self.frozen or self.is_index)

    @property
    def is_open(self) -> bool:
        return self.bounds.low == -INF or self.bounds.high == INF

    def ancestors(self, depth: int) -> Iterator[Reach]:
        """Itself and what it was made from, the nearest first, so many operations back."""
        yield self
        yield from _around(self, depth, lambda reach: reach.made_from)

    def followers(self, depth: int) -> Iterator[Reach]:
        """What was made from it, the nearest first."""
        return _around(self, depth, lambda reach: reach.users)

    def comes_from(self, other: Reach, *, within: int) -> bool:
        return any(reach is other for reach in self.ancestors(within))

    def has_been_read(self) -> bool:
        return any(reach.read for reach in self.ancestors(3))

    def is_handled(self, *, within: int) -> bool:
        """Whether a value is looked at for Inf and NaN, or bounded, before it is used."""
        return any(reach.op in _HANDLERS for reach in self.followers(within))


def _around(
    start: Reach, depth: int, next_to: Callable[[Reach], Iterable[Reach]]
) -> Iterator[Reach]:
    near, seen = {id(start): start}, {id(start)}
    for _ in range(depth):
        found = {id(new): new for reach in near.values() for new in next_to(reach)}
        near = {key: new for key, new in found.items() if key not in seen}
        seen |= near.keys()
        yield from near.values()


_SAMPLE = 1 << 16


class SeenValues(NamedTuple):
    """Extremes, smallest and typical size of the finite elements, and counts."""

    elements: int
    low: float = math.inf
    high: float = -math.inf
    smallest: float = math.inf
    typical: float = 0.0
    zeros: int = 0
    bad: int = 0


@undisturbed
def look(tensor: Tensor) -> SeenValues:
    """The statistics of a tensor; a few host reads."""
    elements, values = tensor.numel(), _finite(tensor)
    if values is None or not values.numel():
        return SeenValues(elements, bad=elements if values is not None else 0)
    low, high = values.aminmax()
    sizes = values.abs()
    sample = sizes[:: max(1, sizes.numel() // _SAMPLE)]
    return SeenValues(
        elements,
        low=float(low),
        high=float(high),
        smallest=float(sizes.min()),
        typical=float(sample.double().median()),
        zeros=int((values == 0).sum()),
        bad=elements - values.numel(),
    )


@undisturbed
def bounds_now(tensor: Tensor) -> Bounds:
    """Between which numbers its finite elements lie."""
    if tensor.dtype is torch.bool:
        return UNIT
    values = _finite(tensor)
    if values is None or not values.numel():
        return ANY
    low, high = values.aminmax()
    return Bounds(float(low), float(high))


def _finite(tensor: Tensor) -> Tensor | None:
    """Its finite elements in one row; None where it has no numbers to look at."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype is torch.bool:
        values = values.to(torch.uint8)
    values = values.reshape(-1)
    if not values.is_floating_point():
        return values
    if values.element_size() < 4:
        values = values.float()
    is_finite = values.isfinite()
    return values if bool(is_finite.all()) else values[is_finite]  # host sync
