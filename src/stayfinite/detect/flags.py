"""A veto that never leaves the device: the flag that fused optimizers obey, read one step late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# These hand `optimizer.found_inf` to a fused kernel, which then leaves everything as it was.
_OBEDIENT = frozenset(
    {"torch.optim.adam", "torch.optim.adamw", "torch.optim.sgd", "torch.optim.adagrad"}
)

FINE, BAD, SKIPPED_BY_SCALER = 0, 1, 2  # and 3: both


def obeys_flag(optimizer: Optimizer) -> bool:
    """Whether it is fused, and its step() one of torch's that read `found_inf`, not its own."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return is_fused and type(optimizer).step.__module__ in _OBEDIENT


def is_ready(optimizer: Optimizer) -> bool:
    """Whether a flag alone leaves this step without any trace.

    All groups must be fused (the other kernels refuse a flag), and all state must exist:
    on a first step fused SGD would keep an uninitialised momentum buffer.
    """
    for group in optimizer.param_groups:
        if not group.get("fused") or not _has_state(optimizer.state, group):
            return False
    return True


def _has_state(states: Any, group: dict[str, Any]) -> bool:
    if group.get("momentum", 1) == 0:  # plain SGD keeps none
        return True
    for param in group["params"]:
        if param.grad is not None:
            state = states.get(param)
            if not state or state.get("momentum_buffer", state) is None:
                return False
    return True


def with_scaler(optimizer: Optimizer, flag: Tensor) -> Tensor:
    """FINE, BAD or SKIPPED_BY_SCALER, on the device, where a GradScaler drives this step.

    A GradScaler leaves `grad_scale` and `found_inf` on an optimizer that supports them. What it
    found itself it also skips itself; a scale of 0 it does not find, and it makes NaN of all.
    """
    given = vars(optimizer)
    if "grad_scale" not in given:
        return flag
    found, scale = given.get("found_inf"), given["grad_scale"]
    if scale is not None:
        flag = flag | (scale == 0).to(flag.device, non_blocking=True)
    if found is None:
        return flag
    is_skip: Tensor = (found > 0).to(flag.device, non_blocking=True)
    return flag + SKIPPED_BY_SCALER * is_skip


class LateFlag:
    """An answer on its way from the device to the host."""

    __slots__ = ("_arrived", "_flag")

    def __init__(self, flag: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._flag = flag
        if flag.is_cuda:  # a read would wait for all queued work; this copy only for its own
            self._flag = flag.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.current_stream(flag.device).record_event()

    def read(self) -> int:
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._flag.item())  # host sync


class InstalledFlag:
    """`optimizer.found_inf`, set for the length of one step."""

    __slots__ = ("_before", "_flag")

    def __init__(self, optimizer: Optimizer, flag: Tensor) -> None:
        # Above 1 a fused kernel would take back more than the one step it counted.
        self._flag = (flag > 0).float() if flag.dtype != torch.bool else flag.float()
        self._before: Tensor | None = vars(optimizer).get("found_inf")
        if self._before is not None:
            before = self._before.to(self._flag.device, non_blocking=True)
            self._flag = torch.maximum(self._flag, before)
        optimizer.found_inf = self._flag  # type: ignore[attr-defined]

    def take_away(self, optimizer: Optimizer) -> None:
        given = vars(optimizer)
        if given.get("found_inf") is not self._flag:
            return  # a later step has set its own
        if self._before is None:
            del given["found_inf"]
        else:
            given["found_inf"] = self._before


def is_capturing(tensors: list[Tensor]) -> bool:
    """Whether a CUDA graph is being recorded, in which nothing may be read."""
    return bool(tensors) and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
