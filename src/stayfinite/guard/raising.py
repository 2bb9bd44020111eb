"""Modules in a higher precision for the time of a replay, and exactly as before after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.detect.entrypoints import wrapped

_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def raised(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """A block in which the modules compute in this type and nobody casts to a lower one.

    Only copies are computed with; parameters get their own memory back at the end.
    """
    inner = [module for root in modules for module in root.modules()]
    params = list({id(p): p for module in inner for p in module._parameters.values()}.values())
    memories = [(param, param.data, param.grad) for param in params if param is not None]
    buffers = [(module, name, old) for module in inner for name, old in module._buffers.items()]
    default = torch.get_default_dtype()
    casting = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    no_autocast = wrapped(torch.autocast, "__enter__", _disabled)
    try:
        for param, memory, _ in memories:
            param.grad = None
            param.data = _lifted(memory, dtype)
        for module, name, old in buffers:
            if old is not None:
                module._buffers[name] = _lifted(old, dtype).clone()
        torch.set_default_dtype(dtype)
        for device in casting:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        no_autocast.remove()
        for device in casting:
            torch.set_autocast_enabled(device, True)
        torch.set_default_dtype(default)
        for module, name, old in buffers:
            module._buffers[name] = old
        for param, memory, gradient in memories:
            param.grad = None
            param.data = memory
            param.grad = gradient


def _lifted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    is_lower = tensor.is_floating_point() and tensor.element_size() < dtype.itemsize
    return tensor.to(dtype) if is_lower else tensor


def _disabled(original: Any) -> Any:
    def enter(self: Any) -> Any:
        before, self._enabled = self._enabled, False
        try:
            return original(self)
        finally:
            self._enabled = before

    return enter
