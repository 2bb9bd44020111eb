"""Gradients changed in place: bad values set to 0, and the rest made smaller."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from stayfinite.clip.norms import WIDENED, Norm, by_kind, exact_dtype
from stayfinite.clip.targets import Gradient
from stayfinite.detect.parts import compact, pieces
from stayfinite.detect.scan import all_finite

Drop = Literal["elements", "tensors", "nothing"]


def drop_bad(gradients: Sequence[Gradient], drop: Drop) -> dict[str, int] | None:
    """Set what is not finite to 0; how many elements, by the name of the gradient.

    None when there is something bad, and nothing may be dropped.
    """
    if all_finite(part for gradient in gradients for part in gradient.memory):
        return {}
    if drop == "nothing":
        return None
    zero = _zero_all if drop == "tensors" else _zero_bad
    return {
        gradient.name: sum(map(zero, gradient.memory))
        for gradient in gradients
        if not all_finite(gradient.memory)
    }


def _zero_all(part: Tensor) -> int:
    compact(part).zero_()
    return part.numel()


def _zero_bad(part: Tensor) -> int:
    memory, count = compact(part), 0
    for _, piece in pieces(memory, WIDENED):
        bad = ~piece.isfinite()
        count += int(bad.sum())  # host sync
        piece.masked_fill_(bad, 0)
    return count * part.numel() // memory.numel()


def scale_down(parts: list[Tensor], norm: Norm, max_norm: float) -> None:
    """Bring the norm down to `max_norm`."""
    first, second = _factors(norm, max_norm)
    for group in by_kind(parts):
        memory = [compact(part) for part in group]
        for factor in _steps(first, second, group[0]):
            # As a tensor: a plain number would be rounded to float16 first.
            dtype, device = exact_dtype(group[0]), group[0].device
            torch._foreach_mul_(memory, torch.tensor(factor, dtype=dtype, device=device))


def scale_each(parts: Sequence[tuple[list[Tensor], Norm, float]]) -> None:
    """Bring the norm of each list of parts down to its own limit, in few calls."""
    factors: dict[int, float] = {}
    plain: list[Tensor] = []
    for own, norm, max_norm in parts:
        first, second = _factors(norm, max_norm)
        if all(_is_plain(part, first * second) for part in own):
            plain += own
            factors.update((id(part), first * second) for part in own)
        else:
            scale_down(own, norm, max_norm)
    for group in by_kind(plain):
        memory = [compact(part) for part in group]
        torch._foreach_mul_(memory, [factors[id(part)] for part in group])


def _is_plain(part: Tensor, factor: float) -> bool:
    """Whether it can be multiplied by a plain number."""
    return exact_dtype(part) is part.dtype and factor > torch.finfo(part.dtype).tiny


def _factors(norm: Norm, max_norm: float) -> tuple[float, float]:
    """Two whose product brings it down; the first is exact."""
    _, exponent = math.frexp(norm.largest)
    first = math.ldexp(1.0, -exponent)  # a power of two: multiplying by it is exact
    return first, max_norm / norm.ratio / (norm.largest * first)


def _steps(first: float, second: float, part: Tensor) -> Iterable[float]:
    """Both in one where that is not too small for the dtype."""
    fits = first * second > torch.finfo(exact_dtype(part)).tiny
    return (first * second,) if fits else (first, second)
