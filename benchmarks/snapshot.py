"""What it costs to keep all training state: snapshots, their memory, and the mark of each step.

    python benchmarks/snapshot.py [--json] [--rounds N] [--every N] [--threads N]

A snapshot is measured against one memcpy of the same bytes by the C library; it also reads every
value to refuse what is not finite ("unchecked" does not). The share is that of training steps
when a snapshot is taken after every so many. All contestants take turns, and figures are the
best of the rounds: whatever else runs on the machine only adds to them. It adds to memcpy too,
and more to several threads than to one: trust a ratio only where the machine was idle.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from workloads import Workload, workload

from stayfinite.snapshot import Snapshot, SnapshotRing, TrainingState

MODELS = ("gpt", "cnn", "mlp")
COPY_BAR = 1.25
SHARE_BAR = 0.005
MARK_BAR = 25.0
MARKS = 20
CACHE = 1 << 26
"""More bytes than the caches of this machine hold."""

Contestants = dict[str, Callable[[], Any]]


def memcpy(size: int) -> Callable[[], Any]:
    """Copies so many bytes from one block into another, both touched before."""
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), size)


def contestants(job: Workload, state: TrainingState, ring: SnapshotRing) -> Contestants:
    unchecked, census = Snapshot(), state.members.census()

    def marks() -> None:
        for _ in range(MARKS):
            state.mark()

    return {
        "step": job.step,
        "memcpy": memcpy(ring.take(step=0).nbytes),
        "snapshot": lambda: ring.take(step=0),
        "unchecked": lambda: unchecked.write(census),
        "marks": marks,
    }


def timings(job: Workload, entries: Contestants, rounds: int) -> dict[str, list[float]]:
    """Milliseconds for each in every round, after two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    other_memory = torch.zeros(CACHE // 4)
    for number in range(rounds + 2):
        for name, run in entries.items():
            job.optimizer.zero_grad()
            other_memory.add_(1)  # else the second to copy the weights finds them in the cache
            start = time.perf_counter()
            run()
            if number > 1:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def measure(name: str, rounds: int, every: int) -> dict[str, Any]:
    job = workload(name)
    job.step()
    job.optimizer.zero_grad()
    state = TrainingState(job.model, job.optimizer)
    ring = SnapshotRing(state)
    times = timings(job, contestants(job, state, ring), rounds)
    best = {name: min(its) for name, its in times.items()}
    snapshot = ring.take(step=0)
    params = sum(param.numel() for param in job.model.parameters())
    buffers = sum(buffer.nbytes for buffer in job.model.buffers())
    return {
        "model": name,
        "parameters": params,
        "step_ms": best["step"],
        "snapshot_ms": best["snapshot"],
        "memcpy_ms": best["memcpy"],
        "ratio": best["snapshot"] / best["memcpy"],
        "ratio_unchecked": best["unchecked"] / best["memcpy"],
        "share": best["snapshot"] / best["step"] / every,
        "bytes_per_parameter": (snapshot.nbytes - buffers) / params,
        "mark_us": best["marks"] / MARKS * 1e3,
        "mark_share": best["marks"] / best["step"] / MARKS,
    }


def bars(row: dict[str, Any]) -> dict[str, float]:
    """Only a model of some size is held to the speed of memory, only a tiny one to the mark."""
    if row["model"] == "gpt":
        return {"ratio": COPY_BAR, "share": SHARE_BAR, "bytes_per_parameter": 12.01}
    return {"mark_us": MARK_BAR} if row["model"] == "mlp" else {}


def missed(row: dict[str, Any]) -> list[str]:
    return [name for name, bar in bars(row).items() if row[name] > bar]


def table(rows: list[dict[str, Any]], every: int) -> Table:
    title = f"one snapshot, {torch.get_num_threads()} thread(s), taken every {every} steps"
    shown = Table(title=title)
    names = ("model", "step", "snapshot", "memcpy", "x memcpy", "unchecked", "of a step")
    for name in (*names, "bytes/parameter and slot", "mark", "share", "bars"):
        shown.add_column(name, justify="left" if name in ("model", "bars") else "right")
    for row in rows:
        wrong = missed(row)
        verdict = f"MISSED {', '.join(wrong)}" if wrong else "met" if bars(row) else ""
        shown.add_row(
            row["model"],
            f"{row['step_ms']:.2f} ms",
            f"{row['snapshot_ms']:.2f} ms",
            f"{row['memcpy_ms']:.2f} ms",
            f"{row['ratio']:.2f}",
            f"{row['ratio_unchecked']:.2f}",
            f"{row['share']:.3%}",
            f"{row['bytes_per_parameter']:.2f}",
            f"{row['mark_us']:.1f} µs",
            f"{row['mark_share']:.3%}",
            verdict,
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--every", type=int, default=50, help="steps between two snapshots")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(name, options.rounds, options.every) for name in MODELS]
    if options.json:
        print(json.dumps({"every": options.every, "threads": options.threads, "rows": rows}))
    else:
        Console().print(table(rows, options.every))
        Console().print(
            f"bars: GPT: snapshot {COPY_BAR} x memcpy, {SHARE_BAR:.1%} of a step, 12 bytes; "
            f"tiny MLP: mark {MARK_BAR:.0f} µs"
        )
    return 1 if any(map(missed, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
