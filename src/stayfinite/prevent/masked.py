"""Softmax and mean over what a mask keeps, also when it keeps nothing.

True keeps. What is masked out does not matter at all, even if it is NaN: it gets a gradient of 0
and gives nothing to anyone else's.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.curves import floating, widened

Reduction = Literal["mean", "sum", "none"]


def masked_softmax(x: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Softmax over the elements that the mask keeps, 0 for the others; all 0 if it keeps none.

    >>> masked_softmax(torch.zeros(2, 3), torch.tensor([[True, True, False], [False] * 3]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    kept = checked_mask(mask, x)
    x = floating(x)
    # Scores of an empty row are 0 instead of -inf, whose softmax is NaN.
    other = torch.where(kept.any(dim, keepdim=True), -torch.inf, 0.0).to(x.dtype)
    return torch.where(kept, torch.where(kept, x, other).softmax(dim), 0.0)


def masked_mean(
    x: Tensor,
    mask: Tensor | None = None,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
) -> Tensor:
    """The mean of the elements that the mask keeps, over `dim` or all; 0 if there are none.

    Each element is divided before they are added, so that the sum cannot overflow.

    >>> masked_mean(torch.tensor([3e38, 1e38, float("nan")]), torch.tensor([True, True, False]))
    tensor(2.0000e+38)
    """
    x = floating(x)
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    if mask is None:
        parts = widened(x) / max(1, math.prod([x.shape[each] for each in dims]))
    else:
        kept = checked_mask(mask, x)
        count = kept.sum(dims, keepdim=True).clamp_min(1)
        parts = torch.where(kept, widened(x), 0.0) / count
    return parts.sum(dims, keepdim=keepdim).to(x.dtype)


def reduced(loss: Tensor, reduction: Reduction, mask: Tensor | None = None) -> Tensor:
    """The losses that the mask keeps as one number, or all of them, 0 where it does not."""
    if reduction == "mean":
        return masked_mean(loss, mask)
    if mask is not None:
        loss = torch.where(mask, loss, 0.0)
    if reduction == "none":
        return loss
    if reduction != "sum":
        raise ConfigError(
            f"reduction is {reduction!r}; it must be one of {', '.join(get_args(Reduction))}."
        )
    return loss.sum().clamp(max=torch.finfo(loss.dtype).max)


def kept_only(mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 in place of what the mask leaves out."""
    if mask is None:
        return tensors
    return tuple(torch.where(mask, tensor, 0.0) for tensor in tensors)


def checked_mask(mask: Tensor, x: Tensor) -> Tensor:
    """The mask in the shape of x; InputError if it is not a mask for it."""
    if mask.dtype != torch.bool:
        raise InputError(
            f"the mask has dtype {mask.dtype}; it must be torch.bool, where True keeps. "
            "From zeros and ones, use mask.bool(); from an additive mask, mask == 0."
        )
    try:
        return mask.expand(x.shape)
    except RuntimeError:
        raise InputError(
            f"the mask has shape {tuple(mask.shape)}, which does not broadcast to {tuple(x.shape)}."
        ) from None
