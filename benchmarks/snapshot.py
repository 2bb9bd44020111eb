"""What it costs to keep all training state: snapshots, their memory, and the mark of each step.

    python benchmarks/snapshot.py [--json] [--rounds N] [--every N] [--threads N] [--warm]

A snapshot is measured against one memcpy of the same bytes by the C library, in one thread and
one block, and against a memcpy tensor by tensor ("by tensor"): a block of more than about 200 MB
is written past the cache, which no tensor is large enough for. A snapshot also reads every value,
to refuse what is not finite ("unchecked" does not), and uses torch's threads. The share is that
of training steps when one is taken after every so many. A mark is measured many times in a row,
and once after each training step, when little of it is in the cache ("after a step").

All contestants take turns, and figures are medians over the rounds. Whatever else runs on the
machine slows several threads down more than one: trust a ratio only where the machine was idle.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from workloads import GPT, Workload, workload

from stayfinite.snapshot import Snapshot, SnapshotRing, TrainingState

MODELS = ("gpt", "large", "cnn", "mlp")
COPY_BAR = 1.25
SHARE_BAR = 0.005
MARK_BAR = 100.0
MARKS = 200
CACHE = 1 << 27
"""More bytes than the caches of this machine hold."""


class Contestant(NamedTuple):
    """Only `run` is measured."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


Times = dict[str, list[float]]


