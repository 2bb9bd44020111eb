"""Lengths and directions of vectors of any size, from subnormal to the largest numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from stayfinite.prevent.curves import curve, floating, widened


def safe_norm(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """The Euclidean norm over `dim`, or of the whole tensor; for a zero vector the gradient is 0.

    Nothing is squared before it is divided by the largest element, so that neither large nor
    small elements are lost; a norm that is too large for the dtype is its largest number.

    >>> safe_norm(torch.tensor([[3e30, 4e30], [0.0, 0.0]]), dim=-1)
    tensor([5.0000e+30, 0.0000e+00])
    """
    x = floating(x)
    dims = _dims(x, dim)
    if not x.numel():
        return x.sum(dims, keepdim=keepdim)
    limit = torch.finfo(x.dtype).max

    def length(x: Tensor) -> Tensor:
        ratios, largest = _ratios(x, dims)
        return (_root_of_squares(ratios, dims) * largest).clamp(max=limit)

    def slope(x: Tensor) -> Tensor:
        ratios, _ = _ratios(x, dims)
        return ratios / _root_of_squares(ratios, dims)

    norm = curve(length, (slope,), widened(x)).to(x.dtype)
    return norm if keepdim else norm.squeeze(dims)


def direction(x: Tensor, near: Tensor | float) -> Tensor:
    """x over its length along the last dimension; a zero vector stays zero.

    A vector whose largest element is below `near` gets no gradient: that of its direction is
    1 / length.
    """

    def slope(x: Tensor, largest: Tensor) -> Tensor:
        is_near = largest < near
        return torch.where(is_near, 0.0, 1 / torch.where(is_near, 1.0, largest))

    # The direction does not depend on the divisor, so it may be a constant.
    largest = x.detach().abs().amax(-1, keepdim=True)
    divisor = torch.where(largest == 0, 1.0, largest)
    ratios = curve(torch.div, (slope,), x, divisor.expand_as(x))
    return ratios / _root_of_squares(ratios, (-1,))


def _ratios(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The elements over the largest of their vector, and that one; all 0 for a zero vector."""
    largest = x.detach().abs().amax(dims, keepdim=True)
    return x / torch.where(largest == 0, 1.0, largest), largest


def _root_of_squares(ratios: Tensor, dims: tuple[int, ...]) -> Tensor:
    """At least 1, for one of the ratios is; and 1 for a zero vector."""
    total = (ratios * ratios).sum(dims, keepdim=True)
    return torch.where(total == 0, 1.0, total).sqrt()


def _dims(x: Tensor, dim: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else dim
