"""What a traced step costs, beside torch's anomaly mode and TorchLens; and what watching costs.

    python benchmarks/trace.py [--json FILE] [--rounds N] [--threads N] [--only gpt cnn mlp]
                               [--cpu-time]

All contestants take turns, one block of steps each, so that a slow moment hits all of them;
figures are medians over the rounds of the ratio to a plain step in the same round. Watching
without tracing is timed directly too: our functions, inside the steps that they sit in; and so is
what is noted in each step so that it can be run again. What is done rarely does not show in a
median, so the sum over a run from its second step is given too.
On a machine with other work, --cpu-time --threads 1 counts what the processor did for us.
Memory is the highest sum of living tensor bytes that torch's profiler saw in one step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from overhead import Stopwatch
from rich.console import Console
from rich.table import Table
from scan import silent_stderr
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.profiler import ProfilerActivity, profile
from workloads import Workload, workload

from stayfinite.guard import Guard, GuardSettings

TRACED, WATCHED, PLAIN = "stayfinite, traced", "stayfinite, watching", "nothing"
TRACE_BARS = {"gpt": 1.35, "cnn": 1.4, "mlp": 8.0}
MARK_BARS = {"gpt": 0.2, "cnn": 0.3, "mlp": 5.0}
WATCH_BARS = {"gpt": 1.0, "cnn": 1.0}
BLOCKS = {"gpt": 1, "cnn": 2, "mlp": 30}
LIVES = {"gpt": 60, "cnn": 300, "mlp": 2000}
WARM_UP = 3
Step = Callable[[], Any]
Clock = Callable[[], float]


@contextlib.contextmanager
def plain(work: Workload) -> Iterator[Step]:
    yield work.step


@contextlib.contextmanager
def guarded(work: Workload, trace: Any, notes: Stopwatch | None = None) -> Iterator[Step]:
    guard = Guard(GuardSettings(trace=trace))
    if notes is not None:
        notes.wrap_methods(guard.past.moments, "entered", "updated", "before_backward", "passed")
    guard.attach()
    try:
        yield work.step
    finally:
        guard.close()
    if guard.incidents:
        raise RuntimeError(f"a healthy step was called bad: {guard.incidents[0]}")


@contextlib.contextmanager
def anomaly(work: Workload) -> Iterator[Step]:
    with torch.autograd.detect_anomaly():
        yield work.step


class WithLoss(nn.Module):
    """The whole forward pass as one module, which is what TorchLens takes."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.model, self.loss = work.model, work.loss

    def forward(self, zero: Tensor) -> Tensor:
        return self.loss() + zero


@contextlib.contextmanager
def lens(work: Workload) -> Iterator[Step]:
    """Forward under TorchLens, then an ordinary backward pass and update."""
    import torchlens
    from torchlens.backends.torch.wrappers import unwrap_torch

    whole, zero = WithLoss(work), torch.zeros(())

    def step() -> None:
        work.optimizer.zero_grad()
        trace = torchlens.trace(whole, zero)
        trace.ops[-1].out.backward()
        work.optimizer.step()

    try:
        yield step
    finally:
        unwrap_torch()


CONTESTANTS: dict[str, Callable[[Workload], Any]] = {
    PLAIN: plain,
    TRACED: lambda work: guarded(work, "start"),
    WATCHED: lambda work: guarded(work, "never"),
    "torch.autograd.detect_anomaly": anomaly,
}
if importlib.util.find_spec("torchlens"):
    CONTESTANTS["TorchLens (forward only)"] = lens


def seconds(
    work: Workload, contestant: Callable[[Workload], Any], steps: int, clock: Clock
) -> float:
    """A steady step: the median, after the first steps, which do things once."""
    taken = []
    with contestant(work) as step:
        for _ in range(WARM_UP):
            step()
        for _ in range(steps):
            start = clock()
            step()
            taken.append(clock() - start)
    return statistics.median(taken)


def taking_turns(work: Workload, rounds: int, clock: Clock) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {key: [] for key in CONTESTANTS}
    order = list(CONTESTANTS)
    for _ in range(rounds):
        for key in order:
            # One step of TorchLens may take as long as a block of ours.
            steps = 1 if "TorchLens" in key else BLOCKS[work.name]
            times[key].append(seconds(work, CONTESTANTS[key], steps, clock))
        order.append(order.pop(0))
    return times


class EngineWatch:
    """Time between the engine entry that torch calls and the one that was there before us."""

    def __init__(self) -> None:
        self.inside = self.around = 0.0

    def wrap(self, name: str) -> None:
        for owner in (graph, torch.autograd):
            owner._engine_run_backward = self._timed(owner._engine_run_backward, name)

    def _timed(self, run: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - start)

        return timed


@contextlib.contextmanager
def engine_as_before() -> Iterator[None]:
    before = graph._engine_run_backward, torch.autograd._engine_run_backward
    try:
        yield
    finally:
        graph._engine_run_backward, torch.autograd._engine_run_backward = before


