"""What our callbacks add to a healthy step of a small GPT, beside each framework's own debugger.

    python benchmarks/integrations.py [--json] [--rounds N] [--steps N] [--only lightning ...]

Ours is timed directly: all that is done inside the steps, snapshots included, against the rest of
the same steps. The debuggers are timed from outside, in turns: a run with them against a run
without. It is processor time, so other load on the machine counts on neither side. To add a
framework, add it to FRAMEWORKS.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import framework_runs
import torch
from framework_runs import WARM, Debugger, Meter
from guarded import ENTRIES
from rich.console import Console
from rich.table import Table

from stayfinite.integrations import shared
from stayfinite.integrations.shared import RecordedCalls

BAR = 1.0
Entries = list[tuple[Any, str]]


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How it trains; what of ours runs in its steps, besides a guard; its own debuggers."""

    package: str
    extra: str
    train: Callable[..., None]
    entries: Callable[[], Entries]
    debuggers: tuple[Debugger, ...] = ("detect_anomaly",)


def of_lightning() -> Entries:
    from stayfinite.integrations.lightning import StayFinite
    from stayfinite.integrations.lightning_guard import LightningGuard

    hooks = ("on_train_batch_start", "on_train_batch_end")
    return [*((StayFinite, hook) for hook in hooks), (LightningGuard, "stepped")]


def of_transformers() -> Entries:
    from stayfinite.integrations.transformers import (
        LoggedLosses,
        StayFiniteCallback,
        WatchedTrainer,
    )

    return [(StayFiniteCallback, "on_step_end"), (WatchedTrainer, "_begin"), (LoggedLosses, "add")]


def of_accelerate() -> Entries:
    return [(RecordedCalls, "_enter")]


def of_ignite() -> Entries:
    from stayfinite.integrations import ignite

    return [
        (ignite, "step_carefully"),
        (ignite._Steps, "_output_after"),
        (ignite._Steps, "end_iteration"),
    ]


FRAMEWORKS = {
    "lightning": Framework(
        package="lightning",
        extra="lightning",
        train=framework_runs.lightning,
        entries=of_lightning,
    ),
    "transformers": Framework(
        package="transformers",
        extra="hf",
        train=framework_runs.transformers,
        entries=of_transformers,
        debuggers=("underflow_overflow", "detect_anomaly"),
    ),
    "accelerate": Framework(
        package="accelerate", extra="hf", train=framework_runs.accelerate, entries=of_accelerate
    ),
    "ignite": Framework(
        package="ignite",
        extra="ignite",
        train=framework_runs.ignite,
        entries=of_ignite,
        debuggers=("TerminateOnNan", "detect_anomaly"),
    ),
}


@contextlib.contextmanager
def measured(entries: Entries, meter: Meter) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name in entries]
    for owner, name, method in originals:
        setattr(owner, name, meter.of_ours(method))
    try:
        yield
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


def seconds(
    framework: Framework, meter: Meter, steps: int, debugger: Debugger | None = None
) -> float:
    """For so many steps, after the first few."""
    framework.train(meter, steps + WARM, watched=False, debugger=debugger)
    return time.process_time() - meter.start


def ours(framework: Framework, rounds: int, steps: int) -> dict[str, float]:
    """Microseconds of ours for each step, and what that is of the rest of the step."""
    entries = [*ENTRIES, (shared, "_would_spread"), *framework.entries()]
    found = []
    for _ in range(rounds):
        meter = Meter()
        with measured(entries, meter):
            framework.train(meter, steps + WARM, watched=True, debugger=None)
        taken = time.process_time() - meter.start
        found.append((1e6 * meter.ours / steps, 100 * meter.ours / (taken - meter.ours)))
    us, percent = (statistics.median(each) for each in zip(*found, strict=True))
    return {"us": us, "percent": percent}


def theirs(framework: Framework, rounds: int, steps: int) -> dict[str, float]:
    """Percent that the framework's own debuggers add."""
    added: dict[str, list[float]] = {name: [] for name in framework.debuggers}
    for _ in range(rounds):
        plain = seconds(framework, Meter(), steps)
        for name in framework.debuggers:
            added[name].append(100 * (seconds(framework, Meter(), steps, name) / plain - 1))
    return {name: statistics.median(each) for name, each in added.items()}


def measure(framework: Framework, rounds: int, steps: int) -> dict[str, Any]:
    if importlib.util.find_spec(framework.package) is None:
        return {"missing": f"pip install 'stayfinite[{framework.extra}]'"}
    debuggers = theirs(framework, rounds, max(10, steps // 5))
    return {**ours(framework, rounds, steps), "bar": BAR, "debuggers": debuggers}


def shown(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="in a healthy step of a small GPT")
    for heading in ("framework", "who", "us", "of a step", "bar"):
        table.add_column(heading, justify="right")
    for name, row in results.items():
        if "missing" in row:
            table.add_row(name, row["missing"])
            continue
        percent = f"{row['percent']:.2f}%"
        table.add_row(name, "stayfinite", f"{row['us']:.0f}", percent, f"{row['bar']:.0f}%")
        for debugger, added in row["debuggers"].items():
            table.add_row("", debugger, "", f"{added:.0f}%", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="a snapshot is taken in each 50")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", choices=list(FRAMEWORKS), default=list(FRAMEWORKS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    results = {
        name: measure(FRAMEWORKS[name], options.rounds, options.steps) for name in options.only
    }
    if options.json:
        json.dump(results, sys.stdout)
    else:
        Console().print(shown(results))


if __name__ == "__main__":
    main()
