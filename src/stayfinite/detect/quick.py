"""The usual case in as few calls as possible: ordinary gradients on the CPU, all of them finite."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack, _set_grad_enabled
from torch.optim import Optimizer

SMALL = 1 << 16
"""Up to so many elements the fused check over a list beats one sum for each tensor."""

_CHECKED = {torch.float32, torch.float64}
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_check = torch._amp_foreach_non_finite_check_and_unscale_


class _Plan:
    """How to look at the gradients of one optimizer, as it was when they were last looked over.

    A plan that no longer fits costs time, or torch refuses the call; it never hides a bad value.
    """

    __slots__ = ("bits", "count", "found", "large", "one")

    def __init__(self, gradients: list[Tensor]) -> None:
        # 16-bit floats are left out: the fused check would change the payload of a NaN.
        fits = all(type(g) is Tensor and g.is_cpu and g.dtype in _CHECKED for g in gradients)
        self.count = len(gradients) if fits else -1
        self.large = [i for i, grad in enumerate(gradients) if grad.numel() > SMALL]
        self.found = torch.zeros((), device="cpu")  # stays 0 as long as all goes well
        # The bits of `found`, in the same memory: cheaper to read than by item().
        self.bits = self.found.view(1).numpy().data.cast("B").cast("i")
        self.one = torch.ones((), device="cpu")


_plans: dict[int, _Plan] = {}


def surely_finite(gradients: list[Tensor], *, of: Optimizer) -> bool:
    """True when all are finite; False: not known, ask `scan`. There is one read of CPU memory.

    The memory must be the caller's: the bytes are written back unchanged.
    """
    plan = _plans.get(id(of))
    if plan is None or plan.count != len(gradients):
        plan = _new_plan(gradients, of)
    if plan.count < 1 or type(gradients[0]) is not Tensor:
        return False
    if _len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_FAKE) is not None:
        return False
    grad_mode = is_grad_enabled()
    try:
        _set_grad_enabled(False)  # else it would enter the graph of gradients that have one
        _check(_with_sums(gradients, plan) if plan.large else gradients, plan.found, plan.one)
        if not plan.bits[0]:
            return True
    except (RuntimeError, TypeError):  # sparse, expanded, a subclass, on another device
        pass
    finally:
        _set_grad_enabled(grad_mode)
    del _plans[id(of)]
    return False


def _new_plan(gradients: list[Tensor], optimizer: Optimizer) -> _Plan:
    if len(_plans) > 1000:  # of optimizers that are long gone
        _plans.clear()
    plan = _plans[id(optimizer)] = _Plan(gradients)
    return plan


def _with_sums(gradients: list[Tensor], plan: _Plan) -> list[Tensor]:
    """The small ones, and the sums of the large: a bad value makes a bad sum."""
    sums = torch.stack([gradients[i].sum() for i in plan.large])
    large = set(plan.large)
    return [sums, *(grad for i, grad in enumerate(gradients) if i not in large)]
