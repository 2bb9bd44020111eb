"""Is everything finite? Questions over lists of tensors, answered on their device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from stayfinite.detect.parts import compact, float_parts, pieces, undisturbed
from stayfinite.detect.summary import summarize as summarize
from stayfinite.records import NaNType

SMALL = 1 << 16
"""Up to so many elements the fused check over a list beats one sum for each tensor."""

# A sum is the fastest pure read of these; it may overflow, so its alarm is confirmed.
# fp16 sums overflow too easily.
_SUMMABLE = {torch.float32, torch.float64, torch.bfloat16}
# The fused check writes back what it read; for 16-bit floats it changes the payload of a NaN.
_FUSABLE = {torch.float32, torch.float64}
_NATIVE = _SUMMABLE | {torch.float16}
# Cloning is the fastest way to a new 0-d tensor.
_ZERO = undisturbed(torch.zeros)((), device="cpu")
_ONE = undisturbed(torch.ones)((), device="cpu")
_CPU = torch.device("cpu")
_Parts = dict[torch.device, list[Tensor]]


@undisturbed
def nonfinite(
    tensors: Iterable[Any], *, writable: bool = False, exact_on_device: bool = False
) -> Tensor:
    """A 0-d bool tensor: does any tensor hold a NaN or an Inf?

    It is on the device of the tensors; of several, on the first that is not the CPU. None and
    other non-tensors are ignored, and no temporary is as large as an input. On the CPU there may
    be one host read; elsewhere, and with `exact_on_device`, there is none. `writable` says that
    the caller owns the memory (gradients): it allows a faster check that writes every byte back
    unchanged.

    >>> nonfinite([torch.ones(3), None, torch.tensor(float("nan"))])
    tensor(True)
    """
    flags = _flags(tensors, writable, exact_on_device)
    return _joined(flags) if flags else torch.zeros((), dtype=torch.bool, device="cpu")


@undisturbed
def all_finite(tensors: Iterable[Any], *, writable: bool = False) -> bool:
    """Whether no tensor holds a NaN or an Inf; costs at most one host read when they do not.

    >>> all_finite([torch.ones(3), None, torch.tensor([1, 2])])
    True
    """
    flags = _flags(tensors, writable, exact=False)
    return not flags or not bool(flags[0] if len(flags) == 1 else _joined(flags))  # host sync


@undisturbed
def classify(tensor: Tensor) -> NaNType:
    """The worst kind of non-finite value in the tensor: NAN before POS_INF before NEG_INF."""
    found = [value for part in float_parts(tensor) for value in _extremes(part)]
    values = torch.stack(found).tolist() if found else []  # host sync
    if any(value != value for value in values):
        return NaNType.NAN
    if float("inf") in values:
        return NaNType.POS_INF
    return NaNType.NEG_INF if float("-inf") in values else NaNType.NONE


@undisturbed
def largest(tensor: Tensor) -> float:
    """The largest magnitude in the tensor: NaN where there is one, 0 where nothing can be read."""
    found = [value for part in float_parts(tensor) for value in _extremes(part)]
    return float(torch.stack(found).abs().max()) if found else 0.0  # host sync


def _flags(tensors: Iterable[Any], writable: bool, exact: bool) -> list[Tensor]:
    """0-d tensors, non-zero where something is bad; none when all is known to be finite."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    ours = [t for t in tensors if _is_fusable(t)] if writable else []
    found = _fused_check(ours) if ours else None
    if found is None:
        by_device = _by_device(tensors)
    elif len(ours) == len(tensors):
        return [found]
    else:
        by_device = _by_device(t for t in tensors if not _is_fusable(t))
    if not exact and not _cpu_alarm(by_device.get(_CPU, []), found):
        by_device.pop(_CPU, None)
        found = None
    flags = [_exact_flag(parts) for parts in by_device.values()]
    return flags if found is None else [found, *flags]


def _is_fusable(tensor: Any) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.dtype in _FUSABLE
        and tensor.is_cpu
        and tensor.numel() <= SMALL
        and tensor.layout is torch.strided
        and not tensor.requires_grad
    )


def _fused_check(tensors: list[Tensor]) -> Tensor | None:
    """1 where there is a bad value, else 0; None when torch refuses one of the tensors."""
    found = _ZERO.clone()
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, _ONE)
    except RuntimeError:  # expanded, nested, or another layout it cannot write to
        return None
    return found


def _by_device(values: Iterable[Any]) -> _Parts:
    parts: _Parts = {}
    for value in values:
        for part in float_parts(value):
            parts.setdefault(part.device, []).append(part)
    return parts


def _cpu_alarm(parts: list[Tensor], found: Tensor | None) -> bool:
    """The fast test: never misses, but finite values may overflow a sum."""
    values = [value for part in parts for value in _quick(part)]
    if not values:
        return found is not None and bool(found)  # host sync
    total = values[0] if len(values) == 1 else torch.stack(values).sum(dtype=torch.float64)
    suspect = total - total  # NaN unless the total is finite
    return bool(suspect if found is None else suspect + found)  # host sync


def _quick(part: Tensor) -> Iterable[Tensor]:
    if part.dtype not in _SUMMABLE:
        return _extremes(part)
    # A lazily negated tensor would be copied; the sign does not matter here.
    return (compact(part._neg_view() if part.is_neg() else part).sum(),)


def _exact_flag(parts: list[Tensor]) -> Tensor:
    together = [part for part in parts if part.is_cuda and _is_direct(part)]
    alone = [part for part in parts if not (part.is_cuda and _is_direct(part))]
    values = _largest(together) + [value for part in alone for value in _extremes(part)]
    return torch.stack(values).isfinite().all().logical_not()


def _largest(parts: list[Tensor]) -> list[Tensor]:
    """The largest magnitude of each, NaN where there is one; one kernel for each dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        by_dtype.setdefault(part.dtype, []).append(part)
    groups = by_dtype.values()
    return [value for group in groups for value in torch._foreach_norm(group, math.inf)]


def _is_direct(part: Tensor) -> bool:
    """Whether torch reduces it without a copy."""
    return part.is_contiguous() and part.dtype in _NATIVE and not part.is_neg()


def _extremes(part: Tensor) -> Iterator[Tensor]:
    """Smallest and largest element; NaN where there is one. By pieces where torch would copy."""
    packed = compact(part)
    if _is_direct(packed):
        yield from packed.aminmax()
        return
    dtype = packed.dtype if packed.dtype in _NATIVE else torch.float32
    for _, piece in pieces(packed):
        yield from piece.to(dtype).aminmax()


def _joined(flags: list[Tensor]) -> Tensor:
    # The CPU last: bringing a flag to it would wait for the other device.
    flags = sorted(flags, key=lambda flag: flag.is_cpu)
    flag = flags[0].bool()
    for other in flags[1:]:
        flag = flag.logical_or(other.to(flag.device))
    return flag