def directly(work: Workload, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Of each step from the second on: what our functions take while watching, what of that is
    noting what a replay needs, and the rest.

    What a stopwatch itself takes, measured by an empty method in the same steps, is taken off the
    notes: they are a few microseconds in a short step.
    """
    engine, hooks, notes, idle = EngineWatch(), Stopwatch(), Stopwatch(), Stopwatch()
    ours, noted, rest = [], [], []
    with engine_as_before():
        engine.wrap("inside")
        with guarded(work, "never", notes) as step:
            step()  # it puts our hooks on the optimizer
            engine.wrap("around")
            hooks.wrap(torch_optimizer._global_optimizer_pre_hooks)
            hooks.wrap(torch_module._global_forward_pre_hooks)
            hooks.wrap(torch_module._global_forward_hooks)
            hooks.wrap(work.optimizer._optimizer_step_pre_hooks)
            hooks.wrap(work.optimizer._optimizer_step_post_hooks)
            nothing: dict[int, Any] = {0: lambda *args: None}
            idle.wrap(nothing)
            handle = work.optimizer.register_step_post_hook(nothing[0])
            for _ in range(steps):
                hooks.total = notes.total = idle.total = engine.inside = engine.around = 0.0
                notes.calls = 0
                start = time.perf_counter()
                step()
                taken = time.perf_counter() - start
                added = hooks.total + engine.around - engine.inside
                ours.append(added)
                noted.append(notes.total - notes.calls * idle.total)
                rest.append(taken - added)
            handle.remove()
    return ours, noted, rest


def memory(work: Workload, contestant: Callable[[Workload], Any]) -> tuple[int, int]:
    """Bytes: the most that one step had alive beyond its start, and what it left behind."""
    with contestant(work) as step:
        step()
        work.optimizer.zero_grad()
        cpu = [ProfilerActivity.CPU]
        with silent_stderr(), profile(activities=cpu, profile_memory=True) as seen:
            step()
            work.optimizer.zero_grad()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most, alive


def measure(
    name: str, watched: tuple[list[float], list[float], list[float]], rounds: int, clock: Clock
) -> dict[str, Any]:
    ours, noted, rest = watched
    work = workload(name)
    for _ in range(3):
        work.step()
    times = taking_turns(work, rounds, clock)
    ratios = {
        key: statistics.median(a / b for a, b in zip(taken, times[PLAIN], strict=True))
        for key, taken in times.items()
    }
    (most, left), (most_plain, left_plain) = (
        memory(work, CONTESTANTS[key]) for key in (TRACED, PLAIN)
    )
    return {
        "step_us": 1e6 * statistics.median(times[PLAIN]),
        "ratio": {key: ratio for key, ratio in ratios.items() if key != PLAIN},
        "trace_bar": TRACE_BARS[name],
        "watching_us": 1e6 * statistics.median(ours),
        "watching_percent": 100 * statistics.median(ours) / statistics.median(rest),
        "watching_life_percent": 100 * sum(ours) / sum(rest),
        "watching_longest_ms": 1e3 * max(ours),
        "marks_us": 1e6 * statistics.median(noted),
        "marks_percent": 100 * statistics.median(noted) / statistics.median(rest),
        "marks_bar_percent": MARK_BARS[name],
        "life_steps": LIVES[name],
        "watch_bar_percent": WATCH_BARS.get(name),
        "memory_mib": {"plain": most_plain / 2**20, "traced": most / 2**20},
        "left_behind_bytes": {"plain": left_plain, "traced": left},
    }


def table(results: dict[str, Any]) -> Table:
    shown = Table(title="a traced step, and a watched one, against a plain step")
    shown.add_column("")
    for name in results:
        shown.add_column(name, justify="right")
    rows = list(results.values())
    shown.add_row("plain step, us", *(f"{r['step_us']:,.0f}" for r in rows))
    for key in rows[0]["ratio"]:
        shown.add_row(key, *(f"{r['ratio'][key]:.2f}x" for r in rows))
        if key == TRACED:
            shown.add_row("  its bar", *(f"{r['trace_bar']}x" for r in rows))
    shown.add_row("watching, us", *(f"{r['watching_us']:.0f}" for r in rows))
    shown.add_row("  of a step", *(f"{r['watching_percent']:.2f}%" for r in rows))
    shown.add_row("  for a replay, us", *(f"{r['marks_us']:.0f}" for r in rows))
    shown.add_row("    of a step", *(f"{r['marks_percent']:.2f}%" for r in rows))
    shown.add_row("    its bar", *(f"{r['marks_bar_percent']}%" for r in rows))
    shown.add_row("  of so many steps", *(str(r["life_steps"]) for r in rows))
    shown.add_row("  from the second on", *(f"{r['watching_life_percent']:.2f}%" for r in rows))
    lives = [r["watch_bar_percent"] for r in rows]
    shown.add_row("  its bar", *("" if bar is None else f"{bar}%" for bar in lives))
    shown.add_row("  longest, ms", *(f"{r['watching_longest_ms']:.0f}" for r in rows))
    memories = [r["memory_mib"] for r in rows]
    shown.add_row("peak of tensors, plain", *(f"{m['plain']:.2f} MiB" for m in memories))
    shown.add_row("peak of tensors, traced", *(f"{m['traced']:.2f} MiB" for m in memories))
    left = (r["left_behind_bytes"] for r in rows)
    shown.add_row("left behind by a traced step", *(f"{x['traced'] - x['plain']} B" for x in left))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", choices=list(TRACE_BARS), default=list(TRACE_BARS))
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, not the clock's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    # Before anything is traced: a tracer leaves an audit hook, which Python cannot take back.
    watched = {name: directly(workload(name), LIVES[name]) for name in options.only}
    results = {name: measure(name, watched[name], options.rounds, clock) for name in options.only}
    Console().print(table(results))
    data: dict[str, Any] = {"threads": options.threads, "steps": results}
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
