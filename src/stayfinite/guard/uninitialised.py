"""Parameters that nobody initialised, so that there is nothing good to go back to."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def give_values(params: Iterable[Tensor]) -> str | None:
    """Give each small random values, always the same; what was done, None without parameters."""
    generator, given = torch.Generator().manual_seed(0), 0
    for param in params:
        given += 1
        bound = 1 / math.sqrt(max(1, param[0].numel())) if param.dim() else 1.0
        values = torch.rand(param.shape, generator=generator) * 2 * bound - bound
        with torch.no_grad():
            param.copy_(values)
    return f"{given} uninitialised parameters were given small random values" if given else None
