"""Norms that are true for finite elements of any size, and that say whether all are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from stayfinite.detect.parts import compact, pieces

WIDENED = 1 << 20
"""Elements that are widened together."""

_SHORT = 1 << 13  # elements that are widened and added up; more are by rows
_ROW = 512
_HALF = {torch.float16, torch.bfloat16}
# For other powers, and for smaller norms of these, a term may underflow.
_QUICK_POWERS = {1.0, 2.0, math.inf}
_SAFE_NORM = 1e-15


class Norm(float):
    """A norm as `largest * ratio`, since the product of the two may overflow."""

    largest: float
    ratio: float

    def __new__(cls, largest: float, ratio: float = 1.0) -> Norm:
        norm = super().__new__(cls, largest * ratio)
        norm.largest, norm.ratio = largest, ratio
        return norm


def quick_norm(parts: list[Tensor], power: float) -> Norm | None:
    """The norm if it is finite and exact, which says that all elements are finite; else None."""
    if power not in _QUICK_POWERS or any(part.is_complex() for part in parts):
        return None
    norms = [_joint(_each(group, power), power).to(parts[0].device) for group in by_kind(parts)]
    if not norms:
        return Norm(0.0)
    total = float(norms[0] if len(norms) == 1 else _joint(norms, power))  # host sync
    is_exact = math.isfinite(total) and (total > _SAFE_NORM or power != 2)
    return Norm(total) if is_exact else None


def quick_norms(memories: Sequence[list[Tensor]]) -> list[Norm | None]:
    """The same for each list of parts by itself, with power 2; one host read for each dtype."""
    norms = [0.0] * len(memories)
    owners = {id(part): number for number, parts in enumerate(memories) for part in parts}
    for group in by_kind([part for parts in memories for part in parts]):
        is_complex = group[0].is_complex()
        own = [math.nan] * len(group) if is_complex else torch.stack(_each(group, 2.0)).tolist()
        for part, norm in zip(group, own, strict=True):
            norms[owners[id(part)]] = math.hypot(norms[owners[id(part)]], norm)
    return [Norm(n) if math.isfinite(n) and n > _SAFE_NORM else None for n in norms]


def true_norm(parts: list[Tensor], power: float) -> Norm:
    """The norm of finite elements of any size: taken of quotients by the largest, widened."""
    largest = max((float(_largest(part)) for part in parts), default=0.0)  # host sync
    if largest == 0:
        return Norm(0.0)
    ratios = [value for part in parts for value in _ratios(part, largest, power)]
    together = torch.tensor([float(ratio) for ratio in ratios], dtype=torch.float64)  # host sync
    return Norm(largest, float(vector_norm(together, power)))


def joint(norms: Sequence[Norm]) -> Norm:
    """The norm of all from the norm of each, with power 2."""
    largest = max((norm.largest for norm in norms), default=0.0)
    if largest == 0:
        return Norm(0.0)
    return Norm(largest, math.hypot(*(norm.largest / largest * norm.ratio for norm in norms)))


def by_kind(parts: list[Tensor]) -> Iterable[list[Tensor]]:
    """Grouped by what torch's fused calls need to have in common."""
    if parts and all(part.is_cpu and part.dtype is parts[0].dtype for part in parts):
        return (parts,)  # the usual case, in less time
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        groups.setdefault((part.device, part.dtype), []).append(part)
    return groups.values()


def exact_dtype(part: Tensor) -> torch.dtype:
    """The real dtype in which its elements can be multiplied without being rounded first."""
    return torch.float32 if part.dtype in _HALF else part.dtype.to_real()


def wide(part: Tensor) -> torch.dtype:
    """The widest dtype on its device."""
    if part.device.type == "mps":  # has no float64
        return torch.complex64 if part.is_complex() else torch.float32
    return torch.complex128 if part.is_complex() else torch.float64


def vector_norm(tensor: Tensor, power: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, power)
    return norm


def _joint(norms: list[Tensor], power: float) -> Tensor:
    together = torch.stack(norms)
    return vector_norm(together.to(wide(together)), power)


def _each(group: list[Tensor], power: float) -> list[Tensor]:
    """The norm of each part, as 0-d tensors on their device."""
    if not group[0].is_cpu:
        return list(torch._foreach_norm(group, power, exact_dtype(group[0])))
    long = {n: _by_rows(part, power) for n, part in enumerate(group) if part.numel() > _SHORT}
    short = [part for part in group if part.numel() <= _SHORT]
    norms = iter(torch._foreach_norm(short, power, torch.float64)) if short else iter(())
    return [long[n] if n in long else next(norms) for n in range(len(group))]


def _by_rows(part: Tensor, power: float) -> Tensor:
    """In float64, but for short sums: of 30 million float32 the third digit would be wrong."""
    flat = compact(part)
    if flat.numel() != part.numel() or not flat.is_contiguous():
        return _joint([vector_norm(p.double(), power) for _, p in pieces(part, _SHORT)], power)
    flat, short = flat.view(-1), exact_dtype(part)
    count = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:count].view(-1, _ROW), power, dim=1, dtype=short)
    norm: Tensor = torch.linalg.vector_norm(rows, power, dtype=torch.float64)
    if count == flat.numel():
        return norm
    return _joint([norm, vector_norm(flat[count:].double(), power)], power)


def _largest(part: Tensor) -> Tensor:
    real = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
    return vector_norm(compact(real), math.inf)


def _ratios(part: Tensor, largest: float, power: float) -> Iterator[Tensor]:
    for _, piece in pieces(part, WIDENED):
        yield vector_norm(piece.to(wide(part)) / largest, power)
