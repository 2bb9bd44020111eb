"""Numbers worth keeping that are also a first answer to whether something is finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd

from stayfinite.detect.parts import unwrapped

# On the CPU the norm of other types is many times slower than a scan.
_FAST = {torch.float32, torch.bfloat16, torch.float64}


def finite_norm(gradients: list[Tensor]) -> float | None:
    """The norm over all gradients when it comes almost for free and is finite; else None.

    None says nothing: squares overflow, and sparse, fp16 or far-away gradients are not tried.
    """
    if not gradients or not _is_ordinary(gradients[0]):
        return None
    try:
        with _AutoDispatchBelowAutograd():
            norms = torch.stack(torch._foreach_norm(gradients))
            total = torch.linalg.vector_norm(norms, dtype=torch.float64).item()
    except (RuntimeError, NotImplementedError):  # sparse, or of several types or devices
        return None
    return total if math.isfinite(total) else None


def _is_ordinary(gradient: Tensor) -> bool:
    return type(gradient) is Tensor and gradient.is_cpu and gradient.dtype in _FAST


def finite_number(loss: Tensor) -> float | None:
    """The value of a loss on the CPU if it is finite; None says nothing."""
    loss = unwrapped(loss)
    if type(loss) is not Tensor or not loss.is_cpu or loss.numel() != 1:
        return None
    value = loss.item()
    return value if isinstance(value, float) and math.isfinite(value) else None
