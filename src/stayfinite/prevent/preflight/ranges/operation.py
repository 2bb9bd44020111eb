"""One run of an operator, with what its inputs can be in the place of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from stayfinite.prevent.preflight.ranges.bounds import ANY, Bounds, exactly
from stayfinite.prevent.preflight.ranges.reach import Reach


class Limits(NamedTuple):
    """Arguments from which on rounding decides: exp is 0, exp is Inf, a sigmoid is 1, tanh is 1."""

    vanish: float
    overflow: float
    saturate: float
    turn: float


_LIMITS = {
    torch.float16: Limits(17.3, 11.09, 7.6, 4.2),
    torch.bfloat16: Limits(92.2, 88.7, 5.5, 3.1),
    torch.float64: Limits(745.1, 709.8, 36.7, 19.1),
}
_SINGLE = Limits(103.9, 88.7, 16.6, 9.0)


def limits_of(dtype: torch.dtype) -> Limits:
    return _LIMITS.get(dtype, _SINGLE)


class Operation(NamedTuple):
    """Tensors are given as Reach, all else as it was passed.

    `dtype` is that of the result, and `per_output` how many elements went into one of it.
    """

    base: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    per_output: int = 1

    @property
    def limits(self) -> Limits:
        return limits_of(self.dtype)

    def value(self, index: int, name: str = "") -> Any:
        return self.args[index] if index < len(self.args) else self.kwargs.get(name)

    def bounds(self, index: int, name: str = "") -> Bounds:
        """Of a tensor, or of a number in its place; anything if there is neither."""
        found = bounds_of_value(self.value(index, name))
        return ANY if found is None else found

    def number(self, index: int, name: str) -> float | None:
        value = self.value(index, name)
        return float(value) if isinstance(value, (bool, int, float)) else None

    def reaches(self) -> list[Reach]:
        """Those of all tensors, of lists too."""
        given = [*self.args, *self.kwargs.values()]
        items = [i for v in given for i in (v if isinstance(v, (list, tuple)) else (v,))]
        return [item for item in items if isinstance(item, Reach)]


def bounds_of_value(value: Any) -> Bounds | None:
    if isinstance(value, Reach):
        return value.bounds
    return exactly(float(value)) if isinstance(value, (bool, int, float)) else None


Formula = Callable[[Operation], Bounds]
