"""How fast the scan reads memory, against one pure read of the same memory and against peers.

    python benchmarks/scan.py [--json] [--elements N] [--rounds N]

The pure read is a small C loop that ORs the memory, built here with `cc`. All contestants take
turns in every round, on one thread; figures are medians over the rounds. A ratio of 1 is the
speed of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stayfinite.detect.finite import all_finite, nonfinite

BARS = {torch.float32: 1.3, torch.bfloat16: 1.7, torch.float16: 1.7}
OURS = "stayfinite"

READ = """
#include <stddef.h>
#include <stdint.h>
uint64_t read_all(const uint64_t *memory, size_t words) {
    uint64_t seen = 0;
    for (size_t i = 0; i < words; i++) seen |= memory[i];
    return seen;
}
"""

Contestants = dict[str, Callable[[], Any]]


def build_reader(folder: str) -> Any:
    source, library = Path(folder, "read.c"), Path(folder, "read.so")
    source.write_text(READ)
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
    read_all = ctypes.CDLL(str(library)).read_all
    read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    read_all.restype = ctypes.c_uint64
    return read_all


def naive(x: Tensor) -> bool:
    return bool(torch.isnan(x).any()) or bool(torch.isinf(x).any())


def contestants(x: Tensor, read_all: Any) -> Contestants:
    words = x.nbytes // 8
    return {
        "pure read": lambda: read_all(x.data_ptr(), words),
        OURS: lambda: all_finite([x]),
        "stayfinite, no host read": lambda: nonfinite([x], exact_on_device=True),
        "isfinite().all()": lambda: bool(torch.isfinite(x).all()),
        "isnan().any() or isinf().any()": lambda: naive(x),
    }


def timings(entries: Contestants, rounds: int) -> dict[str, list[float]]:
    """Milliseconds for each in every round, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(rounds + 1):
        for name, run in entries.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def ratio(times: list[float], to: list[float]) -> float:
    """The median over rounds, so that a busy machine slows both sides."""
    return statistics.median(a / b for a, b in zip(times, to, strict=True))


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """The profiler writes to stderr from C++."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def largest_allocation(run: Callable[[], Any]) -> int:
    """Bytes of the largest single block that torch allocated."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        silent_stderr(),
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
    ):
        run()
    return max((event.cpu_memory_usage for event in profile.events() or ()), default=0)


def measure(dtype: torch.dtype, elements: int, rounds: int, read_all: Any) -> list[dict[str, Any]]:
    x = torch.randn(elements).to(dtype)
    entries = contestants(x, read_all)
    times = timings(entries, rounds)
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "contestant": name,
            "milliseconds": statistics.median(times[name]),
            "ratio": ratio(times[name], times["pure read"]),
            "bar": BARS[dtype] if name == OURS else None,
            "largest_temporary": largest_allocation(run),
            "input_bytes": x.nbytes,
        }
        for name, run in entries.items()
    ]


def is_met(row: dict[str, Any]) -> bool:
    if row["bar"] is None:
        return True
    # "Small" is far below any input that is worth a benchmark.
    return bool(row["ratio"] <= row["bar"] and row["largest_temporary"] <= 4096)


def table(rows: list[dict[str, Any]], elements: int) -> Table:
    shown = Table(title=f"one scan of {elements / 1e6:g}M elements, 1 thread")
    for name in ("dtype", "contestant", "ms", "x pure read", "bar", "largest temporary"):
        shown.add_column(name, justify="left" if name in ("dtype", "contestant") else "right")
    for row in rows:
        verdict = "" if row["bar"] is None else f"{row['bar']} {'met' if is_met(row) else 'MISSED'}"
        shown.add_row(
            row["dtype"],
            row["contestant"],
            f"{row['milliseconds']:.2f}",
            f"{row['ratio']:.2f}",
            verdict,
            f"{row['largest_temporary']:,} B",
            end_section=row["contestant"].startswith("isnan"),
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        read_all = build_reader(folder)
        rows = [
            row
            for dtype in BARS
            for row in measure(dtype, options.elements, options.rounds, read_all)
        ]
    if options.json:
        print(json.dumps({"elements": options.elements, "rows": rows}, indent=1))
    else:
        Console().print(table(rows, options.elements))
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
