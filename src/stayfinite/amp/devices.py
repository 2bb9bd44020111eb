"""Where model and batches are, and how they get there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def place(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Where the model is, after it was moved to the device that is asked for, if any."""
    if device is not None:
        model.to(device)  # in place: an optimizer keeps its parameters
    tensor = next(model.parameters(), next(model.buffers(), None))
    return torch.device("cpu") if tensor is None else tensor.device


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on the device; the batch itself if they are there."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        # A batch of a library of its own, such as a BatchEncoding.
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return tree_map(moved, batch)
