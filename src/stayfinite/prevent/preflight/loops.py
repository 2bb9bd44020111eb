"""The same weights again and again on their own output: does it grow from turn to turn?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from stayfinite.locate.events import Site
from stayfinite.prevent.preflight.ranges.reach import Reach

_NEAR = 8


@dataclass(slots=True)
class Loop:
    """Where the weights are used, and how large the output was at each turn."""

    site: Site
    latest: Reach
    sizes: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """By how much the output grows in one turn, on average over the later ones."""
        sizes = [size for size in self.sizes if size > 0]
        half = len(sizes) // 2
        if len(sizes) < 4:
            return 1.0
        return math.exp((math.log(sizes[-1]) - math.log(sizes[half])) / (len(sizes) - 1 - half))


class Loops:
    """One Loop for each parameter that meets what it has made."""

    def __init__(self) -> None:
        self._by_weight: dict[int, Loop] = {}

    def add(self, site: Site, given: list[Reach], made: Reach, out: Tensor) -> None:
        for weight in given:
            if weight.op != "parameter" or not weight.learned:
                continue
            known = self._by_weight.get(id(weight))
            others = [reach for reach in given if reach is not weight]
            is_turn = known is not None and any(
                other.comes_from(known.latest, within=_NEAR) for other in others
            )
            if known is None or not is_turn:
                known = self._by_weight[id(weight)] = Loop(site, made)
            known.latest = made
            known.sizes.append(float(out.detach().abs().double().square().mean().sqrt()))

    def growing(self) -> list[Loop]:
        return list(self._by_weight.values())
