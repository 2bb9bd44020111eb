"""The same answer on every rank; no-ops when alone."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE = datetime.timedelta(seconds=30)
FINE, SKIPPED, BAD = 0, 1, 2  # what a rank says of its update; skipped is by a GradScaler

Group = Any
"""A process group of torch; None is that of all processes."""
WORLD: tuple[Group, ...] = (None,)


class Word(NamedTuple):
    """What all ranks know of one update: the worst verdict, and who saw it first.

    `is_harmed` says that the update before has made parameters bad on some rank. `rank` is -1 where
    nobody can tell, and `certainty` how sure the one is that is named. `number` is the same on all
    ranks, and another one for each word.
    """

    verdict: int = FINE
    is_harmed: bool = False
    rank: int = -1
    certainty: int = 0
    number: int = 0

    @property
    def is_fine(self) -> bool:
        return self.verdict == FINE and not self.is_harmed


def say_word(groups: Sequence[Group], *, verdict: int, is_harmed: bool, certainty: int = 0) -> Word:
    """Ask all ranks about one update by one small all-reduce; every rank must come here.

    Of several groups, the dimensions of a mesh, each is asked in turn. Of the ranks that are most
    certain the first is named; none where all have seen it and nobody is sure that it began there.
    """
    world = world_size()
    place = certainty * world + world - 1 - rank() if certainty else 0
    is_unharmed = verdict == FINE and not is_harmed
    told = [verdict, int(is_harmed), place, int(is_unharmed), _words[0] + 1]
    verdict, harmed, place, some_are_fine, number = _highest(torch.tensor(told), groups)
    _words[0] = number
    highest, left = divmod(place, world)
    is_known = highest > 1 or (highest == 1 and some_are_fine)
    return Word(verdict, bool(harmed), world - 1 - left if is_known else -1, highest, number)


_words = [0]  # the number of the last one


def agree(flag: bool | Tensor, groups: Sequence[Group] = WORLD) -> bool:
    """True on every rank if the flag is true on any of them.

    One all-reduce of one number, so every rank must call it, in the same order among its
    collectives. Alone it is just `bool(flag)`.
    """
    if world_size() == 1:
        return bool(flag)
    return bool(_highest(torch.as_tensor(flag).detach().bool(), groups)[0])


def _highest(here: Tensor, groups: Sequence[Group]) -> list[int]:
    """The largest of each number that any rank has."""
    told = here.to(dtype=torch.int32, copy=True).reshape(-1)
    for group in groups:
        # Where the backend can reduce: where the number is, or the cpu, or its own device.
        backends = (each.partition(":") for each in dist.get_backend_config(group).split(","))
        kinds = [kind for kind, _, backend in backends if backend]
        device = told.device
        if device.type not in kinds:
            device = torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])
        told = told.to(device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return told.tolist()  # host sync


def tell(topic: str, text: str) -> None:
    """Leave a text for the other ranks, which is there at once for those that ask afterwards."""
    _store().set(_key(topic, rank()), text)


def heard(rank: int, topic: str) -> str:
    """The text that a rank has left; an error, after a while, if it has not."""
    store = _store()
    store.wait([_key(topic, rank)], _PATIENCE)
    return str(store.get(_key(topic, rank)).decode())


def leave(topic: str, text: str) -> None:
    """Leave a text for whichever rank asks; of several that do, one is heard."""
    _store().set(f"stayfinite/{topic}", text)


def left(topic: str, *, seconds: float) -> str:
    """The text that some rank has left; an error if none has in this time."""
    store, key = _store(), f"stayfinite/{topic}"
    store.wait([key], datetime.timedelta(seconds=seconds))
    return str(store.get(key).decode())


def meet(topic: str, count: int, *, seconds: float) -> bool:
    """Whether so many ranks come here in this time; there is no collective in this."""
    store, key = _store(), f"stayfinite/{topic}"
    until = time.monotonic() + min(seconds, _PATIENCE.total_seconds())
    store.add(key, 1)
    while store.add(key, 0) < count:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


_END = "stayfinite/end"
# What gloo and NCCL say on a rank that has lost another one.
_LOST_PEER = (
    *("gloo", "closed by peer", "reset by peer", "Connection closed", "Broken pipe"),
    *("NCCL", "pair closure"),
)


def leave_word(error: BaseException) -> None:
    """Say why this rank ends, for those that will miss it; the first of all ranks is heard."""
    if world_size() > 1 and not is_lost_peer(error):
        with contextlib.suppress(Exception):
            store, text = _store(), f"rank {rank()} ended: {_in_a_line(error)}"
            store.set(f"{_END}/{store.add(_END, 1)}", text[:500])


def _in_a_line(error: BaseException) -> str:
    """Its kind and the first line of its message; and the same of the error behind it, if any."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return said if error.__cause__ is None else f"{said} ({_in_a_line(error.__cause__)})"


def last_word() -> str | None:
    """Which rank ended first, and why, if it has said so."""
    if world_size() > 1:
        with contextlib.suppress(Exception):
            store = _store()
            if store.check([f"{_END}/1"]):
                return str(store.get(f"{_END}/1").decode())
    return None


def is_lost_peer(error: BaseException) -> bool:
    """Whether it says no more than that another rank is gone."""
    is_theirs = isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST_PEER)
    return is_theirs and world_size() > 1


def _store() -> Any:
    # Private; the store that every group is made with, and there is no public way to it.
    return dist.distributed_c10d._get_default_store()


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