def large() -> Workload:
    """A GPT of 26 million parameters; its step is not measured."""
    torch.manual_seed(0)
    model = GPT(layers=8, width=480, vocabulary=4096)
    tokens = torch.randint(4096, (9,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(tokens[None, :-1])[0], tokens[1:])

    return Workload(name="large", model=model, optimizer=optimizer, loss=loss)


def memcpy(sizes: list[int]) -> Callable[[], Any]:
    """Copies blocks of so many bytes into others, all touched before."""
    pairs = [[torch.ones(size, dtype=torch.uint8) for _ in range(2)] for size in sizes]
    calls = [(to.data_ptr(), source.data_ptr(), to.nbytes) for to, source in pairs]

    def run() -> list[list[torch.Tensor]]:
        for call in calls:
            ctypes.memmove(*call)
        return pairs

    return run


def contestants(state: TrainingState, ring: SnapshotRing) -> dict[str, Contestant]:
    unchecked, census = Snapshot(), state.members.census()
    sizes = [item.tensor.nbytes for item in census.items]

    return {
        "memcpy": Contestant(memcpy([sum(sizes)])),
        "by_tensor": Contestant(memcpy(sizes)),
        "snapshot": Contestant(lambda: ring.take(step=0)),
        "unchecked": Contestant(lambda: unchecked.write(census)),
    }


def step_contestants(job: Workload, state: TrainingState) -> dict[str, Contestant]:
    def marks() -> None:
        for _ in range(MARKS):
            state.mark()

    return {
        "step": Contestant(job.step),
        "marks": Contestant(marks),
        "mark": Contestant(state.mark, prepare=job.step),
    }


def timings(job: Workload, entries: dict[str, Contestant], rounds: int, *, warm: bool) -> Times:
    """Milliseconds for each in every round, after two rounds of warm-up."""
    times: Times = {name: [] for name in entries}
    other_memory = torch.zeros(CACHE // 4)
    for number in range(rounds + 2):
        for name, entry in entries.items():
            job.optimizer.zero_grad()
            entry.prepare()
            if warm:
                entry.run()
            elif name not in ("step", "marks", "mark"):
                other_memory.add_(1)  # else the second to copy finds the weights in the cache
            start = time.perf_counter()
            entry.run()
            if number > 1:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def measure(name: str, rounds: int, every: int, *, warm: bool) -> dict[str, Any]:
    job = large() if name == "large" else workload(name)
    job.step()
    scheduler = CosineAnnealingLR(job.optimizer, 1000)
    state = TrainingState(job.model, job.optimizer, scheduler=scheduler)
    ring = SnapshotRing(state)
    for step in range(2):
        snapshot = ring.take(step=step)
        job.optimizer.zero_grad()
    entries = contestants(state, ring)
    if name != "large":
        entries |= step_contestants(job, state)
    times = timings(job, entries, rounds, warm=warm)
    params = sum(param.numel() for param in job.model.parameters())
    buffers = sum(buffer.nbytes for buffer in job.model.buffers())
    row = {
        "model": name,
        "parameters": params,
        "snapshot_ms": statistics.median(times["snapshot"]),
        "memcpy_ms": statistics.median(times["memcpy"]),
        "ratio": ratio(times, "snapshot", "memcpy"),
        "ratio_by_tensor": ratio(times, "snapshot", "by_tensor"),
        "ratio_unchecked": ratio(times, "unchecked", "memcpy"),
        "bytes_per_parameter": (snapshot.nbytes - buffers) / params,
    }
    return row | (step_figures(times, every) if "step" in times else {})


def step_figures(times: Times, every: int) -> dict[str, float]:
    return {
        "step_ms": statistics.median(times["step"]),
        "share": ratio(times, "snapshot", "step") / every,
        "mark_us": statistics.median(times["marks"]) / MARKS * 1e3,
        "mark_after_step_us": statistics.median(times["mark"]) * 1e3,
        "mark_share": ratio(times, "mark", "step"),
    }


def ratio(times: Times, name: str, against: str) -> float:
    """The median of the ratios in each round: what slows a round down slows both."""
    return statistics.median(a / b for a, b in zip(times[name], times[against], strict=True))


def bars(row: dict[str, Any]) -> dict[str, float]:
    """Only a model of some size is held to the speed of memory, only a tiny one to the mark."""
    if row["model"] == "gpt":
        return {"ratio": COPY_BAR, "share": SHARE_BAR, "bytes_per_parameter": 12.01}
    if row["model"] == "large":
        return {"ratio_by_tensor": COPY_BAR, "bytes_per_parameter": 12.01}
    return {"mark_us": MARK_BAR} if row["model"] == "mlp" else {}


def missed(row: dict[str, Any]) -> list[str]:
    return [name for name, bar in bars(row).items() if row[name] > bar]


FIGURES = {
    "step, ms": ("step_ms", "{:.2f}"),
    "snapshot, ms": ("snapshot_ms", "{:.2f}"),
    "memcpy, ms": ("memcpy_ms", "{:.2f}"),
    "snapshot, times memcpy": ("ratio", "{:.2f}"),
    "the same, by tensor": ("ratio_by_tensor", "{:.2f}"),
    "unchecked, times memcpy": ("ratio_unchecked", "{:.2f}"),
    "snapshots, of a step": ("share", "{:.3%}"),
    "bytes per parameter and slot": ("bytes_per_parameter", "{:.2f}"),
    "mark, µs": ("mark_us", "{:.1f}"),
    "mark after a step, µs": ("mark_after_step_us", "{:.1f}"),
    "the same, of a step": ("mark_share", "{:.3%}"),
}


def figure(row: dict[str, Any], key: str, form: str) -> str:
    """As text, with its bar below it."""
    if key not in row:
        return ""
    bar = bars(row).get(key)
    if bar is None:
        return form.format(row[key])
    word = "MISSED" if row[key] > bar else "bar"
    return f"{form.format(row[key])}\n({word} {form.format(bar)})"


def table(rows: list[dict[str, Any]], every: int) -> Table:
    """A column for each model: that fits into 80 characters."""
    shown = Table(
        title=f"one snapshot, {torch.get_num_threads()} thread(s), taken every {every} steps"
    )
    shown.add_column("")
    for row in rows:
        shown.add_column(row["model"], justify="right")
    for name, (key, form) in FIGURES.items():
        shown.add_row(name, *(figure(row, key, form) for row in rows))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--every", type=int, default=50, help="steps between two snapshots")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--warm", action="store_true", help="each contestant runs twice in a row")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [
        measure(name, options.rounds, options.every, warm=options.warm) for name in options.models
    ]
    if options.json:
        print(json.dumps({"every": options.every, "threads": options.threads, "rows": rows}))
    else:
        Console().print(table(rows, options.every))
    return 1 if any(map(missed, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
