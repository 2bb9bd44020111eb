"""Refusing what is not finite, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stayfinite.detect.parts import undisturbed
from stayfinite.detect.reports import bad_reports
from stayfinite.detect.scan import all_finite
from stayfinite.errors import NonFiniteError
from stayfinite.snapshot.copies import is_simple

_SMALL = 1 << 14
"""Up to so many elements, a call costs more than a copy."""
_SUMMABLE = (torch.float32, torch.float64, torch.bfloat16)


def refuse_nonfinite(named: list[tuple[str, Tensor]]) -> None:
    """NonFiniteError about the first tensor that is not finite."""
    if _is_surely_finite([tensor for _, tensor in named]):
        return
    reports = bad_reports(named, described=1)
    if reports:
        names = ", ".join(report.location for report in reports[:5])
        raise NonFiniteError(
            f"a snapshot must be finite, but {names} is not; go back to an older one.",
            report=reports[0],
        )


@undisturbed
def _is_surely_finite(tensors: list[Tensor]) -> bool:
    """Never True for a bad tensor; sums that overflow make it False for good ones."""
    easy: list[Tensor] = []
    hard: list[Tensor] = []
    for tensor in tensors:
        is_easy = is_simple(tensor) and tensor.dtype in _SUMMABLE
        (easy if is_easy else hard).append(tensor)
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in _joined(easy):
        by_device.setdefault(tensor.device, []).append(tensor.sum())
    totals = [torch.stack([t.double() for t in sums]).sum() for sums in by_device.values()]
    return all(bool(total.isfinite()) for total in totals) and all_finite(hard)  # host sync


def _joined(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Few tensors with the values of many: small ones are put together in a copy."""
    large: list[Tensor] = []
    small: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        is_small = tensor.numel() <= _SMALL
        (small.setdefault((tensor.dtype, tensor.device), []) if is_small else large).append(tensor)
    return large + [torch._utils._flatten_dense_tensors(group) for group in small.values()]
