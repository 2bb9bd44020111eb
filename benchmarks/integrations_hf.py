"""What our callbacks for transformers, Accelerate and Ignite add to a step of a small GPT.

    python benchmarks/integrations_hf.py [--json] [--rounds N] [--steps N] [--only transformers ...]

Ours is timed directly: all that is done inside the steps, snapshots included, against the rest of
the same steps. The debuggers that come with the frameworks are timed from outside, one after
the other in the same rounds: a run with them against a run without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from guarded import ENTRIES, Clock
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from stayfinite.integrations import clipping
from stayfinite.integrations.calls import RecordedCalls

BAR = 1.0
WARM = 5
Run = Callable[[int, bool], float]
"""Trains so many steps, with us or without; the seconds for those after the first few."""


def tokens(count: int) -> torch.Tensor:
    return torch.randint(1024, (count, 128), generator=torch.Generator().manual_seed(1))


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 1024, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


class Timer:
    """The time from the step after the first few to the last one."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._steps, self.start = clock, 0, 0.0

    def stepped(self, *_: Any) -> None:
        self._steps += 1
        if self._steps == WARM:
            self._clock.total, self.start = 0.0, time.perf_counter()


def with_transformers(clock: Clock, *, debug: str = "") -> Run:
    from transformers import Trainer, TrainingArguments

    from stayfinite.integrations.transformers import StayFiniteCallback

    def run(steps: int, is_watched: bool) -> float:
        texts = [{"input_ids": x, "labels": x} for x in tokens(8 * (steps + WARM))]
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder,
                per_device_train_batch_size=8,
                max_steps=steps + WARM,
                logging_steps=50,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                debug=debug,
            )
            model = gpt()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            timer = Timer(clock)
            optimizer.register_step_post_hook(timer.stepped)
            given = [StayFiniteCallback(sinks=[])] if is_watched else []
            schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
            optimizers = optimizer, schedule
            trainer = Trainer(
                model, args, train_dataset=texts, callbacks=given, optimizers=optimizers
            )
            with contextlib.redirect_stdout(None):
                trainer.train()
            return time.perf_counter() - timer.start

    return run


def with_accelerate(clock: Clock) -> Run:
    from accelerate import Accelerator

    from stayfinite.integrations.accelerate import watch

    def run(steps: int, is_watched: bool) -> float:
        accelerator, model = Accelerator(cpu=True), gpt()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer = accelerator.prepare(model, inner)
        timer = Timer(clock)
        inner.register_step_post_hook(timer.stepped)
        guard: Any = contextlib.nullcontext()
        if is_watched:
            guard = watch(accelerator, model, optimizer, sinks=[])
        with guard:
            for batch in tokens(8 * (steps + WARM)).split(8):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return time.perf_counter() - timer.start

    return run


def with_ignite(clock: Clock) -> Run:
    from ignite.engine import create_supervised_trainer

    from stayfinite.integrations.ignite import StayFinite

    def loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    def run(steps: int, is_watched: bool) -> float:
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        timer = Timer(clock)
        optimizer.register_step_post_hook(timer.stepped)
        trainer = create_supervised_trainer(
            model, optimizer, loss, model_transform=lambda output: output.logits
        )
        if is_watched:
            StayFinite(model, optimizer, sinks=[]).attach(trainer)
        batches = tokens(8 * (steps + WARM)).split(8)
        trainer.run([(batch, batch) for batch in batches])
        return time.perf_counter() - timer.start

    return run


FRAMEWORKS: dict[str, Callable[[Clock], Run]] = {
    "transformers": with_transformers,
    "accelerate": with_accelerate,
    "ignite": with_ignite,
}


def entries(framework: str) -> list[tuple[Any, str]]:
    """All of ours that runs in a healthy step."""
    found: list[tuple[Any, str]] = [
        *ENTRIES,
        (clipping, "_would_spread"),
        (RecordedCalls, "_enter"),
    ]
    if framework == "transformers":
        from stayfinite.integrations.transformers_trainer import Losses, WatchedTrainer

        found += [(WatchedTrainer, "_begin"), (WatchedTrainer, "step_ended"), (Losses, "saw")]
    if framework == "ignite":
        from stayfinite.integrations import ignite

        found += [(ignite._Steps, "_told"), (ignite._Steps, "iteration_ended")]
    return found


@contextlib.contextmanager
def measured(framework: str, clock: Clock) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name in entries(framework)]
    for owner, name, method in originals:
        setattr(owner, name, clock.timed(method))
    try:
        yield
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


def ours(framework: str, rounds: int, steps: int) -> tuple[float, float]:
    """(microseconds of ours for each step, percent of the rest of the step)."""
    clock = Clock()
    run = FRAMEWORKS[framework](clock)
    found = []
    for _ in range(rounds):
        with measured(framework, clock):
            taken = run(steps, True)
        found.append((1e6 * clock.total / steps, 100 * clock.total / (taken - clock.total)))
    return statistics.median(us for us, _ in found), statistics.median(p for _, p in found)


def theirs(framework: str, rounds: int, steps: int) -> dict[str, float]:
    """Percent that the framework's own debuggers add."""
    clock = Clock()
    run = FRAMEWORKS[framework](clock)
    ways: dict[str, Callable[[], float]] = {"detect_anomaly": lambda: anomaly(run, steps)}
    if framework == "transformers":
        debugged = with_transformers(clock, debug="underflow_overflow")
        ways["underflow_overflow"] = lambda: debugged(steps, False)
    added: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        plain = run(steps, False)
        for name, way in ways.items():
            added[name].append(100 * (way() / plain - 1))
    return {name: statistics.median(each) for name, each in added.items()}


def anomaly(run: Run, steps: int) -> float:
    with torch.autograd.detect_anomaly():
        return run(steps, False)


def shown(results: dict[str, dict[str, float]]) -> Table:
    table = Table(title="in a healthy step of a small GPT")
    for heading in ("framework", "who", "us", "of a step", "bar"):
        table.add_column(heading, justify="right")
    for framework, row in results.items():
        of_a_step = f"{row['percent']:.2f}%"
        table.add_row(framework, "stayfinite", f"{row['us']:.0f}", of_a_step, f"{BAR:.0f}%")
        for name in ("detect_anomaly", "underflow_overflow"):
            if name in row:
                table.add_row("", name, "", f"{row[name]:.0f}%", "")
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
    results = {}
    for name in options.only:
        us, percent = ours(name, options.rounds, options.steps)
        results[name] = {"us": us, "percent": percent}
        results[name] |= theirs(name, 1, max(10, options.steps // 5))
    if options.json:
        json.dump(results, sys.stdout)
    else:
        Console().print(shown(results))


if __name__ == "__main__":
    main()
