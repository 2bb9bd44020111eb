"""agree(): the same answer on every rank; no-ops when alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def agree(flag: bool | Tensor, *, group: dist.ProcessGroup | None = None) -> bool:
    """True on every rank of the group if the flag is true on any of them.

    One all-reduce of one number, so every rank of the group must call it, in the same order
    among its collectives. Alone, or outside the group, it is just `bool(flag)`.
    """
    if world_size(group) == 1:
        return bool(flag)
    here = torch.as_tensor(flag).detach()
    told = here.bool().to(device=_device_for(here, group), dtype=torch.int32)
    told = told.reshape(()).clone()
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return bool(told)  # host sync


def rank(group: dist.ProcessGroup | None = None) -> int:
    """The number of this process in the group; 0 when alone or outside the group."""
    return max(dist.get_rank(group), 0) if _is_running() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """How many processes are in the group; 1 when alone or outside the group."""
    return max(dist.get_world_size(group), 1) if _is_running() else 1


def _is_running() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device_for(flag: Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend can reduce: where the flag is, or the cpu, or its own device."""
    backends = dist.get_backend_config(group).split(",")
    kinds = [device for device, _, backend in (each.partition(":") for each in backends) if backend]
    if flag.device.type in kinds:
        return flag.device
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])
