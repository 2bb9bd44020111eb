"""Box losses for boxes of any size, also flat, inverted or reduced to a point.

Boxes are (..., 4), two opposite corners x1, y1, x2, y2 in either order. Both boxes of a pair are
measured in units of the box that encloses them, in which nothing can overflow; the overlap does
not depend on units. Only the gradient is translated back, and a pair whose enclosing box is
smaller than eps gets none. All are losses, 0 is best, and float32 for half precision.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stayfinite.errors import InputError
from stayfinite.prevent.curves import curve, eps_of, floating, widened
from stayfinite.prevent.masked import Reduction, reduced
from stayfinite.prevent.ops import safe_atan2, safe_div

# A box below a 128th of the enclosing one has a place and a size to learn before its shape.
_SHAPELESS = 2.0**-7
# Gradients by a coordinate are at most so many times 1 / size of the enclosing box.
_STEEPNESS, _STEEPNESS_OF_SHAPE = 4.0, 2.0**8


def giou(
    boxes: Tensor, target: Tensor, *, eps: float | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """The generalised IoU loss, 1 - GIoU, of each pair: 0 for equal boxes, at most 2.

    >>> giou(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 3.0, 2.0]]))
    tensor(0.6667)
    """
    iou, union = _overlap(_enclosed(boxes, target, eps))
    return reduced(2 - iou - union, reduction)  # the enclosing box has area 1


def ciou(
    boxes: Tensor, target: Tensor, *, eps: float | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """The complete IoU loss of each pair: 1 - IoU, plus distance of centres, plus aspect ratio.

    >>> ciou(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 3.0, 2.0]]))
    tensor(0.7436)
    """
    iou, _ = _overlap(_enclosed(boxes, target, eps))
    pair = _enclosed(boxes, target, eps, is_square=True)
    angles = [safe_atan2(side[..., 0], side[..., 1], _SHAPELESS) for side in pair.sides()]
    aspect = (2 / math.pi * (angles[0] - angles[1])).square()
    with torch.no_grad():
        alpha = safe_div(aspect, 1 - iou + aspect)
    return reduced(1 - iou + _distance(pair) + alpha * aspect, reduction)


class _Pair(NamedTuple):
    """Corners of both boxes, each (..., 2), in units of the box around them."""

    low: tuple[Tensor, Tensor]
    high: tuple[Tensor, Tensor]
    is_flat: Tensor

    def sides(self) -> tuple[Tensor, Tensor]:
        return self.high[0] - self.low[0], self.high[1] - self.low[1]


def _enclosed(
    boxes: Tensor, target: Tensor, eps: float | None, *, is_square: bool = False
) -> _Pair:
    """The pair in units of each side of the enclosing box, or of its longer side in both."""
    steepness = _STEEPNESS_OF_SHAPE if is_square else _STEEPNESS
    near = eps_of(_checked(boxes, target), eps, steepness=steepness)
    ends = [_ends(widened(box)) for box in (boxes, target)]
    low = torch.minimum(ends[0][0], ends[1][0]).detach()
    high = torch.maximum(ends[0][1], ends[1][1]).detach()
    half = high / 2 - low / 2  # high - low can overflow
    half = half.amax(-1, keepdim=True).expand_as(half) if is_square else half

    def place(x: Tensor, low: Tensor, half: Tensor) -> Tensor:
        return (x / 2 - low / 2) / torch.where(half == 0, 1.0, half)

    def slope(x: Tensor, low: Tensor, half: Tensor) -> Tensor:
        is_near = 2 * half < near
        return torch.where(is_near, 0.0, 0.5 / torch.where(is_near, 1.0, half))

    def placed(end: int) -> tuple[Tensor, Tensor]:
        # No slope by low and half: they are constants, on which the losses do not depend.
        first, second = (curve(place, (slope, slope, slope), box[end], low, half) for box in ends)
        return first, second

    return _Pair(placed(0), placed(1), half == 0)


def _overlap(pair: _Pair) -> tuple[Tensor, Tensor]:
    """IoU, and the union's part of the enclosing box; of a flat pair only the other side counts."""
    shared = (torch.minimum(*pair.high) - torch.maximum(*pair.low)).clamp_min(0)
    first, second, both = (
        torch.where(pair.is_flat, 1.0, side).prod(-1) for side in (*pair.sides(), shared)
    )
    union = first + second - both
    return both / union.clamp_min(1e-12), union


def _distance(pair: _Pair) -> Tensor:
    """Between the centres, squared, over the squared diagonal of the enclosing box."""
    apart = (pair.low[0] + pair.high[0] - pair.low[1] - pair.high[1]) / 2
    around = torch.maximum(*pair.high) - torch.minimum(*pair.low)
    return apart.square().sum(-1) / around.square().sum(-1).clamp_min(1e-12)


def _ends(boxes: Tensor) -> tuple[Tensor, Tensor]:
    first, second = boxes[..., :2], boxes[..., 2:]
    return torch.minimum(first, second), torch.maximum(first, second)


def _checked(boxes: Tensor, target: Tensor) -> torch.dtype:
    """The dtype that the gradient has to fit into."""
    if boxes.shape != target.shape or boxes.shape[-1:] != (4,):
        raise InputError(
            f"boxes are {tuple(boxes.shape)} and {tuple(target.shape)}; "
            "both must be (..., 4) with the same shape."
        )
    dtypes = floating(boxes).dtype, floating(target).dtype
    return min(dtypes, key=lambda dtype: torch.finfo(dtype).max)
