"""Intervals: between which numbers the elements of a tensor can lie, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stayfinite.detect.memory import undisturbed

# Intervals: between which numbers the elements of a tensor can lie, and how easily they get there.
#
# A bound is reached at once (the 0 of a ReLU), or only when rounding does it: `low_at` and
# `high_at` say how large the argument must grow for that. A sigmoid is exactly 1 above 17, and 0
# below -104.

INF = math.inf
MANY = 64


class Bounds(NamedTuple):
    """low and high, and the size of the argument at which each is reached; 0: at once."""

    low: float = -INF
    high: float = INF
    low_at: float = 0.0
    high_at: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.low > -INF or self.high < INF

    def holds(self, point: float) -> bool:
        return self.low <= point <= self.high


ANY = Bounds()
POSITIVE = Bounds(0.0, INF)
UNIT = Bounds(0.0, 1.0)


def exactly(value: float) -> Bounds:
    return Bounds(value, value)


def hull(*parts: Bounds) -> Bounds:
    """What any of them can be."""
    low = min(parts, key=lambda part: (part.low, part.low_at))
    high = min(parts, key=lambda part: (-part.high, part.high_at))
    return Bounds(low.low, high.high, low.low_at, high.high_at)


def negative(a: Bounds) -> Bounds:
    return Bounds(-a.high, -a.low, a.high_at, a.low_at)


def added(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(
        _sum(a.low, b.low, -INF),
        _sum(a.high, b.high, INF),
        max(a.low_at, b.low_at),
        max(a.high_at, b.high_at),
    )


def subtracted(a: Bounds, b: Bounds) -> Bounds:
    return added(a, negative(b))


def multiplied(a: Bounds, b: Bounds) -> Bounds:
    corners = [
        (_product(a.low, b.low), _at(a.low, a.low_at, b.low, b.low_at)),
        (_product(a.low, b.high), _at(a.low, a.low_at, b.high, b.high_at)),
        (_product(a.high, b.low), _at(a.high, a.high_at, b.low, b.low_at)),
        (_product(a.high, b.high), _at(a.high, a.high_at, b.high, b.high_at)),
    ]
    low = min(corners)
    high = max(corners, key=lambda corner: (corner[0], -corner[1]))
    return Bounds(low[0], high[0], low[1], high[1])


def divided(a: Bounds, b: Bounds) -> Bounds:
    if b.low < 0 < b.high:
        return ANY
    if b.low == b.high == 0:
        return ANY
    return multiplied(a, inverse(b))


def inverse(b: Bounds) -> Bounds:
    """1 / b for a b of one sign; a bound of 0 opens the range to Inf."""
    if b.low >= 0:
        low = (0.0, INF) if b.high == INF else (1 / b.high, b.high_at)
        return Bounds(low[0], INF if b.low == 0 else 1 / b.low, low[1], b.low_at)
    return negative(inverse(negative(b)))


def squared(a: Bounds) -> Bounds:
    return even(a, lambda x: x * x)


def magnitude(a: Bounds) -> Bounds:
    return even(a, abs)


def even(a: Bounds, function: Callable[[float], float]) -> Bounds:
    """An even function that grows with the size of its argument."""
    low, high = mapped(function, a.low), mapped(function, a.high)
    top = max((low, -a.low_at), (high, -a.high_at))
    if a.low < 0 < a.high:
        return Bounds(0.0, top[0], 0.0, -top[1])
    bottom = min((low, a.low_at), (high, a.high_at))
    return Bounds(bottom[0], top[0], bottom[1], -top[1])


def rising(a: Bounds, function: Callable[[float], float]) -> Bounds:
    """A function that never falls; where it has no value the bound is open."""
    return Bounds(mapped(function, a.low, -INF), mapped(function, a.high, INF), a.low_at, a.high_at)


def clamped(a: Bounds, low: float | None, high: float | None) -> Bounds:
    bottom = (a.low, a.low_at) if low is None or a.low > low else (low, 0.0)
    top = (a.high, a.high_at) if high is None or a.high < high else (high, 0.0)
    bottom = min(bottom, top) if bottom[0] > top[0] else bottom
    return Bounds(bottom[0], top[0], bottom[1], top[1])


def larger(a: Bounds, b: Bounds) -> Bounds:
    low = max((a.low, a.low_at), (b.low, b.low_at))
    high = max((a.high, -a.high_at), (b.high, -b.high_at))
    return Bounds(low[0], high[0], low[1], -high[1])


def smaller(a: Bounds, b: Bounds) -> Bounds:
    return negative(larger(negative(a), negative(b)))


def totalled(a: Bounds, count: int) -> Bounds:
    """The sum of so many such elements; many do not all vanish by rounding at once."""
    n = max(count, 1)
    low_at = INF if a.low_at and n > MANY else a.low_at
    high_at = INF if a.high_at and n > MANY else a.high_at
    return Bounds(_product(a.low, n), _product(a.high, n), low_at, high_at)


def rounded(a: Bounds, dtype: torch.dtype) -> Bounds:
    """The bounds as the dtype holds them: 1e-8 is 0 in float16."""
    if not dtype.is_floating_point or dtype is torch.float64:
        return a
    kind = np.float16 if dtype is torch.float16 else np.float32
    with np.errstate(over="ignore", under="ignore"):
        return a._replace(low=float(kind(a.low)), high=float(kind(a.high)))


def mapped(function: Callable[[float], float], x: float, otherwise: float = INF) -> float:
    try:
        value = float(function(x))
    except OverflowError:
        return INF
    except (ValueError, ZeroDivisionError):
        return otherwise
    return otherwise if math.isnan(value) else value


def _sum(a: float, b: float, open_end: float) -> float:
    return open_end if open_end in (a, b) else a + b


def _product(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _at(a: float, a_at: float, b: float, b_at: float) -> float:
    """How far it is to the product: to a 0 by the nearer way, to anything else by both."""
    if a == 0 and b == 0:
        return min(a_at, b_at)
    if a == 0 or b == 0:
        return a_at if a == 0 else b_at
    return max(a_at, b_at)


# Why a bound is open, the most telling first: the output of a layer, something nobody bounds, a
# quotient, data, the log of a probability, a parameter.
Open = Literal["layer", "other", "ratio", "data", "log", "parameter"]
_TELLING: tuple[Open, ...] = ("layer", "other", "ratio", "data", "log", "parameter")


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
        near, seen = [self], {id(self)}
        for _ in range(depth + 1):
            yield from near
            parents = [parent for reach in near for parent in reach.made_from]
            near = _new(parents, seen)

    def followers(self, depth: int) -> Iterator[Reach]:
        """What was made from it, the nearest first."""
        near, seen = [self], {id(self)}
        for _ in range(depth):
            users = [user for reach in near for user in reach.users]
            near = _new(users, seen)
            yield from near

    def comes_from(self, other: Reach, *, within: int) -> bool:
        return any(reach is other for reach in self.ancestors(within))

    def has_been_read(self) -> bool:
        return any(reach.read for reach in self.ancestors(3))


def _new(reaches: list[Reach], seen: set[int]) -> list[Reach]:
    found = []
    for reach in reaches:
        if id(reach) not in seen:
            seen.add(id(reach))
            found.append(reach)
    return found


def why_open(parents: tuple[Reach, ...]) -> Open | None:
    """The most telling reason among those parents that have an open bound."""
    found = [parent.open for parent in parents if parent.open is not None and parent.is_open]
    return min(found, key=_TELLING.index) if found else None


_SAMPLE = 1 << 16


class Seen(NamedTuple):
    """Extremes, smallest and typical size of the finite elements, and counts."""

    shape: tuple[int, ...]
    elements: int
    low: float = math.inf
    high: float = -math.inf
    smallest: float = math.inf
    typical: float = 0.0
    zeros: int = 0
    bad: int = 0

    @property
    def closeness(self) -> float:
        """The smallest size as a part of the typical one."""
        return self.smallest / self.typical if self.typical > 0 else 0.0


@undisturbed
def look(tensor: Tensor) -> Seen:
    """The statistics of a tensor; a few host reads."""
    shape, elements = tuple(tensor.shape), tensor.numel()
    values = _finite(tensor)
    if values is None or not values.numel():
        return Seen(shape, elements, bad=elements if values is not None else 0)
    low, high = values.aminmax()
    sizes = values.abs()
    sample = sizes[:: max(1, sizes.numel() // _SAMPLE)]
    return Seen(
        shape,
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


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())
