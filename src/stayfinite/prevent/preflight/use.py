"""One run of an operation that has a domain, as it was recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from stayfinite.locate.events import Site
from stayfinite.locate.source import Place
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.ranges.seen import Seen
from stayfinite.prevent.preflight.ranges.words import words
from stayfinite.records import Phase


@dataclass(slots=True, eq=False, kw_only=True)
class Use:
    """Which operation ran where, on what, and what its inputs can be.

    `operands` has a Reach for each tensor and the plain value for all else; `seen` the statistics
    of those tensors that the checks ask for. `inside` is the code of torch that ran it, if any.
    `has_gradient`: a backward pass will go through it.
    """

    name: str
    place: Place
    site: Site
    phase: Phase
    dtype: torch.dtype
    operands: tuple[Any, ...]
    seen: dict[int, Seen]
    inside: str | None = None
    made: Reach = field(default_factory=Reach)
    has_gradient: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def reach(self, index: int) -> Reach | None:
        value = self.operands[index] if index < len(self.operands) else None
        return value if isinstance(value, Reach) else None

    def number(self, index: int) -> float | None:
        value = self.operands[index] if index < len(self.operands) else None
        return float(value) if isinstance(value, (bool, int, float)) else None

    @property
    def is_handled(self) -> bool:
        """Whether what it gives is looked at for Inf and NaN, or bounded, before it is used."""
        return any(handles(reach) for reach in self.made.followers(2))


def handles(reach: Reach) -> bool:
    """Whether it is what somebody does who expects Inf or NaN."""
    return reach.op in _HANDLERS


_HANDLERS = words(
    """clamp clamp_min clamp_max nan_to_num isinf isnan isfinite minimum fmin eq ne nansum nanmean
    isposinf isneginf"""
)
