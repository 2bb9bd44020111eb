"""Losses and masked means that are finite, with finite gradients, for all finite inputs.

All are losses: 0 is best. Half precision is computed, and returned, in float32. `mask` is a bool
tensor, True keeps; the mean of nothing is 0, so that a batch without positives is harmless. What
is masked out does not matter at all, even if it is NaN: it gets a gradient of 0 and gives nothing
to anyone else's.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.ops import (
    as_float,
    curve,
    direction,
    eps_of,
    narrowest,
    safe_atan2,
    safe_div,
    widen,
)
from stayfinite.settings import require_choice

Reduction = Literal["mean", "sum", "none"]

_COLDEST = 2.0**-14
# A box below a 128th of the enclosing one has a place and a size to learn before its shape.
_SHAPELESS = 2.0**-7
# Gradients by a coordinate are at most so many times 1 / size of the enclosing box.
_STEEPNESS, _STEEPNESS_OF_SHAPE = 4.0, 2.0**8


def stable_bce(
    logits: Tensor, target: Tensor, *, mask: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """Binary cross-entropy of logits with targets in [0, 1].

    >>> stable_bce(torch.tensor([3e38, -3e38]), torch.tensor([1.0, 0.0]))
    tensor(0.)
    """
    logits, target, mask = _prepare(logits, target, mask)
    loss = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return _reduce(loss, reduction, mask)


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
    logits, target, mask = _prepare(logits, target, mask)
    for_true, for_false = (1.0, 1.0) if alpha is None else (alpha, 1 - alpha)
    loss = for_true * target * _focal_of(logits, gamma)
    loss = loss + for_false * (1 - target) * _focal_of(-logits, gamma)
    return _reduce(loss, reduction, mask)


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
    logits, target, mask = _prepare(logits, target, mask)
    probability, target = _keep(mask, torch.sigmoid(logits)), _keep(mask, target)
    dims = tuple(range(min(1, logits.ndim - 1), logits.ndim)) if dim is None else dim
    overlap = (probability * target).sum(dims)
    total = probability.sum(dims) + target.sum(dims)
    return _reduce(1 - (2 * overlap + smooth) / (total + smooth), reduction)


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
    if logits.ndim < 1 or logits.shape[-1] < 2 or logits.shape[:-1] != target.shape:
        raise InputError(
            f"logits are {tuple(logits.shape)} and the target is {tuple(target.shape)}; they "
            "must be (..., bins), with at least 2 bins, and (...), with the same dimensions."
        )
    logits, target = widen(logits), widen(target)
    if mask is not None:
        mask = _checked_mask(mask, target)
        logits, target = _keep(mask.unsqueeze(-1), logits), _keep(mask, target)
    bins = logits.shape[-1]
    target = target.clamp(0, bins - 1)
    # A NaN is no index; it stays in the weight.
    left = target.nan_to_num().long().clamp(0, bins - 2)
    weight = target - left
    pair = torch.stack([left, left + 1], -1)
    # Logits that are further apart than the largest number give -inf.
    log_p = logits.log_softmax(-1).gather(-1, pair).clamp_min(torch.finfo(logits.dtype).min)
    loss = -(log_p * torch.stack([1 - weight, weight], -1)).sum(-1)
    return _reduce(loss, reduction, mask)


def _prepare(
    logits: Tensor, target: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Floats of one dtype and shape, with 0 where they are masked out."""
    if logits.shape != target.shape:
        raise InputError(
            f"logits are {tuple(logits.shape)} and the target is {tuple(target.shape)}; "
            "they must have the same shape."
        )
    logits = widen(logits)
    target = target.to(logits.dtype)
    mask = None if mask is None else _checked_mask(mask, logits)
    return _keep(mask, logits), _keep(mask, target), mask


