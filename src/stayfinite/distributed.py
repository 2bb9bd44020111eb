"""The same answer on every rank; no-ops when alone."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE = datetime.timedelta(seconds=10)


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


def most_certain(certainty: int) -> tuple[int, int]:
    """The rank whose number is the highest, the first of them if there are several, and its number.

    One all-reduce; every rank must call it, with a number from 0 on.
    """
    world = world_size()
    if world == 1:
        return 0, certainty
    place = certainty * world + world - 1 - rank()
    best = torch.tensor(place, dtype=torch.int32)
    best = best.to(_device_for(best, None))
    dist.all_reduce(best, op=dist.ReduceOp.MAX)
    highest, left = divmod(int(best), world)  # host sync
    return world - 1 - left, highest


def tell(topic: str, text: str) -> None:
    """Leave a text for the other ranks, which is there at once for those that ask afterwards."""
    dist.distributed_c10d._get_default_store().set(_key(topic, rank()), text)


def heard(rank: int, topic: str) -> str:
    """The text that a rank has left; an error, after a while, if it has not."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([_key(topic, rank)], _PATIENCE)
    return str(store.get(_key(topic, rank)).decode())


def _key(topic: str, rank: int) -> str:
    return f"stayfinite/{topic}/{rank}"


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
