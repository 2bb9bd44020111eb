"""Box losses for boxes of any size, also flat, inverted or reduced to a point.

Boxes are (..., 4), two opposite corners x1, y1, x2, y2 in either order. Both boxes of a pair are
measured in units of the box that encloses them, in which nothing can overflow, and the losses do
not depend on units. Only gradients do, and a pair whose enclosing box is smaller than eps gets
none. All are losses, 0 is best, and float32 for half precision.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stayfinite.errors import InputError
from stayfinite.prevent.curves import curve, eps_of, floating, narrowest, widened
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
    near = _near(boxes, target, eps, _STEEPNESS)
    iou, filled = _overlap(_measured(boxes, target), near)
    return reduced(2 - iou - filled, reduction)


def ciou(
    boxes: Tensor, target: Tensor, *, eps: float | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """The complete IoU loss of each pair: 1 - IoU, plus distance of centres, plus aspect ratio.

    >>> ciou(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 3.0, 2.0]]))
    tensor(0.7436)
    """
    near = _near(boxes, target, eps, _STEEPNESS)
    pair = _measured(boxes, target)
    iou, _ = _overlap(pair, near)
    near = _near(boxes, target, eps, _STEEPNESS_OF_SHAPE)
    aspect = _aspect(pair, near)
    with torch.no_grad():
        alpha = safe_div(aspect, 1 - iou + aspect)
    return reduced(1 - iou + _distance(pair, near) + alpha * aspect, reduction)


class _Pair(NamedTuple):
    """Half of each length, along x and y: half, because the whole could overflow."""

    sides: tuple[Tensor, Tensor]
    shared: Tensor  # of both boxes; negative for a gap
    apart: Tensor  # from centre to centre
    around: Tensor  # of the enclosing box


def _measured(boxes: Tensor, target: Tensor) -> _Pair:
    (low, high), (target_low, target_high) = _ends(boxes), _ends(target)
    return _Pair(
        sides=(high - low, target_high - target_low),
        shared=torch.minimum(high, target_high) - torch.maximum(low, target_low),
        apart=(high - target_high) / 2 + (low - target_low) / 2,
        around=torch.maximum(high, target_high) - torch.minimum(low, target_low),
    )


def _ends(boxes: Tensor) -> tuple[Tensor, Tensor]:
    halves = widened(boxes) / 2
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
    dtype = narrowest(floating(boxes).dtype, floating(target).dtype)
    return eps_of(dtype, eps, steepness=steepness)
