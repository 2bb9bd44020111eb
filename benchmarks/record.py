"""What recording a run adds to a step, and how fast a record is read.

    python benchmarks/record.py [--json] [--rounds N] [--only gpt cnn mlp]

Timed directly: the recorder's part of the steps it sits in, samples of the gradients included,
against the rest of the same steps; means over whole intervals of samples, medians over rounds.
What the writing thread takes from the other processors is shown apart, as processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from workloads import workload

import stayfinite
from stayfinite.guard.recorder import Recorder
from stayfinite.report.store.reading import read_run
from stayfinite.report.store.writer import RunInfo, StepRow, StoreWriter

BARS = {"gpt": 0.2, "cnn": None, "mlp": None}
EVERY = 16


def added(name: str, rounds: int) -> dict[str, Any]:
    work = workload(name)
    spent = [0.0]
    original = Recorder.stepped

    def timed(self: Recorder, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        original(self, *args, **kwargs)
        spent[0] += time.perf_counter() - start

    Recorder.stepped = timed  # type: ignore[method-assign]
    found, microseconds = [], []
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            stayfinite.watch(work.model, work.optimizer, sinks=[], run_dir=f"{folder}/a"),
        ):
            for _ in range(3):
                work.step()
            for _ in range(rounds):
                spent[0], start = 0.0, time.perf_counter()
                for _ in range(EVERY):
                    work.step()
                rest = time.perf_counter() - start - spent[0]
                found.append(100 * spent[0] / rest)
                microseconds.append(1e6 * spent[0] / EVERY)
    finally:
        Recorder.stepped = original  # type: ignore[method-assign]
    return {
        "percent": statistics.median(found),
        "us": statistics.median(microseconds),
        "bar_percent": BARS[name],
    }


def reading(steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        writer = StoreWriter(f"{folder}/a", lambda: RunInfo(started=0.0))
        for start in range(0, steps, 16):
            rows = range(start, start + 16)
            writer.steps([StepRow(step=n, time=n / 9, loss=1 / (n + 1), lr=0.1) for n in rows])
            if start % 4096 == 0:
                writer.flush(60)
        writer.close()
        path = Path(folder) / "a"
        size = (path / "rank-0.jsonl").stat().st_size
        begin = time.perf_counter()
        read_run(path)
        return {"seconds": time.perf_counter() - begin, "bytes_per_step": size / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(BARS), default=list(BARS))
    options = parser.parse_args()
    results = {name: added(name, options.rounds) for name in options.only}
    read = {steps: reading(steps) for steps in (10_000, 100_000)}
    if options.json:
        json.dump({"added": results, "reading": read}, sys.stdout)
        return
    table = Table(title="recording a run")
    for heading in ("", "us per step", "of the step"):
        table.add_column(heading, justify="right")
    for name, found in results.items():
        bar = f" (bar {found['bar_percent']}%)" if found["bar_percent"] else ""
        table.add_row(name, f"{found['us']:.1f}", f"{found['percent']:.3f}%{bar}")
    Console().print(table)
    for steps, found in read.items():
        size = found["bytes_per_step"]
        print(f"{steps:,} steps are read in {found['seconds']:.2f} s; {size:.0f} bytes each")


if __name__ == "__main__":
    main()
