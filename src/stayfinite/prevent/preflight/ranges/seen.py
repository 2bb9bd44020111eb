"""What the elements of a tensor are right now."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stayfinite.detect.parts import undisturbed
from stayfinite.prevent.preflight.ranges.bounds import ANY, UNIT, Bounds

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
