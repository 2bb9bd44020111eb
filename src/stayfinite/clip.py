"""Clipping that survives what it is there for: NaN, Inf, and gradients too large to be squared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.detect.gradients import params_of
from stayfinite.detect.parts import compact, pieces, plain_parts
from stayfinite.detect.scan import all_finite
from stayfinite.detect.walk import Named
from stayfinite.errors import ConfigError, InputError

Target = nn.Module | Optimizer | Tensor | Iterable[Tensor]
Drop = Literal["elements", "tensors"]

_SUMMED = 1 << 16  # elements that are added up in their own precision
_WIDENED = 1 << 20  # elements that are widened together
_HALF = {torch.float16, torch.bfloat16}
# For other powers, and for smaller norms of these, a term may underflow.
_QUICK_POWERS = {1.0, 2.0, math.inf}
_SAFE_NORM = 1e-15


@dataclass(frozen=True, kw_only=True)
class ClipResult:
    """What clipping found and did.

    `norm` is the true norm of the finite rest before it was clipped; float(result) gives it.
    `dropped` names the tensors in which something was not finite and was set to 0.
    """

    norm: float
    was_clipped: bool
    dropped: tuple[str, ...] = ()
    dropped_elements: int = 0
    kept_elements: int = 0

    def __float__(self) -> float:
        return self.norm


@torch.no_grad()
def clip_gradients(
    target: Target,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    drop: Drop = "elements",
    names: Iterable[str] | None = None,
) -> ClipResult:
    """Scale all gradients together, in place, so that their norm is at most `max_norm`.

    The target is a module, an optimizer, a parameter or several. NaN and Inf are set to 0 first,
    or with drop="tensors" each whole gradient that has one; the norm is that of the rest, and
    `max_norm` inf drops without clipping. Gradients are named as in the module or the optimizer,
    by `names` (one for each parameter), or else by their number. Costs one pass and one host read
    when there is nothing to do.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> weight.grad = torch.tensor([3e38, float("nan"), 4e30])
    >>> clip_gradients(weight, 1.0, names=["weight"]).dropped
    ('weight',)
    >>> weight.grad
    tensor([1.0000e+00, 0.0000e+00, 1.3333e-08])
    """
    _check_options(max_norm, norm_type, drop)
    memory = [(name, _memory(gradient)) for name, gradient in _gradients(target, names)]
    parts = [part for _, own in memory for part in own]
    norm, dropped = _quick_norm(parts, norm_type), dict[str, int]()
    if norm is None:
        dropped = _drop_bad(memory, whole=drop == "tensors")
        norm = _true_norm(parts, norm_type)
    if norm > max_norm:
        _multiply(parts, norm, max_norm)
    return ClipResult(
        norm=float(norm),
        was_clipped=norm > max_norm,
        dropped=tuple(dropped),
        dropped_elements=sum(dropped.values()),
        kept_elements=sum(part.numel() for part in parts) - sum(dropped.values()),
    )


class _Norm(float):
    """A norm as `largest * ratio`, since the product of the two may overflow."""

    largest: float
    ratio: float

    def __new__(cls, largest: float, ratio: float = 1.0) -> _Norm:
        norm = super().__new__(cls, largest * ratio)
        norm.largest, norm.ratio = largest, ratio
        return norm


def _check_options(max_norm: float, norm_type: float, drop: str) -> None:
    if not max_norm > 0:
        raise ConfigError(
            f"max_norm is {max_norm}; it must be greater than 0. "
            "To drop bad values without clipping, use inf."
        )
    if not norm_type >= 1:
        raise ConfigError(f"norm_type is {norm_type}; it must be at least 1, or inf.")
    if drop not in get_args(Drop):
        raise ConfigError(f"drop is {drop!r}; it must be one of {', '.join(get_args(Drop))}.")


def _gradients(target: Target, names: Iterable[str] | None) -> list[Named]:
    """Each gradient once, by the name of its parameter."""
    found = {
        id(param.grad): (name, param.grad)
        for name, param in _parameters(target, names)
        if param.grad is not None
    }
    return list(found.values())


def _parameters(target: Target, names: Iterable[str] | None) -> Iterable[Named]:
    if isinstance(target, nn.Module) and names is None:
        return target.named_parameters()
    if isinstance(target, Optimizer) and names is None:
        names = [name for group in target.param_groups for name in group.get("param_names", ())]
    params = _listed(target)
    return zip(names or map(str, range(len(params))), params, strict=True)


def _listed(target: Target) -> list[Tensor]:
    if isinstance(target, nn.Module):
        return list(target.parameters())
    if isinstance(target, Optimizer):
        return params_of(target)
    params = [target] if isinstance(target, Tensor) else list(target)
    wrong = [type(param).__name__ for param in params if not isinstance(param, Tensor)]
    if wrong:
        raise InputError(
            f"clip_gradients got a {wrong[0]} among the parameters; "
            "it accepts a module, an optimizer, a parameter or several of them."
        )
    return params


def _memory(gradient: Tensor) -> list[Tensor]:
    """Dense views of all that is in the gradient, to be read and written."""
    if gradient.layout is torch.sparse_coo and not gradient.is_coalesced():
        gradient.copy_(gradient.coalesce())  # repeated entries are added; only sums have a norm
    return [part for part in plain_parts(gradient) if part.is_floating_point() or part.is_complex()]


def _quick_norm(parts: list[Tensor], power: float) -> _Norm | None:
    """The norm if it is finite and exact, which says that all elements are finite; else None."""
    if power not in _QUICK_POWERS or any(part.is_complex() for part in parts):
        return None
    groups = _by_kind(parts)
    norms = [_joint_norm(group, power).to(parts[0].device) for group in groups]
    if not norms:
        return _Norm(0.0)
    total = float(torch.linalg.vector_norm(torch.stack(norms), power))  # host sync
    is_exact = math.isfinite(total) and (total > _SAFE_NORM or power != 2)
    return _Norm(total) if is_exact else None


def _joint_norm(group: list[Tensor], power: float) -> Tensor:
    dtype = torch.float32 if group[0].dtype in _HALF else None
    norms = torch.stack(torch._foreach_norm(_chunks(group), power, dtype))
    joint: Tensor = torch.linalg.vector_norm(norms.to(_wide(group[0])), power)
    return joint


def _chunks(group: list[Tensor]) -> list[Tensor]:
    """On the CPU, large sums are taken by parts: of 30 million float32 the third digit is wrong."""
    if not group[0].is_cpu or all(part.numel() <= _SUMMED for part in group):
        return group
    return [chunk for part in group for _, chunk in pieces(part, _SUMMED)]


def _by_kind(parts: list[Tensor]) -> Iterable[list[Tensor]]:
    """Grouped by what torch's fused calls need to have in common."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        groups.setdefault((part.device, part.dtype), []).append(part)
    return groups.values()


