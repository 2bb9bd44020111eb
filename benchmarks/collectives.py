"""What ranks tell one another because of us, for each update: collectives and bytes.

    python benchmarks/collectives.py [--json] [--steps N]

Ranks are forks that talk over gloo. They count their all-reduces and bytes in updates of a small
model, with and without `watch`, and with clipping, and time an all-reduce of 20 bytes (the quickest
of many, since ranks share cores). On 2 ranks the processor time of a GPT's steps is taken too: all
of it, what is spent in our hooks, and the part of that in the all-reduce; medians over the steps,
so that a snapshot, which is taken now and then, is not in them. The last table is arithmetic:
counts do not depend on the number of ranks, bytes are those that a rank sends and receives in a
reduction by halves (2 * log2(n) messages), and the time is that of 2 and 4 ranks drawn out over
log2(n). It says more about gloo on this machine than about a cluster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from workloads import GPT

import stayfinite
from stayfinite.guard import ranks as guard_ranks
from stayfinite.guard.guard import Guard

KINDS = ("ddp", "fsdp2")
WORD = 20  # bytes: int32[5]
SCALES = tuple(2**power for power in (1, 2, 4, 6, 8, 10, 12, 14))


@contextmanager
def counted(found: list[int]) -> Iterator[None]:
    """The bytes of each all-reduce that is called in python; torch's own are in C++ or DTensors."""
    theirs = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(tensor.nbytes)
        return theirs(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = theirs


def built(kind: str, world: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model


def measured(kind: str, world: int, steps: int, *, watch: bool, clip: bool) -> dict[str, float]:
    """All-reduces and bytes for each update, after the first five."""
    model, calls = built(kind, world), []
    optimizer = torch.optim.AdamW(model.parameters())
    guard = stayfinite.watch(model, optimizer, sinks=[]) if watch else nullcontext()
    with guard, counted(calls):
        for step in range(5 + steps):
            if step == 5:
                calls.clear()
            optimizer.zero_grad()
            model(torch.randn(8, 64)).pow(2).mean().backward()
            if clip:
                stayfinite.clip_gradients(optimizer, 1.0)
            optimizer.step()
    return {"collectives": len(calls) / steps, "bytes": sum(calls) / steps}


class Clock:
    """Processor time of this thread inside functions, each moment counted once."""

    def __init__(self, *functions: tuple[Any, str]) -> None:
        self.total, self._depth, self._functions = 0.0, 0, functions

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.total += time.thread_time() - began

        return call

    def attach(self) -> None:
        for owner, name in self._functions:
            setattr(owner, name, self._timed(getattr(owner, name)))


OURS = [
    *((Guard, name) for name in ("judge", "stepped", "begin_step", "refused")),
    *((Guard, name) for name in ("_before_backward", "_after_backward")),
    (guard_ranks.EarlyLooks, "note"),
]


def shares(kind: str, world: int, steps: int) -> dict[str, float]:
    """Milliseconds of a GPT's steps: all, ours besides the word, and the word."""
    torch.manual_seed(0)
    model: nn.Module = GPT()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(1024, (8, 128))
    ours, word = Clock(*OURS), Clock((guard_ranks, "say_word"))
    found: dict[str, list[float]] = {"step": [], "ours": [], "word": []}
    with stayfinite.watch(model, optimizer, sinks=[]):
        for step in range(3 + steps):
            before = ours.total, word.total, time.thread_time()
            optimizer.zero_grad()
            logits = model(tokens).view(-1, 1024)
            nn.functional.cross_entropy(logits, tokens.view(-1)).backward()
            optimizer.step()
            spent_word = word.total - before[1]
            if step >= 3:
                found["step"].append(time.thread_time() - before[2])
                found["ours"].append(ours.total - before[0] - spent_word)
                found["word"].append(spent_word)
            elif step == 2:
                word.attach()
                ours.attach()
    return {name: 1e3 * statistics.median(each) for name, each in found.items()}


def latency(rounds: int = 300) -> float:
    """Microseconds of an all-reduce of 20 bytes, the quickest."""
    word, times = torch.zeros(WORD // 4, dtype=torch.int32), []
    for _ in range(rounds):
        began = time.perf_counter()
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        times.append(1e6 * (time.perf_counter() - began))
    return min(times)


def on_ranks(world: int, steps: int) -> dict[str, Any]:
    """What rank 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if not child:
                try:
                    _be_rank(rank, world, Path(folder), steps)
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        found: dict[str, Any] = json.loads((Path(folder) / "found").read_text())
        return found


def _be_rank(rank: int, world: int, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    found: dict[str, Any] = {"microseconds": latency()}
    for kind in KINDS:
        found[kind] = {
            "alone": measured(kind, world, steps, watch=False, clip=False),
            "watch": measured(kind, world, steps, watch=True, clip=False),
            "clip_gradients": measured(kind, world, steps, watch=False, clip=True),
        }
    if world == 2:
        found["shares"] = {kind: shares(kind, world, steps) for kind in KINDS}
    if rank == 0:
        (folder / "found").write_text(json.dumps(found))
    dist.barrier()


def scaled(microseconds: dict[int, float]) -> list[dict[str, float]]:
    """The word of an update at each scale."""
    slope = microseconds[4] - microseconds[2]
    return [
        {
            "ranks": ranks,
            "collectives": 1,
            "bytes": 2 * WORD * math.log2(ranks),
            "microseconds": microseconds[2] + slope * (math.log2(ranks) - 1),
        }
        for ranks in SCALES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    found = {world: on_ranks(world, options.steps) for world in (2, 4)}
    table = scaled({world: each["microseconds"] for world, each in found.items()})
    if options.json:
        print(json.dumps({"measured": found, "scaled": table}))
        return
    console = Console(width=100)
    shown = Table("ranks", "model", "added by", "all-reduces per update", "bytes")
    for world, each in found.items():
        for kind in KINDS:
            for name, own in each[kind].items():
                cells = (f"{own['collectives']:g}", f"{own['bytes']:g}")
                shown.add_row(str(world), kind, name, *cells)
        console.print(f"{world} ranks: 20 bytes take {each['microseconds']:.0f} us.")
    console.print(shown)
    shown = Table("model", "ms of a GPT step", "ours, without the word", "of the step", "the word")
    for kind, each in found[2]["shares"].items():
        rest = each["step"] - each["ours"] - each["word"]
        cells = (f"{each['step']:.1f}", f"{each['ours']:.2f}", f"{100 * each['ours'] / rest:.2f}%")
        shown.add_row(kind, *cells, f"{each['word']:.2f}")
    console.print(shown)
    shown = Table("ranks", "all-reduces per update", "bytes per rank", "us, drawn out")
    for row in table:
        shown.add_row(*(f"{row[key]:,.0f}" for key in row))
    console.print(shown)


if __name__ == "__main__":
    main()
