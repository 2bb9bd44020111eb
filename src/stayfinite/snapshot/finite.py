"""Refusing what is not finite, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stayfinite.detect.parts import undisturbed
from stayfinite.detect.reports import bad_reports
from stayfinite.detect.scan import all_finite
from stayfinite.errors import NonFiniteError
from stayfinite.snapshot.copies import is_simple

Named = Sequence[tuple[str, Tensor]]

_SMALL = 1 << 14
"""Up to so many elements, a call costs more than a copy."""
_SUMMABLE = (torch.float32, torch.float64, torch.bfloat16)


def refuse_nonfinite(named: Named) -> None:
    """NonFiniteError about the first tensor that is not finite."""
    FiniteCheck(named).refuse()


class FiniteCheck:
    """The same tensors, looked at again and again; what is known of their forms is kept."""

    def __init__(self, named: Named) -> None:
        self._named = named
        easy = [tensor for _, tensor in named if is_easy(tensor)]
        known = set(map(id, easy))
        self._hard = [tensor for _, tensor in named if id(tensor) not in known]
        self._large = [tensor for tensor in easy if tensor.numel() > _SMALL]
        self._small = alike(tensor for tensor in easy if tensor.numel() <= _SMALL)

    def refuse(self) -> None:
        """NonFiniteError about the first tensor that is not finite."""
        if not self._named or self._is_surely_finite():
            return
        reports = bad_reports(self._named, described=1)
        if reports:
            names = ", ".join(report.location for report in reports[:5])
            raise NonFiniteError(
                f"a snapshot must be finite, but {names} is not; go back to an older one.",
                report=reports[0],
            )

    @undisturbed
    def _is_surely_finite(self) -> bool:
        """Never True for a bad tensor; sums that overflow make it False for good ones."""
        joined = [torch._utils._flatten_dense_tensors(group) for group in self._small]
        sums = [tensor.sum() for tensor in self._large + joined]
        return all(map(_is_finite_total, alike(sums))) and all_finite(self._hard)


def is_finite(tensor: Tensor) -> bool:
    """Whether an easy tensor is."""
    total: float = tensor.sum().item()  # host sync
    return total - total == 0 or all_finite([tensor])


def is_easy(tensor: Tensor) -> bool:
    """Whether adding up its elements is the quickest way to look at them."""
    return is_simple(tensor) and tensor.dtype in _SUMMABLE


def alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those of one dtype and device together."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _is_finite_total(sums: list[Tensor]) -> bool:
    total = torch.stack(sums).sum(dtype=torch.float64) if len(sums) > 1 else sums[0]
    value: float = total.item()  # host sync
    return value - value == 0
