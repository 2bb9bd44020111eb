"""The eps of an optimizer, which is nothing in half precision."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


def raise_eps(optimizer: Optimizer) -> str | None:
    """Make every eps that rounds to 0 in its parameters' type large enough; what was done.

    Adam's 1e-8 is 0 in float16, and 0/0 for each weight that had no gradient yet.
    """
    done = None
    for group in optimizer.param_groups:
        eps = group.get("eps")
        dtypes = {param.dtype for param in group["params"] if param.is_floating_point()}
        if not isinstance(eps, float) or not dtypes:
            continue
        lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).smallest_normal)
        if not torch.tensor(eps, dtype=lowest, device="cpu"):
            group["eps"] = torch.finfo(lowest).smallest_normal
            name = str(lowest).removeprefix("torch.")
            done = f"eps went from {eps:g}, which is 0 in {name}, to {group['eps']:g}"
    return done
