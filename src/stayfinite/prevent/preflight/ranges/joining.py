"""How operations over many elements change bounds: sums, products, matrices, softmax."""

from __future__ import annotations

from stayfinite.prevent.preflight.ranges import bounds as b
from stayfinite.prevent.preflight.ranges.bounds import ANY, INF, Bounds
from stayfinite.prevent.preflight.ranges.operation import Operation
from stayfinite.prevent.preflight.ranges.reach import Reach


def any_of(op: Operation) -> Bounds:
    """Elements that come from any of the tensors."""
    parts = [reach.bounds for reach in op.reaches() if not reach.is_index]
    return b.hull(*parts) if parts else ANY


def total(op: Operation) -> Bounds:
    given, source = op.bounds(0), op.args[0]
    found = b.totalled(given, op.per_output)
    if isinstance(source, Reach) and source.peaks and given.low >= 0:
        return found._replace(low=max(found.low, given.high), low_at=0.0)
    return found


def running_total(op: Operation) -> Bounds:
    return b.hull(op.bounds(0), b.totalled(op.bounds(0), b.MANY))


def scattered_total(op: Operation) -> Bounds:
    """What was there, with sums of any of the new elements on top."""
    given = [reach.bounds for reach in op.reaches() if not reach.is_index]
    low = min(0.0, min(part.low for part in given[1:])) if given[1:] else 0.0
    high = max(0.0, max(part.high for part in given[1:])) if given[1:] else 0.0
    more = Bounds(-INF if low < 0 else 0.0, INF if high > 0 else 0.0)
    return b.added(given[0], more) if given else ANY


def product(op: Operation) -> Bounds:
    given = op.bounds(0)
    if given.low < 0:
        return ANY
    high = INF if given.high > 1 else given.high
    return Bounds(0.0 if given.low < 1 else given.low, high, given.low_at, given.high_at)


def sum_of_products(op: Operation) -> Bounds:
    """As of matrices: 0 or more where all sides are, and 0 where one of them vanishes."""
    parts = [reach.bounds for reach in op.reaches()]
    if len(parts) < 2 or any(part.low < 0 for part in parts):
        return ANY
    return Bounds(0.0, INF, min(part.low_at if part.low == 0 else INF for part in parts))


def softmax(op: Operation) -> Bounds:
    return Bounds(0.0, 1.0, op.limits.vanish, op.limits.saturate)


def log_softmax(op: Operation) -> Bounds:
    return Bounds(-INF, 0.0, 0.0, op.limits.saturate)
