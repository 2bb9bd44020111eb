"""What a precision needs: autocast around the forward pass, and a scale on the loss."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from stayfinite.amp.config import AMPConfig
from stayfinite.amp.scaler import DynamicLossScaler


def autocast_for(config: AMPConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast as configured; in fp32 nothing, so that all is as without it."""
    if config.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=config.dtype)


def scaler_for(config: AMPConfig, device: torch.device) -> DynamicLossScaler | None:
    """The scaler that the config asks for; one that cannot move for a fixed scale."""
    scale = config.loss_scale
    if scale is None:
        scale = "dynamic" if config.precision == "fp16" else None
    if scale is None:
        return None
    if scale == "dynamic":
        return DynamicLossScaler(device)
    return DynamicLossScaler(device, scale, min_scale=scale, max_scale=scale)
