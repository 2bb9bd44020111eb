"""What clipping costs beside torch's clip_grad_norm_, and how often it clips clean training.

    python benchmarks/clip.py [--json] [--rounds N] [--steps N] [--seeds N]

Cost: all contestants take turns in every round on fresh copies of the same gradients, on one
thread; a ratio is the median over the rounds. "check" is what a guard's own check costs after the
clip, with and without the norm that they share. Clean: trainings of an MLP, a CNN and a GPT with
two optimizers, each with new batches in every step; the share of steps in which each mode clipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from clean_trainings import OPTIMIZERS, TASKS, training
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_pre_hook
from workloads import workload

from stayfinite.clip import clip_gradients
from stayfinite.detect.finite import known_norm, surely_finite
from stayfinite.prevent.clipping import AdaptiveClipper
from stayfinite.training import gradients_of

MODES = ("robust", "percentile", "zscore", "per_unit", "per_tensor")
MOST_CLIPPED = 0.5  # percent of the steps of a clean training, by default
STEPS = {"mlp": 1, "cnn": 5, "gpt": 2}  # a training of the CNN has a fifth of the steps

Contestants = dict[str, Callable[[], Any]]
Row = dict[str, Any]


def contestants(model: nn.Module) -> Contestants:
    params = list(model.parameters())
    return {
        "clip_grad_norm_": lambda: clip_grad_norm_(params, 1e9).item(),
        "clip_gradients": lambda: clip_gradients(params, 1e9),
        "clip_grad_norm_, clipping": lambda: clip_grad_norm_(params, 1e-3).item(),
        "clip_gradients, clipping": lambda: clip_gradients(params, 1e-3),
        **{mode: AdaptiveClipper(params, mode).clip for mode in MODES},
    }


def timings(entries: Contestants, model: nn.Module, rounds: int) -> dict[str, list[float]]:
    """Microseconds for each in every round, after two rounds of warm-up."""
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    times: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(rounds + 2):
        for name, clip in entries.items():
            put_back(model, gradients)
            start = time.perf_counter()
            clip()
            if number > 1:
                times[name].append((time.perf_counter() - start) * 1e6)
    return times


def put_back(model: nn.Module, gradients: list[Tensor]) -> None:
    with torch.no_grad():
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            assert param.grad is not None
            param.grad.copy_(gradient)


def ratio(times: list[float], to: list[float]) -> float:
    """The median over rounds, so that a busy machine slows both sides."""
    return statistics.median(a / b for a, b in zip(times, to, strict=True))


def costs(name: str, rounds: int) -> list[Row]:
    work = workload(name)
    work.loss().backward()
    times = timings(contestants(work.model), work.model, rounds)
    return [
        {
            "workload": name,
            "contestant": contestant,
            "microseconds": statistics.median(own),
            "ratio": ratio(own, times[reference_of(contestant)]),
        }
        for contestant, own in times.items()
    ]


def reference_of(contestant: str) -> str:
    clips = contestant.endswith(", clipping")
    return "clip_grad_norm_, clipping" if clips else "clip_grad_norm_"


def checks(name: str, rounds: int) -> Row:
    """What the check before the update costs after a clip: by the shared norm, and by a scan."""
    work = workload(name)
    work.loss().backward()
    gradients = gradients_of(work.optimizer)
    handle = register_optimizer_step_pre_hook(lambda *_: None)  # someone watches
    shared, scanned = [], []
    for _ in range(rounds):
        clip_gradients(work.model, 1e9)
        start = time.perf_counter()
        is_known = known_norm(gradients) is not None
        between = time.perf_counter()
        surely_finite(gradients, of=work.optimizer)
        scanned.append((time.perf_counter() - between) * 1e6)
        shared.append((between - start) * 1e6)
    handle.remove()
    return {
        "workload": name,
        "is_shared": is_known,
        "check": statistics.median(shared) if is_known else statistics.median(scanned),
        "check_without": statistics.median(scanned),
    }


class Counting:
    """A clipper that counts the steps in which it clipped."""

    def __init__(self, clipper: AdaptiveClipper) -> None:
        self._clipper, self.clipped = clipper, 0

    def __call__(self) -> None:
        self.clipped += self._clipper.clip().was_clipped


def clipped_share(task: str, optimizer: str, mode: str, steps: int, seeds: int) -> float:
    """Percent of the steps in which the mode clipped."""
    count = 0
    for seed in range(seeds):
        run = training(task, optimizer, seed=seed)
        clipper = Counting(AdaptiveClipper(run.model, mode))
        for _ in range(steps):
            run.step(clipper)
        count += clipper.clipped
    return 100 * count / (steps * seeds)


def clean(steps: int, seeds: int) -> list[Row]:
    return [
        {
            "training": f"{task}, {optimizer}",
            "steps": steps // STEPS[task] * seeds,
            **{
                mode: clipped_share(task, optimizer, mode, steps // STEPS[task], seeds)
                for mode in MODES
            },
        }
        for task in TASKS
        for optimizer in OPTIMIZERS
    ]


def cost_table(rows: list[Row]) -> Table:
    shown = Table(title="one clip, 1 thread")
    for column in ("workload", "contestant", "us", "x clip_grad_norm_"):
        shown.add_column(
            column, justify="left" if column in ("workload", "contestant") else "right"
        )
    for row in rows:
        shown.add_row(
            row["workload"],
            row["contestant"],
            f"{row['microseconds']:.0f}",
            f"{row['ratio']:.2f}",
            end_section=row["contestant"] == MODES[-1],
        )
    return shown


def check_table(rows: list[Row]) -> Table:
    shown = Table(title="a guard's check after the clip")
    for column in ("workload", "shares the norm", "us", "us without"):
        shown.add_column(column, justify="left" if column == "workload" else "right")
    for row in rows:
        shared = "yes" if row["is_shared"] else "no: small, read again"
        shown.add_row(row["workload"], shared, f"{row['check']:.0f}", f"{row['check_without']:.0f}")
    return shown


def clean_table(rows: list[Row]) -> Table:
    shown = Table(title="steps of clean training that were clipped, percent")
    for column in ("training", "steps", *MODES):
        shown.add_column(column, justify="left" if column == "training" else "right")
    for row in rows:
        shown.add_row(row["training"], str(row["steps"]), *(f"{row[m]:.2f}" for m in MODES))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1000, help="of the MLP; others have fewer")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "costs": [row for name in TASKS for row in costs(name, options.rounds)],
        "checks": [checks(name, options.rounds) for name in TASKS],
        "clean": clean(options.steps, options.seeds),
    }
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for make, rows in zip((cost_table, check_table, clean_table), found.values(), strict=True):
            Console().print(make(rows))
    return 0 if all(row["robust"] <= MOST_CLIPPED for row in found["clean"]) else 1


if __name__ == "__main__":
    sys.exit(main())
