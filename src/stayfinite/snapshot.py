"""The state of training, captured and put back in place, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Copies = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RandomState:
    """All global random number generators: python, numpy, torch, and each accelerator's."""

    python: Any
    numpy: Any
    torch: Tensor
    devices: tuple[Tensor, ...]

    @classmethod
    def capture(cls) -> RandomState:
        devices = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), devices)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))


class Snapshot:
    """Parameters, buffers (persistent or not), gradients, train flags and random states.

    Restoring writes into the same tensors, so that whoever holds them sees the old values.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(dict.fromkeys(m for root in modules for m in root.modules()))
        self._training = [(module, module.training) for module in modules]
        held = [param for module in modules for param in module._parameters.values()]
        params = list(dict.fromkeys(param for param in held if param is not None))
        buffers = [
            (module, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._places = buffers
        self._values: Copies = [(t, t.detach().clone()) for t in params]
        self._values += [(t, t.detach().clone()) for _, _, t in buffers]
        self._gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in params]
        self._random = RandomState.capture()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; the snapshot can be used again."""
        for module, name, buffer in self._places:
            module._buffers[name] = buffer
        for tensor, value in self._values:
            tensor.copy_(value)
        for param, gradient, before in self._gradients:
            param.grad = gradient
            if gradient is not None and before is not None:
                gradient.copy_(before)
        for module, training in self._training:
            module.training = training
        self._random.restore()