def _wide(part: Tensor) -> torch.dtype:
    if part.device.type == "mps":  # has no float64
        return torch.complex64 if part.is_complex() else torch.float32
    return torch.complex128 if part.is_complex() else torch.float64


def _drop_bad(memory: list[tuple[str, list[Tensor]]], *, whole: bool) -> dict[str, int]:
    """Set what is not finite to 0; how many elements, by the name of the gradient."""
    if all_finite(part for _, parts in memory for part in parts):
        return {}
    return {
        name: sum(_zero_all(part) if whole else _zero_bad(part) for part in parts)
        for name, parts in memory
        if not all_finite(parts)
    }


def _zero_all(part: Tensor) -> int:
    compact(part).zero_()
    return part.numel()


def _zero_bad(part: Tensor) -> int:
    memory, count = compact(part), 0
    for _, piece in pieces(memory, _WIDENED):
        bad = ~piece.isfinite()
        count += int(bad.sum())  # host sync
        piece.masked_fill_(bad, 0)
    return count * part.numel() // memory.numel()


def _true_norm(parts: list[Tensor], power: float) -> _Norm:
    """The norm of finite elements of any size: taken of quotients by the largest, widened."""
    largest = max((float(_largest(part)) for part in parts), default=0.0)  # host sync
    if largest == 0:
        return _Norm(0.0)
    ratios = [value for part in parts for value in _norms(part, largest, power)]
    together = torch.tensor([float(ratio) for ratio in ratios], dtype=torch.float64)  # host sync
    return _Norm(largest, float(torch.linalg.vector_norm(together, power)))


def _largest(part: Tensor) -> Tensor:
    real = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
    largest: Tensor = torch.linalg.vector_norm(compact(real), math.inf)
    return largest


def _norms(part: Tensor, largest: float, power: float) -> Iterator[Tensor]:
    for _, piece in pieces(part, _WIDENED):
        yield torch.linalg.vector_norm(piece.to(_wide(part)) / largest, power)


def _multiply(parts: list[Tensor], norm: _Norm, max_norm: float) -> None:
    """Bring the norm down; in two steps where one factor would be too small for the dtype."""
    _, exponent = math.frexp(norm.largest)
    first = math.ldexp(1.0, -exponent)  # a power of two: multiplying by it is exact
    second = max_norm / norm.ratio / (norm.largest * first)
    for group in _by_kind(parts):
        memory = [compact(part) for part in group]
        dtype = torch.float32 if group[0].dtype in _HALF else group[0].dtype.to_real()
        fits = first * second > torch.finfo(dtype).tiny
        for factor in (first * second,) if fits else (first, second):
            # As a tensor: a plain number would be rounded to float16 first.
            torch._foreach_mul_(memory, torch.tensor(factor, dtype=dtype, device=memory[0].device))
