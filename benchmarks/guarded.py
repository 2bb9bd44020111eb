"""What a guard with recovery on adds to a healthy step.

    python benchmarks/guarded.py [--json] [--rounds N] [--threads N] [--only gpt cnn mlp]
                                 [--cpu-time]

Timed directly: all that the guard does inside the steps it sits in, snapshots included, against
the rest of the same steps; means over whole snapshot intervals, medians over rounds. What reading
the clock takes, measured around nothing in the same steps, is not counted.
On a machine with other work, --cpu-time --threads 1 counts what the processor did for us.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from workloads import workload

import stayfinite
from stayfinite.guard.guard import Guard

BARS = {"gpt": 1.0, "cnn": 1.0, "mlp": 15.0}
ENTRIES = (
    (Guard, "judge"),
    (Guard, "stepped"),
    (Guard, "begin_step"),
    (Guard, "_before_backward"),
    (Guard, "_after_backward"),
)


Now = Callable[[], float]


class Clock:
    """Time spent inside the guard, each moment counted once."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self.total = self.idle = 0.0  # idle: what the readings themselves took
        self._is_inside = False

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return method(*args, **kwargs)
            self._is_inside = True
            before = self._now()
            start = self._now()
            try:
                return method(*args, **kwargs)
            finally:
                self.total += self._now() - start
                self.idle += start - before
                self._is_inside = False

        return call

    def spent(self) -> tuple[float, float]:
        """What the guard took since the last time, and what measuring it took."""
        spent = self.total - self.idle, 3 * self.idle
        self.total = self.idle = 0.0
        return spent


@contextlib.contextmanager
def measured(clock: Clock) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name in ENTRIES]
    for owner, name, method in originals:
        setattr(owner, name, clock.timed(method))
    try:
        yield
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


def shares(name: str, rounds: int, now: Now) -> tuple[float, float]:
    """(microseconds of ours for each step, percent of the rest of the step)."""
    work, clock = workload(name), Clock(now)
    every = stayfinite.RecoveryConfig().snapshot_every
    found = []
    with measured(clock), stayfinite.watch(work.model, work.optimizer, sinks=[]):
        for _ in range(3):
            work.step()
        for _ in range(rounds):
            clock.spent()
            start = now()
            for _ in range(every):
                work.step()
            taken = now() - start
            ours, measuring = clock.spent()
            found.append((1e6 * ours / every, 100 * ours / (taken - ours - measuring)))
    return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", choices=list(BARS), default=list(BARS))
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, not the clock's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    now = time.process_time if options.cpu_time else time.perf_counter
    results = {name: shares(name, options.rounds, now) for name in options.only}
    if options.json:
        json.dump({name: {"us": us, "percent": p} for name, (us, p) in results.items()}, sys.stdout)
        return
    shown = Table(title="a guard with recovery on, in a healthy step")
    for heading in ("model", "us", "of a step", "bar"):
        shown.add_column(heading, justify="right")
    for name, (us, percent) in results.items():
        shown.add_row(name, f"{us:.1f}", f"{percent:.2f}%", f"{BARS[name]:.0f}%")
    Console().print(shown)


if __name__ == "__main__":
    main()
