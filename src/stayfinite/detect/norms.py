"""The norm of all gradients, which is also a first answer to whether they are finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# On the CPU the norm of other types is many times slower than a scan.
_FAST = {torch.float32, torch.bfloat16, torch.float64}


def finite_norm(gradients: list[Tensor]) -> float | None:
    """The norm over all gradients when it comes almost for free and is finite; else None.

    None says nothing: squares overflow, and sparse, fp16 or far-away gradients are not tried.
    """
    for gradient in gradients:
        if (
            gradient.dtype not in _FAST
            or gradient.layout is not torch.strided
            or gradient.device.type != "cpu"
            or type(gradient) not in (Tensor, torch.nn.Parameter)
        ):
            return None
    if not gradients:
        return None
    with torch.no_grad():
        norms = torch._foreach_norm(gradients)
        total = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms])).item()
    return total if math.isfinite(total) else None