def masked_softmax(x: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Softmax over the elements that the mask keeps, 0 for the others; all 0 if it keeps none.

    >>> masked_softmax(torch.zeros(2, 3), torch.tensor([[True, True, False], [False] * 3]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    kept = _checked_mask(mask, x)
    x = as_float(x)
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
    x = as_float(x)
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    if mask is None:
        parts = widen(x) / max(1, math.prod([x.shape[each] for each in dims]))
    else:
        kept = _checked_mask(mask, x)
        count = kept.sum(dims, keepdim=True).clamp_min(1)
        parts = torch.where(kept, widen(x), 0.0) / count
    return parts.sum(dims, keepdim=keepdim).to(x.dtype)


def _reduce(loss: Tensor, reduction: Reduction, mask: Tensor | None = None) -> Tensor:
    """The losses that the mask keeps as one number, or all of them, 0 where it does not."""
    if reduction == "mean":
        return masked_mean(loss, mask)
    loss = _keep(mask, loss)
    if reduction == "none":
        return loss
    require_choice("reduction", reduction, get_args(Reduction))
    return loss.sum().clamp(max=torch.finfo(loss.dtype).max)


def _keep(mask: Tensor | None, tensor: Tensor) -> Tensor:
    """The tensor with 0 in place of what the mask leaves out."""
    return tensor if mask is None else torch.where(mask, tensor, 0.0)


def _checked_mask(mask: Tensor, x: Tensor) -> Tensor:
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


def kl(
    p_logits: Tensor,
    q_logits: Tensor,
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """KL(p || q) of two categorical distributions given by their logits, over `dim`.

    In distillation p is the teacher. A class that p excludes with a logit of -inf costs nothing;
    one that q alone excludes costs a quarter of the largest number. `mask` has the shape without
    `dim`.

    >>> kl(torch.tensor([0.0, 0.0, -torch.inf]), torch.tensor([0.0, 0.0, -torch.inf]))
    tensor(0.)
    """
    if p_logits.shape != q_logits.shape:
        raise InputError(
            f"the logits of p are {tuple(p_logits.shape)} and those of q {tuple(q_logits.shape)}; "
            "they must have the same shape."
        )
    dtype = torch.promote_types(as_float(p_logits).dtype, as_float(q_logits).dtype)
    p_logits, q_logits = widen(p_logits.to(dtype)), widen(q_logits.to(dtype))
    if mask is not None:
        mask = _checked_mask(mask, p_logits.select(dim, 0))
        inside = mask.unsqueeze(dim)
        p_logits, q_logits = _keep(inside, p_logits), _keep(inside, q_logits)
    # Logits that are further apart than the largest number give -inf; differences need room.
    lowest = torch.finfo(p_logits.dtype).min / 4
    log_p, log_q = (x.log_softmax(dim).clamp_min(lowest) for x in (p_logits, q_logits))
    return _reduce((log_p.exp() * (log_p - log_q)).sum(dim), reduction, mask)


def info_nce(
    queries: Tensor,
    keys: Tensor,
    *,
    temperature: Tensor | float = 0.07,
    reduction: Reduction = "mean",
) -> Tensor:
    """InfoNCE: each query, (batch, features), should be nearest in angle to its own key.

    The other keys of the batch are the negatives. Temperatures below 6e-5 count as that (a learned
    one in float16: below 8e-3). A zero vector is equally near to all and gets no gradient, nor
    does one so short that its gradient is too large for the dtype.

    >>> info_nce(torch.eye(3), torch.eye(3), temperature=1.0)
    tensor(0.5514)
    """
    if queries.ndim != 2 or queries.shape != keys.shape:
        raise InputError(
            f"queries are {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            "both must be (batch, features), with the key of each query in its row."
        )
    temperature = _temperature(temperature, widen(queries))
    near = eps_of(queries.dtype) + 8 / (temperature.detach() * torch.finfo(queries.dtype).max)
    kind = queries.device.type
    no_autocast: AbstractContextManager[Any] = nullcontext()
    if torch.amp.is_autocast_available(kind):  # it would multiply in half precision
        no_autocast = torch.autocast(kind, enabled=False)
    with no_autocast:
        angles = direction(widen(queries), near) @ direction(widen(keys), near).T
    return _reduce(-(angles / temperature).log_softmax(-1).diagonal(), reduction)


def _temperature(temperature: Tensor | float, like: Tensor) -> Tensor:
    """At least the coldest; below that a learned one still gets a gradient, to come back."""
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ConfigError(f"temperature is {temperature}; it must be greater than 0.")
        return like.new_full((), max(temperature, _COLDEST))
    # Its gradient is up to 2 / temperature**2, which float16 must hold.
    coldest = 2.0**-7 if temperature.dtype == torch.float16 else _COLDEST
    return curve(lambda t: t.clamp_min(coldest), (torch.ones_like,), widen(temperature))


# Box losses for boxes of any size, also flat, inverted or reduced to a point.
#
# Boxes are (..., 4), two opposite corners x1, y1, x2, y2 in either order. Both boxes of a pair are
# measured in units of the box that encloses them, in which nothing can overflow, and the losses do
# not depend on units. Only gradients do, and a pair whose enclosing box is smaller than eps gets
# none.


def giou(
    boxes: Tensor, target: Tensor, *, eps: float | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """The generalised IoU loss, 1 - GIoU, of each pair: 0 for equal boxes, at most 2.

    >>> giou(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 3.0, 2.0]]))
    tensor(0.6667)
    """
    near = _near(boxes, target, eps, _STEEPNESS)
    iou, filled = _overlap(_measure(boxes, target), near)
    return _reduce(2 - iou - filled, reduction)


def ciou(
    boxes: Tensor, target: Tensor, *, eps: float | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """The complete IoU loss of each pair: 1 - IoU, plus distance of centres, plus aspect ratio.

    >>> ciou(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 3.0, 2.0]]))
    tensor(0.7436)
    """
    near = _near(boxes, target, eps, _STEEPNESS)
    pair = _measure(boxes, target)
    iou, _ = _overlap(pair, near)
    near = _near(boxes, target, eps, _STEEPNESS_OF_SHAPE)
    aspect = _aspect(pair, near)
    with torch.no_grad():
        alpha = safe_div(aspect, 1 - iou + aspect)
    return _reduce(1 - iou + _distance(pair, near) + alpha * aspect, reduction)


class _Pair(NamedTuple):
    """Half of each length, along x and y: half, because the whole could overflow."""

    sides: tuple[Tensor, Tensor]
    shared: Tensor  # of both boxes; negative for a gap
    apart: Tensor  # from centre to centre
    around: Tensor  # of the enclosing box


def _measure(boxes: Tensor, target: Tensor) -> _Pair:
    (low, high), (target_low, target_high) = _ends(boxes), _ends(target)
    return _Pair(
        sides=(high - low, target_high - target_low),
        shared=torch.minimum(high, target_high) - torch.maximum(low, target_low),
        apart=(high - target_high) / 2 + (low - target_low) / 2,
        around=torch.maximum(high, target_high) - torch.minimum(low, target_low),
    )


def _ends(boxes: Tensor) -> tuple[Tensor, Tensor]:
    halves = widen(boxes) / 2
    first, second = halves[..., :2], halves[..., 2:]
    # Not minimum and maximum: at a tie they share the gradient, and a flat box would stay flat.
    is_swapped = first > second
    return torch.where(is_swapped, second, first), torch.where(is_swapped, first, second)


def _overlap(pair: _Pair, near: float) -> tuple[Tensor, Tensor]:
    """IoU, and how much of the enclosing box is filled; of a flat pair only one side counts."""
    unit = pair.around.detach()
    least = torch.full_like(unit, near / 2)
    first, second, shared, around = (
        torch.where(unit == 0, 1.0, _in_units(length, unit, least).clamp_min(0)).prod(-1)
        for length in (*pair.sides, pair.shared, pair.around)
    )
    union = first + second - shared
    return shared / union.clamp_min(1e-12), union / around  # around is 1, but has a gradient


def _aspect(pair: _Pair, near: float) -> Tensor:
    # Each box in units of its own: in those of the enclosing one its sides may both round to 0.
    least = (_longer(pair.around) * _SHAPELESS).clamp_min(near / 2)
    sides = [_in_units(side, _longer(side), least) for side in pair.sides]
    angles = [safe_atan2(side[..., 0], side[..., 1]) for side in sides]
    return (2 / math.pi * (angles[0] - angles[1])).square()


def _distance(pair: _Pair, near: float) -> Tensor:
    """Between the centres, squared, over the squared diagonal of the enclosing box."""
    unit = _longer(pair.around)
    least = torch.full_like(unit, near / 2)
    apart, around = (_in_units(each, unit, least) for each in (pair.apart, pair.around))
    return apart.square().sum(-1) / around.square().sum(-1).clamp_min(1e-12)


def _longer(sides: Tensor) -> Tensor:
    sides = sides.detach()
    return sides.amax(-1, keepdim=True).expand_as(sides)


def _in_units(length: Tensor, unit: Tensor, least: Tensor) -> Tensor:
    """length / unit; no gradient where the unit is smaller than the least."""

    def quotient(length: Tensor, unit: Tensor, least: Tensor) -> Tensor:
        return length / torch.where(unit == 0, 1.0, unit)

    def slope(length: Tensor, unit: Tensor, least: Tensor) -> Tensor:
        is_near = unit < least
        return torch.where(is_near, 0.0, 1 / torch.where(is_near, 1.0, unit))

    # The units are constants: the losses do not depend on them.
    return curve(quotient, (slope,), length, unit, least)


def _near(boxes: Tensor, target: Tensor, eps: float | None, steepness: float) -> float:
    """eps, for the dtype that the gradient has to fit into."""
    if boxes.shape != target.shape or boxes.shape[-1:] != (4,):
        raise InputError(
            f"boxes are {tuple(boxes.shape)} and {tuple(target.shape)}; "
            "both must be (..., 4) with the same shape."
        )
    dtype = narrowest(as_float(boxes).dtype, as_float(target).dtype)
    return eps_of(dtype, eps, steepness=steepness)
