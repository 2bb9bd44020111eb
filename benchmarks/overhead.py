"""What checking all gradients at every step adds to a step, beside what people use today.

    python benchmarks/overhead.py [--json] [--rounds N] [--threads N] [--only gpt cnn mlp]

Two ways, in one run: the hooks are timed directly, inside the steps that they sit in; and all
contestants take turns, each round one block of steps, so that a slow moment hits all of them.
The first is exact enough for bars below a percent; the second shows that nothing is hidden.
Host reads are counted with a dispatch mode, not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from overhead_peers import debug_underflow_overflow, lightning_anomaly
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import Workload, workload

from stayfinite.detect.hooks import StepListener, watch_steps
from stayfinite.training import gradients_of

BARS = {"gpt": 0.5, "cnn": 0.5, "mlp": 3.0}
BLOCKS = {"gpt": 1, "cnn": 2, "mlp": 50}
BASE = "nothing"
OURS = "stayfinite"


class Watching(StepListener):
    """The default: look at everything, at every step."""


Check = Callable[[], Any] | None


@contextlib.contextmanager
def ours(work: Workload) -> Iterator[Check]:
    with watch_steps(Watching(), optimizer=work.optimizer):
        yield None


@contextlib.contextmanager
def naive(work: Workload) -> Iterator[Check]:
    def check() -> None:
        for param in work.model.parameters():
            grad = param.grad
            if grad is not None and (torch.isnan(grad).any() or torch.isinf(grad).any()):
                raise FloatingPointError

    yield check


@contextlib.contextmanager
def clip(work: Workload) -> Iterator[Check]:
    params = list(work.model.parameters())
    yield lambda: nn.utils.clip_grad_norm_(params, 1e9, error_if_nonfinite=True)


@contextlib.contextmanager
def anomaly(work: Workload) -> Iterator[Check]:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield None


CONTESTANTS: dict[str, Callable[[Workload], Any]] = {
    BASE: lambda work: contextlib.nullcontext(),
    OURS: ours,
    "isnan/isinf loop": naive,
    "clip_grad_norm_(error_if_nonfinite=True)": clip,
    "torch.autograd.detect_anomaly": anomaly,
}
TRANSFORMERS = "transformers DebugUnderflowOverflow"
LIGHTNING = "Lightning detect_anomaly, against its own Trainer"


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def installed() -> tuple[dict[str, Callable[[Workload], Any]], dict[str, str]]:
    """The contestants that can run here, and what to type for the others."""
    present, missing = dict(CONTESTANTS), {}
    if is_installed("transformers"):
        present[TRANSFORMERS] = debug_underflow_overflow
    else:
        missing[TRANSFORMERS] = "pip install transformers"
    if not is_installed("lightning"):
        missing[LIGHTNING] = "pip install lightning"
    return present, missing


def seconds(work: Workload, contestant: Callable[[Workload], Any], steps: int) -> float:
    """Per step, without what attaching costs."""
    with contestant(work) as check:
        work.step(check)
        start = time.perf_counter()
        for _ in range(steps):
            work.step(check)
        return (time.perf_counter() - start) / steps


@dataclass
class Stopwatch:
    """Time spent inside the functions that it wrapped."""

    total: float = 0.0
    calls: int = 0

    def wrap(self, hooks: Any) -> None:
        for key, hook in hooks.items():
            hooks[key] = self._timed(hook)

    def wrap_methods(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return hook(*args)
            finally:
                self.total += time.perf_counter() - start
                self.calls += 1

        return timed


def direct(work: Workload, steps: int) -> tuple[float, float]:
    """Medians over steps: what the hooks take, and what the rest of their step takes.

    What the stopwatch itself takes, measured by an empty hook in the same steps, is not counted.
    """
    inside, rest = [], []
    watch, idle = Stopwatch(), Stopwatch()
    with watch_steps(Watching(), optimizer=work.optimizer):
        work.step()
        watch.wrap(torch_optimizer._global_optimizer_pre_hooks)
        watch.wrap(work.optimizer._optimizer_step_post_hooks)
        nothing: dict[int, Any] = {0: lambda *args: None}
        idle.wrap(nothing)
        handle = work.optimizer.register_step_post_hook(nothing[0])
        for _ in range(steps):
            watch.total, idle.total, start = 0.0, 0.0, time.perf_counter()
            work.step()
            taken = time.perf_counter() - start
            inside.append(watch.total - 2 * idle.total)
            rest.append(taken - watch.total - idle.total)
        handle.remove()
    return statistics.median(inside), statistics.median(rest)


def paid_back(work: Workload, steps: int) -> float:
    """How much sooner an update ends whose gradients were fetched before it.

    Somebody must make Python objects of gradients that come out of a backward pass: our hook,
    or else the optimizer. Steps of both kinds take turns.
    """
    fetched, untouched = [], []
    for kind in (fetched, untouched) * steps:
        work.optimizer.zero_grad()
        work.loss().backward()
        if kind is fetched:
            gradients_of(work.optimizer)
        start = time.perf_counter()
        work.optimizer.step()
        kind.append(time.perf_counter() - start)
    return statistics.median(untouched) - statistics.median(fetched)


aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default}


class HostReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def host_reads(*, fused: bool) -> dict[str, float]:
    """Added in one step; with a fused optimizer the flag is read by the step after it."""
    work = workload("mlp", fused=fused)
    work.step()
    with HostReads() as plain:
        work.step()
    with watch_steps(Watching()) as attachment:
        with HostReads() as watched:
            work.step()
        with HostReads() as late:
            attachment.flush()
    return {"in the judged step": watched.count - plain.count, "later": late.count}


def measure(name: str, rounds: int, contestants: dict[str, Any]) -> dict[str, Any]:
    work = workload(name)
    for _ in range(3):
        work.step()
    times: dict[str, list[float]] = {key: [] for key in contestants}
    order = list(contestants)
    for _ in range(rounds):
        for key in order:
            times[key].append(seconds(work, contestants[key], BLOCKS[name]))
        order.append(order.pop(0))
    ratios = {
        key: statistics.median(a / b for a, b in zip(taken, times[BASE], strict=True)) - 1
        for key, taken in times.items()
    }
    if is_installed("lightning"):
        steps = max(5, BLOCKS[name])
        ratios[LIGHTNING] = lightning_anomaly(work, rounds=max(1, rounds // 5), steps=steps)
    hooks, step = direct(work, max(20, rounds * BLOCKS[name]))
    # It drowns in the noise of longer steps, and does not matter there.
    back = paid_back(work, 2000) if name == "mlp" else 0.0
    return {
        "direct_percent": 100 * (hooks - back) / step,
        "bar_percent": BARS[name],
        "hooks_us": 1e6 * hooks,
        "paid_back_us": 1e6 * back,
        "step_us": 1e6 * step,
        "interleaved_percent": {key: 100 * r for key, r in ratios.items() if key != BASE},
    }


def table(results: dict[str, Any]) -> Table:
    shown = Table(title="added to a step: all gradients checked at every step")
    shown.add_column("")
    for name in results:
        shown.add_column(name, justify="right")
    shown.add_row("step without us, us", *(f"{r['step_us']:,.0f}" for r in results.values()))
    shown.add_row("our hooks, us", *(f"{r['hooks_us']:.1f}" for r in results.values()))
    shown.add_row("less in the update, us", *(f"{r['paid_back_us']:.1f}" for r in results.values()))
    shown.add_row(
        "stayfinite, directly", *(f"{r['direct_percent']:.2f}%" for r in results.values())
    )
    shown.add_row("its bar", *(f"{r['bar_percent']}%" for r in results.values()))
    shown.add_section()
    first = next(iter(results.values()))
    for key in first["interleaved_percent"]:
        cells = [f"{r['interleaved_percent'][key]:+.1f}%" for r in results.values()]
        shown.add_row(key, *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", choices=list(BARS), default=list(BARS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contestants, missing = installed()
    results = {name: measure(name, options.rounds, contestants) for name in options.only}
    reads = {"plain": host_reads(fused=False), "fused": host_reads(fused=True)}
    if options.json:
        json.dump({"overhead": results, "host_reads": reads, "missing": missing}, sys.stdout)
        return
    Console().print(table(results))
    for key, remedy in missing.items():
        Console().print(f"{key}: {remedy}")
    for kind, counts in reads.items():
        said = ", ".join(f"{count} {when}" for when, count in counts.items())
        Console().print(f"host reads added per step, {kind} optimizer: {said}")


if __name__ == "__main__":
    main()
