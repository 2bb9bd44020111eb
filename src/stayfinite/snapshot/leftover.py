"""Gradients that are left over when a step begins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_

import torch
from torch import Tensor

from stayfinite.snapshot.copies import copy_all, like, memories, put_back

_LEARNING = 3

_Held = list[tuple[Tensor, Tensor, int]]
"""Parameters with the gradient they had, and its version."""


class GradientWatch:
    """Keeps leftover gradients by reference, and copies them only if steps write into them.

    Most loops drop them (`zero_grad()`), so that the reference is all that is needed; loops that
    accumulate into them or zero them in place are noticed in the first steps, which copy.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._looks = 0
        self._are_written = False
        self._last: _Held = []
        self._none = KeptGradients(params, [None] * len(params))

    def keep(self) -> KeptGradients:
        gradients = [param.grad for param in self._params]
        if self._last:
            self._learn()
        if all(map(is_, gradients, repeat(None))):
            return self._none
        return self._kept(gradients)

    def _learn(self) -> None:
        written = (p.grad is grad and grad._version != v for p, grad, v in self._last)
        self._are_written |= any(written)
        self._last = []

    def _kept(self, gradients: list[Tensor | None]) -> KeptGradients:
        self._looks += 1
        is_learning = self._looks <= _LEARNING
        if is_learning:
            pairs = zip(self._params, gradients, strict=True)
            self._last = [(p, grad, grad._version) for p, grad in pairs if grad is not None]
            self._are_written |= _share_memory(gradients)
        kept = KeptGradients(self._params, gradients)
        if is_learning or self._are_written:
            kept.copy()
        return kept


def _share_memory(gradients: Sequence[Tensor | None]) -> bool:
    """Whether they are parts of a larger memory, which others may write to (DDP's buckets)."""
    return any(
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.untyped_storage().nbytes() > gradient.nbytes
        for gradient in gradients
    )


class KeptGradients:
    """The gradients of one moment."""

    def __init__(self, params: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
        self._params, self._gradients = params, gradients
        self._values: list[tuple[Tensor, list[Tensor]]] = []

    @torch.no_grad()
    def copy(self) -> None:
        for gradient in self._gradients:
            if gradient is not None:
                now = memories(gradient)
                self._values.append((gradient, [like(memory) for memory in now]))
                copy_all(zip(self._values[-1][1], now, strict=True))

    def restore(self) -> None:
        for param, gradient in zip(self._params, self._gradients, strict=True):
            if param.grad is not gradient:
                param.grad = gradient
        put_back([gradient for gradient, _ in self._values], [kept for _, kept in self._values])
