"""Other conditions for steps that are run again: clipping, the loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from stayfinite.detect.entrypoints import together
from stayfinite.detect.gradients import params_of
from stayfinite.detect.hooks import Attachment


def clip_updates(optimizers: Iterable[Optimizer], *, max_norm: float) -> Attachment:
    """Have the gradients of every update clipped to this norm, until it is removed."""

    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(params_of(optimizer), max_norm)

    handles = [optimizer.register_step_pre_hook(clip) for optimizer in optimizers]
    return together(*(Attachment(handle.remove) for handle in handles))


def multiply_scale(scaler: Any, by: float) -> None:
    """Another loss scale from now on."""
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "scale": state["scale"] * by})
