"""Clipping by the norm, kept from spreading one bad gradient over all the others."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from stayfinite.detect.entrypoints import together, wrapped
from stayfinite.detect.gradients import params_of
from stayfinite.detect.hooks import Attachment
from stayfinite.detect.scan import all_finite

logger = logging.getLogger("stayfinite")


def keep_bad_gradients(optimizer: Optimizer) -> Attachment:
    """Let torch's clip_grad_norm_ leave gradients of this optimizer alone if some are bad.

    It would make NaN of all of them, and nobody could say any more which was the bad one. Only
    for updates that are vetoed then. Healthy gradients are clipped as ever, to the byte.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **more: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if not is_dynamo_compiling() and _would_spread(optimizer, given, max_norm, total_norm):
                return None
            return original(given, max_norm, total_norm, *args, **more)

        return clip

    # clip_grad_norm_ calls the first; the second is the same under its public name.
    return together(
        wrapped(clip_grad, "_clip_grads_with_norm_", wrap),
        wrapped(utils, "clip_grads_with_norm_", wrap),
    )


def _would_spread(
    optimizer: Optimizer, parameters: Sequence[Tensor], max_norm: Any, total_norm: Any
) -> bool:
    try:
        if math.isfinite(total_norm):  # host sync
            return False
        ours = {id(param) for param in params_of(optimizer)}
        if not any(id(param) in ours for param in parameters):
            return False
        # Without a limit even gradients that are only large would become NaN.
        return max_norm == math.inf or not all_finite([param.grad for param in parameters])
    except Exception:
        logger.warning("gradients could not be looked at before clipping", exc_info=True)
        return False
