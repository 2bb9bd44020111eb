"""What `stayfinite run` adds to a whole short process that stays finite.

    python benchmarks/startup.py [--json FILE] [--rounds N] [--only imports sgd ...]

Plain python and `stayfinite run` take turns; figures are medians over the rounds, and what was
added is the median of the differences within a round. Processor time is that of all threads and
children. The first round is not counted: it fills the file cache and compiles everything to byte
code, which an installation has already, in a folder that is thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case_runs import SOURCE
from rich.console import Console
from rich.table import Table

BAR = 0.3  # seconds, of the clock and of the processor
IMPORTS = "import torch\n"
SGD = """
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(32, 8), torch.randn(32, 1)
for _ in range(20):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
ADAMW = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
for _ in range(2):
    for x, y in DataLoader(data, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
Taken = tuple[float, float]  # seconds of the clock, and of the processor


@dataclass(frozen=True, kw_only=True)
class Case:
    what: str
    source: str
    options: Sequence[str] = ()


CASES = {
    "imports": Case(what="import torch", source=IMPORTS),
    "sgd": Case(what="Linear, SGD, 20 steps", source=SGD),
    "sgd-recover": Case(
        what="the same, --on-nan recover", source=SGD, options=("--on-nan", "recover")
    ),
    "sgd-no-record": Case(what="the same, --no-record", source=SGD, options=("--no-record",)),
    "adamw": Case(what="DataLoader, AdamW, 40 steps", source=ADAMW),
}


def seconds(command: list[str], folder: str) -> Taken:
    env = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return clock, used


def measure(case: Case, folder: str, rounds: int) -> dict[str, float]:
    """Medians in seconds of whole processes."""
    plain: list[Taken] = []
    watched: list[Taken] = []
    script = str(Path(folder, "script.py"))
    Path(script).write_text(case.source)
    run = [sys.executable, "-m", "stayfinite", "run", *case.options, script]
    for _ in range(rounds + 1):
        plain.append(seconds([sys.executable, script], folder))
        watched.append(seconds(run, folder))
    found: dict[str, float] = {}
    for number, name in enumerate(("clock", "processor")):
        pairs = [(p[number], w[number]) for p, w in zip(plain[1:], watched[1:], strict=True)]
        found[f"plain_{name}"] = statistics.median(p for p, _ in pairs)
        found[f"added_{name}"] = statistics.median(w - p for p, w in pairs)
    return found


def table(results: dict[str, dict[str, float]]) -> Table:
    shown = Table(title=f"added to a healthy run, in seconds (bar {BAR})")
    shown.add_column("script")
    for name in ("plain", "added", "plain, cpu", "added, cpu"):
        shown.add_column(name, justify="right")
    for key, row in results.items():
        shown.add_row(
            CASES[key].what,
            f"{row['plain_clock']:.2f}",
            f"{row['added_clock']:+.2f}",
            f"{row['plain_processor']:.2f}",
            f"{row['added_processor']:+.2f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: measure(CASES[name], folder, options.rounds) for name in options.only}
    Console(width=None if sys.stdout.isatty() else 80).print(table(results))
    if options.json:
        data: dict[str, Any] = {"rounds": options.rounds, "bar": BAR, "scripts": results}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
