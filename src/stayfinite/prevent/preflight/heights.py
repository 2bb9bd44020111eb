"""How high float16 values stand, line by line, and constants that it cannot hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stayfinite.detect.scan import largest
from stayfinite.locate.events import Site
from stayfinite.locate.ops import tensors_in
from stayfinite.locate.source import Place

HIGHEST = 65504.0  # of float16


@dataclass(slots=True)
class Height:
    """The largest size that a line has given in float16, and a constant beyond its range."""

    site: Site
    size: float
    too_large: float | None = None

    @property
    def headroom(self) -> float:
        """How many doublings are left."""
        return math.log2(HIGHEST / self.size) if self.size > 0 else math.inf


class Heights:
    """One Height for each line."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[str, int], Height] = {}
        self.trains_in_half = False

    def add(
        self,
        site: Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
        *,
        has_gradient: bool,
    ) -> None:
        place = site.place
        self.trains_in_half |= has_gradient and out.dtype is torch.float16
        if place is None:
            return
        size = largest(out)
        height = Height(site, size, _constant(args, kwargs, out, size))
        key = _key(place)
        known = self.by_place.get(key)
        if (
            known is None
            or height.too_large is not None
            or (known.too_large is None and _order(height) > _order(known))
        ):
            self.by_place[key] = height


def _key(place: Place) -> tuple[str, int]:
    return place.code.co_filename, place.line


def _order(height: Height) -> float:
    return height.size if math.isfinite(height.size) else 0.0


def _constant(
    args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, size: float
) -> float | None:
    """A finite number in the program that became Inf here."""
    if math.isfinite(size):
        return None
    numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, (int, float))]
    for number in numbers:
        if math.isfinite(number) and abs(number) > HIGHEST:
            return float(number)
    given = [t for t in tensors_in(args) if t.is_floating_point() and t.dtype is not torch.float16]
    for tensor in given:
        beyond = tensor[tensor.isfinite() & (tensor.abs() > HIGHEST)]
        if beyond.numel() and bool((beyond == beyond.reshape(-1)[0]).all()):
            return float(beyond.reshape(-1)[0])
    return None
