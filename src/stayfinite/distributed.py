"""The same answer on every rank; no-ops when alone."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE = datetime.timedelta(seconds=10)


def agree(flag: bool | Tensor) -> bool:
    """True on every rank if the flag is true on any of them.

    One all-reduce of one number, so every rank must call it, in the same order among its
    collectives. Alone it is just `bool(flag)`.
    """
    if world_size() == 1:
        return bool(flag)
    return bool(_highest(torch.as_tensor(flag).detach().bool()))


def most_certain(certainty: int) -> tuple[int, int]:
    """The rank whose number is the highest, the first of them if there are several, and its number.

    One all-reduce; every rank must call it, with a number from 0 on.
    """
    world = world_size()
    if world == 1:
        return 0, certainty
    place = certainty * world + world - 1 - rank()
    highest, left = divmod(_highest(torch.tensor(place)), world)
    return world - 1 - left, highest


def _highest(here: Tensor) -> int:
    """The largest number that any rank has."""
    # Where the backend can reduce: where the number is, or the cpu, or its own device.
    backends = (each.partition(":") for each in dist.get_backend_config().split(","))
    kinds = [kind for kind, _, backend in backends if backend]
    device = here.device
    if device.type not in kinds:
        device = torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])
    told = here.to(device=device, dtype=torch.int32).reshape(()).clone()
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return int(told)  # host sync


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


def rank() -> int:
    """The number of this process; 0 when alone."""
    return dist.get_rank() if _is_running() else 0


def world_size() -> int:
    """How many processes there are; 1 when alone."""
    return dist.get_world_size() if _is_running() else 1


def _is_running() -> bool:
    return dist.is_available() and dist.is_initialized()
