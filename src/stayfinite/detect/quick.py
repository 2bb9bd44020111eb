"""The usual case in as few calls as possible: ordinary gradients on the CPU, all of them finite."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd, _functorch, _len_torch_dispatch_stack

SMALL = 1 << 16
"""Up to so many elements the fused check over a list beats one sum for each tensor."""

_PLAIN = {Tensor}
# For 16-bit floats the fused check would change the payload of a NaN.
_DTYPES = {torch.float32}, {torch.float64}, {torch.float32, torch.float64}
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_check = torch._amp_foreach_non_finite_check_and_unscale_
_numel = Tensor.numel


class _Scratch(threading.local):
    """A flag that stays 0 as long as all goes well, so that no new one is needed each time."""

    def __init__(self) -> None:
        self.found = torch.zeros((), device="cpu")
        self.one = torch.ones((), device="cpu")


_scratch = _Scratch()


def surely_finite(gradients: list[Tensor]) -> bool:
    """True when all are finite; False: not known, look again with `scan`. One host read at most.

    The memory must be the caller's: every byte is written back unchanged.
    """
    if not gradients or not gradients[0].is_cpu or set(map(type, gradients)) != _PLAIN:
        return False
    if {grad.dtype for grad in gradients} not in _DTYPES or not _is_ordinary_time():
        return False
    try:
        with _AutoDispatchBelowAutograd():
            return _all_small_finite(_with_sums(gradients))
    except RuntimeError:  # sparse, expanded, on another device: all that the check refuses
        _scratch.found.zero_()
        return False


def _all_small_finite(tensors: list[Tensor]) -> bool:
    found = _scratch.found
    _check(tensors, found, _scratch.one)
    if found.item():  # host sync
        found.zero_()
        return False
    return True


def _with_sums(gradients: list[Tensor]) -> list[Tensor]:
    """The small ones, and the sums of the large: a bad value makes a bad sum."""
    sizes = list(map(_numel, gradients))
    if max(sizes) <= SMALL:
        return gradients
    pairs = list(zip(gradients, sizes, strict=True))
    sums = [grad.sum() for grad, size in pairs if size > SMALL]
    return [*(grad for grad, size in pairs if size <= SMALL), torch.stack(sums)]


def _is_ordinary_time() -> bool:
    """No vmap and no fake tensors around us."""
    if _functorch.peek_interpreter_stack() is not None:
        return False
    return _len_torch_dispatch_stack() == 0 or torch._C._get_dispatch_mode(_FAKE) is None
