"""What a clip found and did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClipResult:
    """What clipping found and did.

    `norm` is the true norm of the finite rest before it was clipped; float(result) gives it. It
    is NaN where drop="nothing" has left bad gradients as they were. `max_norm` is the norm that
    was allowed, inf where each tensor or each unit has a limit of its own; then `clipped` names
    the tensors that were scaled. `dropped` names the tensors in which something was not finite
    and was set to 0.

    >>> result = ClipResult(norm=12.5, was_clipped=True, max_norm=1.0)
    >>> float(result)
    12.5
    """

    norm: float
    was_clipped: bool
    dropped: tuple[str, ...] = ()
    dropped_elements: int = 0
    kept_elements: int = 0
    max_norm: float = math.inf
    clipped: tuple[str, ...] = ()

    def __float__(self) -> float:
        return self.norm


def result_of(
    norm: float,
    dropped: Mapping[str, int],
    elements: int,
    *,
    was_clipped: bool,
    max_norm: float = math.inf,
    clipped: tuple[str, ...] = (),
) -> ClipResult:
    """A result from how many elements were dropped of which tensor, and of how many in all."""
    count = sum(dropped.values())
    return ClipResult(
        norm=norm,
        was_clipped=was_clipped,
        dropped=tuple(dropped),
        dropped_elements=count,
        kept_elements=elements - count,
        max_norm=max_norm,
        clipped=clipped,
    )


def left_alone(elements: int) -> ClipResult:
    """The result where something is bad, and nothing may be dropped."""
    return result_of(math.nan, {}, elements, was_clipped=False)
