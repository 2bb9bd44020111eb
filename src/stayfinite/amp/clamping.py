"""Activations that are kept within a range, until the hooks are removed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle


class ActivationClamp:
    """Limits what each module below the model gives out to [-limit, limit]; `remove()` ends it.

    A model without modules below it is limited itself. A loss module is left alone: the gradient
    of a loss beyond the limit would be 0. A NaN stays a NaN, so that it is found.
    """

    def __init__(self, model: nn.Module, limit: float) -> None:
        self.limit = limit
        modules = [module for module in model.modules() if module is not model] or [model]
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self._after)
            for module in modules
            if not isinstance(module, _Loss)
        ]

    def remove(self) -> None:
        """Leave the modules as they were; a second call does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(self._clamped, output)

    def _clamped(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        # torch refuses a limit that the dtype cannot hold.
        limit = min(self.limit, torch.finfo(value.dtype).max)
        return value.clamp(-limit, limit)
