"""What clipping has just found out, so that the check before the update need not read it again."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from stayfinite.detect.parts import undisturbed
from stayfinite.detect.scan import SMALL, all_finite

_PROBES = 16


class _Note:
    """The large gradients among some that were finite, and what shows that they still are.

    A write through `.data` or NumPy, an all-reduce and a GradScaler move no version counter, so
    some elements of each are compared as well.
    """

    __slots__ = ("_count", "_gradients", "_marks", "_probes", "norm")

    def __init__(self, gradients: Sequence[Tensor], norm: float) -> None:
        large = [gradient for gradient in gradients if gradient.numel() > SMALL]
        self.norm, self._count = norm, len(gradients)
        self._gradients = [weakref.ref(gradient) for gradient in large]
        self._marks = [_mark(gradient) for gradient in large]
        self._probes = _probes(large)

    def fits(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these are the same gradients, unchanged, but for the small ones."""
        large = [gradient for ref in self._gradients if (gradient := ref()) is not None]
        now = {id(gradient) for gradient in gradients if gradient.numel() > SMALL}
        return (
            len(gradients) == self._count
            and now == {id(gradient) for gradient in large}
            and self._marks == [_mark(gradient) for gradient in large]
            and torch.equal(self._probes, _probes(large))
        )


def _mark(gradient: Tensor) -> tuple[int, int]:
    return gradient._version, gradient.data_ptr()


def _probes(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([g.view(-1)[:: g.numel() // _PROBES].double() for g in gradients])


_last: _Note | None = None


@undisturbed
def note_finite(gradients: Sequence[Tensor], norm: float) -> None:
    """All these gradients are finite now, and this is their norm.

    Nothing is kept where nobody watches optimizers, or where reading again costs no more.
    """
    global _last
    _last = None
    is_worth_it = _global_optimizer_pre_hooks and any(g.numel() > SMALL for g in gradients)
    if is_worth_it and math.isfinite(norm) and all(map(_can_be_known, gradients)):
        _last = _Note(gradients, norm)


def known_norm(gradients: Sequence[Tensor]) -> float | None:
    """The norm of exactly these gradients, if they are still as clipping left them; else None.

    It is told once. Small gradients are read again; of a large one, an element that was changed
    by something that torch does not count is noticed only if it is one of sixteen.
    """
    global _last
    note, _last = _last, None
    if note is None or not _is_as_noted(note, gradients):
        return None
    small = [gradient for gradient in gradients if gradient.numel() <= SMALL]
    return note.norm if all_finite(small, writable=True) else None


@undisturbed
def _is_as_noted(note: _Note, gradients: Sequence[Tensor]) -> bool:
    return note.fits(gradients)


def _can_be_known(gradient: Tensor) -> bool:
    """Whether it is ordinary; the memory of a small one does not matter."""
    return (
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and not gradient.is_inference()
        and (gradient.numel() <= SMALL or gradient.is_contiguous())
    )
