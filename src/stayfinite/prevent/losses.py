"""Losses from logits, finite with finite gradients for all finite logits.

All are losses: 0 is best. Half precision is computed, and returned, in float32. `mask` is a bool
tensor, True keeps; the mean of nothing is 0, so that a batch without positives is harmless.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.curves import curve, widened
from stayfinite.prevent.masked import Reduction, checked_mask, kept_only, reduced


def stable_bce(
    logits: Tensor, target: Tensor, *, mask: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """Binary cross-entropy of logits with targets in [0, 1].

    >>> stable_bce(torch.tensor([3e38, -3e38]), torch.tensor([1.0, 0.0]))
    tensor(0.)
    """
    logits, target, mask = _prepared(logits, target, mask)
    loss = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return reduced(loss, reduction, mask)


def focal(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float | None = 0.25,
    gamma: float = 2.0,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Sigmoid focal loss: cross-entropy times (1 - p)**gamma, p the probability of the truth.

    A target between 0 and 1 weighs the losses of both answers. `alpha` weighs positives, 1 - alpha
    negatives; None weighs neither. Any gamma of 0 or more will do, also below 1, where a power of
    1 - p has an infinite derivative at p = 1.

    >>> focal(torch.tensor([100.0, -100.0]), torch.tensor([1.0, 1.0]), gamma=0.5)
    tensor(12.5000)
    """
    if not gamma >= 0:
        raise ConfigError(f"gamma is {gamma}; it must be at least 0.")
    logits, target, mask = _prepared(logits, target, mask)
    for_true, for_false = (1.0, 1.0) if alpha is None else (alpha, 1 - alpha)
    loss = for_true * target * _focal_of(logits, gamma)
    loss = loss + for_false * (1 - target) * _focal_of(-logits, gamma)
    return reduced(loss, reduction, mask)


def _focal_of(logits: Tensor, gamma: float) -> Tensor:
    """The focal loss where the truth is 1, and its derivative, both with p in log space."""

    # Not softplus, which leaves out what is below exp(-20).
    def weight(x: Tensor) -> Tensor:
        return (gamma * functional.logsigmoid(-x)).exp() if gamma else torch.ones_like(x)

    def slope(x: Tensor) -> Tensor:
        growth = functional.logsigmoid(x) * torch.sigmoid(x)
        return weight(x) * (gamma * growth - torch.sigmoid(-x))

    return curve(lambda x: -weight(x) * functional.logsigmoid(x), (slope,), logits)


def dice(
    logits: Tensor,
    target: Tensor,
    *,
    dim: int | tuple[int, ...] | None = None,
    smooth: float = 1.0,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Soft Dice loss, 1 - (2 * overlap + smooth) / (prediction + target + smooth).

    Sums go over `dim`, or over all but the first dimension. An empty target that is predicted
    empty costs nothing.

    >>> dice(torch.full((1, 4), -100.0), torch.zeros(1, 4))
    tensor(0.)
    """
    if not smooth > 0:
        raise ConfigError(f"smooth is {smooth}; it must be greater than 0.")
    logits, target, mask = _prepared(logits, target, mask)
    probability, target = kept_only(mask, torch.sigmoid(logits), target)
    dims = tuple(range(min(1, logits.ndim - 1), logits.ndim)) if dim is None else dim
    overlap = (probability * target).sum(dims)
    total = probability.sum(dims) + target.sum(dims)
    return reduced(1 - (2 * overlap + smooth) / (total + smooth), reduction)


def dfl_loss(
    logits: Tensor, target: Tensor, *, mask: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """Distribution Focal Loss: cross-entropy with the two bins around a target between them.

    `logits` are (..., bins), `target` is (...) in units of bins, within [0, bins - 1]; beyond it
    counts as the end. It is computed from the logits: a probability would round to 0, and its
    -log to Inf, as soon as logits are 104 apart.

    >>> dfl_loss(torch.tensor([[200.0, 0.0, -50.0]]), torch.tensor([1.5]))
    tensor(225.)
    """
    _check_bins(logits, target)
    logits, target = widened(logits), widened(target)
    if mask is not None:
        mask = checked_mask(mask, target)
        (logits,), (target,) = kept_only(mask.unsqueeze(-1), logits), kept_only(mask, target)
    bins = logits.shape[-1]
    target = target.clamp(0, bins - 1)
    # A NaN is no index; it stays in the weight.
    left = target.nan_to_num().long().clamp(0, bins - 2)
    weight = target - left
    pair = torch.stack([left, left + 1], -1)
    # Logits that are further apart than the largest number give -inf.
    log_p = logits.log_softmax(-1).gather(-1, pair).clamp_min(torch.finfo(logits.dtype).min)
    loss = -(log_p * torch.stack([1 - weight, weight], -1)).sum(-1)
    return reduced(loss, reduction, mask)


def _check_bins(logits: Tensor, target: Tensor) -> None:
    if logits.ndim < 1 or logits.shape[-1] < 2 or logits.shape[:-1] != target.shape:
        raise InputError(
            f"logits are {tuple(logits.shape)} and the target is {tuple(target.shape)}; they "
            "must be (..., bins), with at least 2 bins, and (...), with the same dimensions."
        )


def _prepared(
    logits: Tensor, target: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Floats of one dtype and shape, with 0 where they are masked out."""
    if logits.shape != target.shape:
        raise InputError(
            f"logits are {tuple(logits.shape)} and the target is {tuple(target.shape)}; "
            "they must have the same shape."
        )
    logits = widened(logits)
    target = target.to(logits.dtype)
    mask = None if mask is None else checked_mask(mask, logits)
    logits, target = kept_only(mask, logits, target)
    return logits, target, mask
