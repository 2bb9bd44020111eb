"""Each unit by itself, against the size of its own weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stayfinite.clip.memory import Drop, drop_bad
from stayfinite.clip.norms import exact_dtype, true_norm, wide
from stayfinite.clip.result import ClipResult, left_alone, result_of
from stayfinite.clip.targets import Gradient
from stayfinite.detect.known import note_finite
from stayfinite.detect.parts import compact, plain_parts
from stayfinite.prevent.clipping import options


@dataclass(frozen=True, kw_only=True)
class PerUnit:
    """Clips the gradient of each unit to `ratio` times the norm of its weights (AGC).

    By Brock et al., 2021 (arXiv 2102.06171): a unit is a row of a matrix, a filter of a
    convolution, or a whole vector; the norm of its weights counts as at least `eps`. Nothing is
    learnt. The authors leave the last layer out: give the clipper the other parameters.
    """

    ratio: float = 0.01
    eps: float = 1e-3

    def __post_init__(self) -> None:
        options.positive(self, "ratio")
        options.positive(self, "eps")

    @property
    def mode(self) -> str:
        return "per_unit"

    def begin(self) -> PerUnitStatistics:
        return PerUnitStatistics(self)


class PerUnitStatistics:
    """There are none: the weights say what is allowed."""

    def __init__(self, rule: PerUnit) -> None:
        self._rule = rule

    @property
    def threshold(self) -> float:
        return math.inf

    @property
    def thresholds(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take."""

    def clip(self, gradients: Sequence[Gradient], drop: Drop) -> ClipResult:
        units = [unit for gradient in gradients for unit in _units(gradient)]
        elements = sum(part.numel() for gradient in gradients for part in gradient.memory)
        norms, dropped = [_norms(unit.gradient) for unit in units], dict[str, int]()
        whole = float(_joint([own.largest for own in norms]))  # host sync
        if not math.isfinite(whole):
            found = drop_bad(gradients, drop)
            if found is None:
                return left_alone(elements)
            norms, dropped = [_true_norms(unit.gradient) for unit in units], found
            whole = float(true_norm([unit.gradient for unit in units], 2.0))
        names, after = self._scale(units, norms)
        note_finite([gradient.tensor for gradient in gradients], after)
        return result_of(whole, dropped, elements, was_clipped=bool(names), clipped=names)

    def _scale(
        self, units: Sequence[Unit], norms: Sequence[Norms]
    ) -> tuple[tuple[str, ...], float]:
        """Bring each unit down to its limit; the tensors with such units, and the norm of all."""
        factors = [self._factors(unit, own) for unit, own in zip(units, norms, strict=True)]
        *lowest, after = _read(norms, factors)
        clipped = [number for number, low in enumerate(lowest) if low < 1]
        for number in clipped:
            _multiply(units[number].memory, factors[number], lowest[number])
        return tuple(dict.fromkeys(units[number].name for number in clipped)), after

    def _factors(self, unit: Unit, norms: Norms) -> Tensor:
        """1 for a unit that is small enough."""
        weights = _norms(unit.weight).largest
        # A bad weight, or one that is too large to be squared, allows no more than a tiny one.
        weights = torch.where(weights.isfinite(), weights, 0.0).clamp(min=self._rule.eps)
        limits = self._rule.ratio * weights
        is_above = norms.largest * norms.ratio > limits
        return torch.where(is_above, limits / norms.largest / norms.ratio, 1.0)


class Unit(NamedTuple):
    """Units along the first dimension: what is measured, its weights, and what is multiplied."""

    name: str
    gradient: Tensor
    weight: Tensor
    memory: Tensor


class Norms(NamedTuple):
    """The norm of each unit as `largest * ratio`, since the product of the two may overflow."""

    largest: Tensor
    ratio: Tensor


def _units(gradient: Gradient) -> Iterator[Unit]:
    for part, weight in zip(gradient.memory, _weights(gradient), strict=True):
        is_whole = part.dim() < 2 or part.shape != weight.shape or _has_repeats(part)
        part, weight = _real(part), _real(weight)
        if is_whole:
            yield Unit(gradient.name, part[None], weight[None], compact(part)[None])
        else:
            yield Unit(gradient.name, part, weight, part)


def _weights(gradient: Gradient) -> Sequence[Tensor]:
    """One for each part of the gradient."""
    tensor, param = gradient.tensor, gradient.param.detach()
    is_sparse = tensor.layout is torch.sparse_coo
    if is_sparse and tensor.sparse_dim() == 1 and tensor.dense_dim() > 0:  # of an embedding
        return (param[tensor._indices()[0]],)
    weights = list(plain_parts(param))
    return weights if len(weights) == len(gradient.memory) else [param] * len(gradient.memory)


def _has_repeats(part: Tensor) -> bool:
    """Whether it was expanded, so that it cannot be written as a whole."""
    return any(not step and size > 1 for step, size in zip(part.stride(), part.shape, strict=True))


def _real(part: Tensor) -> Tensor:
    """The same memory; the norm of a complex number is that of its two parts."""
    if not part.is_complex():
        return part
    return torch.view_as_real(part.conj() if part.is_conj() else part)


def _norms(rows: Tensor) -> Norms:
    """True unless one overflows; where one underflows, it is far below any limit."""
    norms = torch.linalg.vector_norm(
        rows, dim=tuple(range(1, rows.dim())), keepdim=True, dtype=exact_dtype(rows)
    )
    return Norms(norms.to(wide(rows)), torch.ones((), device=rows.device))


def _true_norms(rows: Tensor) -> Norms:
    """True for finite elements of any size."""
    inner, rows = tuple(range(1, rows.dim())), rows.to(wide(rows))
    largest = torch.linalg.vector_norm(rows, math.inf, dim=inner, keepdim=True)
    largest = largest.clamp(min=torch.finfo(rows.dtype).tiny)
    return Norms(largest, torch.linalg.vector_norm(rows / largest, dim=inner, keepdim=True))


def _joint(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all units of all tensors; not finite when one of them is not."""
    if not norms:
        return torch.zeros(())
    together = torch.cat([own.to(norms[0].device).flatten() for own in norms])
    joint: Tensor = torch.linalg.vector_norm(together)
    return joint


def _read(norms: Sequence[Norms], factors: Sequence[Tensor]) -> list[float]:
    """The smallest factor of each tensor, and the norm of all that is left."""
    left = [own.largest * factor * own.ratio for own, factor in zip(norms, factors, strict=True)]
    joint = _joint(left)
    smallest = [factor.min().to(joint.device) for factor in factors]
    values: list[float] = torch.stack([*smallest, joint]).tolist()  # host sync
    return values


def _multiply(memory: Tensor, factor: Tensor, lowest: float) -> None:
    factor = factor.reshape([-1] + [1] * (memory.dim() - 1))
    dtype = exact_dtype(memory)
    if lowest > torch.finfo(dtype).tiny:
        memory.mul_(factor.to(dtype))
    else:
        memory.copy_(memory.to(wide(memory)) * factor)
