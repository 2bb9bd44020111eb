"""The usual case in as few calls as possible: ordinary tensors on the CPU, all of them finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, _len_torch_dispatch_stack
from torch._C import _dispatch_tls_is_dispatch_key_excluded as _is_excluded
from torch._C import _dispatch_tls_set_dispatch_key_excluded as _exclude

# Up to so many elements the fused check beats a sum in the middle of a step, though not in a loop
# of its own: a sum that starts a second thread finds it asleep.
SMALL = 1 << 18

_CHECKED = {torch.float32, torch.float64}
_PLAIN = {Tensor, nn.Parameter}
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_check = torch._amp_foreach_non_finite_check_and_unscale_
_AUTOGRAD = DispatchKey.AutogradFunctionality


class _Plan:
    """How to look at the tensors of one owner, as they were when they were last looked over.

    A plan that no longer fits costs time, or torch refuses the call; it never hides a bad value.
    """

    __slots__ = ("bits", "count", "found", "large", "one")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.count = len(tensors) if all(map(_fits, tensors)) else -1
        self.large = [i for i, tensor in enumerate(tensors) if tensor.numel() > SMALL]
        self.found = torch.zeros((), device="cpu")  # stays 0 as long as all goes well
        # The bits of `found`, in the same memory: cheaper to read than by item().
        self.bits = self.found.view(1).numpy().data.cast("B").cast("i")
        self.one = torch.ones((), device="cpu")


def _fits(tensor: Tensor) -> bool:
    # 16-bit floats are left out: the fused check would change the payload of a NaN. In shared
    # memory, what another process writes at the same time would be lost.
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.dtype in _CHECKED
        and tensor.layout is torch.strided
        and not tensor.is_shared()
    )


_plans: dict[int, _Plan] = {}


def surely_finite(tensors: list[Tensor], *, of: object) -> bool:
    """True when all are finite; False: not known, ask `scan`. There is one read of CPU memory.

    The memory must be the caller's: the bytes are written back unchanged. Always the same kind
    of tensors, such as all gradients of an optimizer, must be asked for under one owner, `of`.
    """
    plan = _plans.get(id(of))
    if plan is None or plan.count != len(tensors):
        plan = _new_plan(tensors, of)
    if plan.count < 1 or type(tensors[0]) not in _PLAIN:
        return False
    if _len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_FAKE) is not None:
        return False
    try:
        _check_below_autograd(tensors, plan)
        if not plan.bits[0]:
            return True
    except (RuntimeError, TypeError):  # sparse, expanded, a subclass, on another device
        pass
    del _plans[id(of)]
    return False


def _check_below_autograd(tensors: list[Tensor], plan: _Plan) -> None:
    """No graph is made, no version counter moves; torch's own guard for it takes twice as long."""
    if _is_excluded(_AUTOGRAD):
        raise RuntimeError("somebody else's guard is there already")
    _exclude(_AUTOGRAD, True)
    try:
        _check(_with_sums(tensors, plan) if plan.large else tensors, plan.found, plan.one)
    finally:
        _exclude(_AUTOGRAD, False)


def _new_plan(tensors: list[Tensor], owner: object) -> _Plan:
    if len(_plans) > 1000:  # of owners that are long gone
        _plans.clear()
    plan = _plans[id(owner)] = _Plan(tensors)
    return plan


def _with_sums(tensors: list[Tensor], plan: _Plan) -> list[Tensor]:
    """The small ones, and the sums of the large: a bad value makes a bad sum."""
    sums = torch.stack([tensors[i].sum() for i in plan.large])
    large = set(plan.large)
    return [sums, *(tensor for i, tensor in enumerate(tensors) if i not in large)]
