"""Statistics of the gradients of one update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Norms = list[tuple[str, float]]


@dataclass(frozen=True, kw_only=True)
class GradientStatistics:
    """The norm of all gradients, and those parameters whose own norm is largest."""

    norm: float
    largest: tuple[tuple[str, float], ...] = ()


@torch.no_grad()
def gradient_statistics(
    named: Iterable[tuple[str, Tensor]], *, shown: int = 5
) -> GradientStatistics:
    """The statistics of these parameters' gradients; one host read for all of them.

    Norms are taken in float64, so that large finite gradients do not overflow.
    """
    having = [(name, param.grad) for name, param in named if param.grad is not None]
    norms = [torch.linalg.vector_norm(_dense(grad), dtype=_wide(grad)) for _, grad in having]
    if not norms:
        return GradientStatistics(norm=0.0)
    values = torch.stack([norm.to(norms[0].device) for norm in norms])
    total, *each = torch.cat([torch.linalg.vector_norm(values)[None], values]).tolist()  # host sync
    by_size = sorted(zip((name for name, _ in having), each, strict=True), key=lambda one: -one[1])
    return GradientStatistics(norm=total, largest=tuple(by_size[:shown]))


def _dense(gradient: Tensor) -> Tensor:
    """The numbers of a gradient; of a sparse one those that it holds, added up by place."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _wide(gradient: Tensor) -> torch.dtype:
    has_double = gradient.device.type != "mps"
    return torch.promote_types(gradient.dtype, torch.float64 if has_double else torch.float32)
