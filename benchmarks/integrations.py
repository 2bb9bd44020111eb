"""What our callbacks add to a healthy step of a small GPT, beside each framework's own debugger.

    python benchmarks/integrations.py [--json] [--rounds N] [--steps N] [--only lightning ...]

Ours is timed directly: all that is done inside the steps, snapshots included, against the rest of
the same steps. The debuggers are timed from outside, in turns: a run with them against a run
without. To add a framework, add it to FRAMEWORKS.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import integrations_hf as hf
import torch
from guarded import ENTRIES, Clock
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from workloads import workload

from stayfinite.integrations import clipping

BAR = 1.0
Run = Callable[[int, bool], float]
"""Trains so many steps, with us or without; the seconds for those after the first few."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How it trains; what of ours runs in its steps; and its own debuggers, which train too."""

    package: str
    extra: str
    train: Callable[[Clock], Run]
    entries: Callable[[], list[tuple[Any, str]]]
    debuggers: dict[str, Callable[[Clock], Run]] = field(default_factory=dict)

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def with_lightning(clock: Clock, *, detect_anomaly: bool = False) -> Run:
    from lightning import LightningModule, Trainer

    from stayfinite.integrations.lightning import StayFinite

    work = workload("gpt")

    class Step(LightningModule):
        def __init__(self, timer: hf.Timer) -> None:
            super().__init__()
            self.model, self._timer = work.model, timer

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = work.loss()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return work.optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            self._timer.stepped()

    def run(steps: int, is_watched: bool) -> float:
        timer = hf.Timer(clock)
        count = steps + hf.WARM
        trainer = Trainer(
            accelerator="cpu",
            max_steps=count,
            gradient_clip_val=1.0,
            detect_anomaly=detect_anomaly,
            callbacks=[StayFinite(sinks=[])] if is_watched else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Step(timer), DataLoader(list(range(count)), batch_size=None))
        return time.perf_counter() - timer.start

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return run


def of_lightning() -> list[tuple[Any, str]]:
    from stayfinite.integrations.lightning import StayFinite
    from stayfinite.integrations.lightning_guard import LightningGuard

    hooks = ["on_train_batch_start", "on_train_batch_end"]
    own = [(StayFinite, hook) for hook in hooks] + [(LightningGuard, "stepped")]
    return [*ENTRIES, (clipping, "_would_spread"), *own]


def _of_hf(name: str, extra: str = "hf", **debuggers: Callable[[Clock], Run]) -> Framework:
    def anomaly(clock: Clock) -> Run:
        run = hf.FRAMEWORKS[name](clock)
        return lambda steps, _: hf.anomaly(run, steps)

    return Framework(
        package=name,
        extra=extra,
        train=hf.FRAMEWORKS[name],
        entries=lambda: hf.entries(name),
        debuggers={"detect_anomaly": anomaly, **debuggers},
    )


FRAMEWORKS = {
    "lightning": Framework(
        package="lightning",
        extra="lightning",
        train=with_lightning,
        entries=of_lightning,
        debuggers={"detect_anomaly": lambda clock: with_lightning(clock, detect_anomaly=True)},
    ),
    "transformers": _of_hf(
        "transformers",
        underflow_overflow=lambda clock: hf.with_transformers(clock, debug="underflow_overflow"),
    ),
    "accelerate": _of_hf("accelerate"),
    "ignite": _of_hf("ignite", extra="ignite"),
}


@contextlib.contextmanager
def measured(framework: Framework, clock: Clock) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name in framework.entries()]
    for owner, name, method in originals:
        setattr(owner, name, clock.timed(method))
    try:
        yield
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


def ours(framework: Framework, rounds: int, steps: int) -> dict[str, float]:
    """Microseconds of ours for each step, and what that is of the rest of the step."""
    clock = Clock()
    run = framework.train(clock)
    found = []
    for _ in range(rounds):
        with measured(framework, clock):
            taken = run(steps, True)
        found.append((1e6 * clock.total / steps, 100 * clock.total / (taken - clock.total)))
    us, percent = (statistics.median(each) for each in zip(*found, strict=True))
    return {"us": us, "percent": percent}


def theirs(framework: Framework, rounds: int, steps: int) -> dict[str, float]:
    """Percent that the framework's own debuggers add."""
    plain = framework.train(Clock())
    runs = {name: make(Clock()) for name, make in framework.debuggers.items()}
    added: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        base = plain(steps, False)
        for name, run in runs.items():
            added[name].append(100 * (run(steps, False) / base - 1))
    return {name: statistics.median(each) for name, each in added.items()}


def shown(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="in a healthy step of a small GPT")
    for heading in ("framework", "who", "us", "of a step", "bar"):
        table.add_column(heading, justify="right")
    for name, row in results.items():
        if "missing" in row:
            table.add_row(name, row["missing"])
            continue
        percent = f"{row['percent']:.2f}%"
        table.add_row(name, "stayfinite", f"{row['us']:.0f}", percent, f"{BAR:.0f}%")
        for debugger, added in row["debuggers"].items():
            table.add_row("", debugger, "", f"{added:.0f}%", "")
    return table


def measure(framework: Framework, rounds: int, steps: int) -> dict[str, Any]:
    if not framework.is_installed:
        return {"missing": f"pip install 'stayfinite[{framework.extra}]'"}
    debuggers = theirs(framework, 1, max(10, steps // 5))
    return {**ours(framework, rounds, steps), "debuggers": debuggers}


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
