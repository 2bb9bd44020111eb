"""How real bugs end under `stayfinite run --on-nan recover`: finite, and useful?

    python benchmarks/recovery.py [--json] [FOLDER ...]

Each script runs as it is. "Finite" is looked at from outside: every parameter of every optimizer
of the script's main process, after its last line. "Useful": the script came to its own end, and
after the first incident at least half of the attempted updates were made. The others have to
stop with a reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case_runs import CASES, SOURCE, Case, Finished, cases_in, run_python
from rich.console import Console
from rich.table import Table

# Keeps every optimizer alive and looks at its parameters when the run is over.
LOOK = """
import json, sys
from stayfinite.runner.imports import after_import
from stayfinite.cli import main

kept = []

def keep(torch):
    from torch.optim import Optimizer
    original = Optimizer.__init__
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        kept.append(self)
    Optimizer.__init__ = init

after_import("torch", keep)
out, *rest = sys.argv[1:]
try:
    main(rest)
finally:
    values = [p for o in kept for group in o.param_groups for p in group["params"]]
    bad = sum(not bool(value.isfinite().all()) for value in values)
    with open(out, "w") as file:
        json.dump({"parameters": len(values), "bad": bad}, file)
"""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """How one script ended."""

    name: str
    code: int | None
    parameters: int
    bad: int
    steps: int
    first: int | None
    strategies: dict[str, int]
    last_words: str

    @property
    def is_finite(self) -> bool:
        return self.bad == 0

    @property
    def is_useful(self) -> bool:
        """At least half of the updates after the first incident were made."""
        left_out = sum(n for strategy, n in self.strategies.items() if strategy != "clip")
        attempted = self.steps - (self.first or 0)
        return self.code == 0 and attempted > 0 and left_out <= attempted / 2

    @property
    def gave_up(self) -> bool:
        return self.code == 3 and "gave up" in self.last_words


def recover(case: Case, *, timeout: float = 300) -> Recovered:
    """Run the case's script as a user would, and look at its weights afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "weights.json"
        words = ("run", "--on-nan", "recover", "--second-run", "never", "--prove", "0", "--json")
        finished = run_python(
            ("-c", LOOK, str(out), *words),
            case.folder / "train.py",
            env={"PYTHONPATH": SOURCE},
            timeout=timeout,
        )
        weights = json.loads(out.read_text()) if out.exists() else {"parameters": 0, "bad": -1}
    return _judged(case, finished, weights)


def _judged(case: Case, finished: Finished, weights: dict[str, int]) -> Recovered:
    said = [line for line in finished.err.splitlines() if line.startswith("stayfinite:")]
    return Recovered(
        name=case.name,
        code=finished.code,
        parameters=weights["parameters"],
        bad=weights["bad"],
        steps=finished.result["steps"] if finished.result else 0,
        first=min((i["step"] for i in finished.incidents), default=None),
        strategies=dict(Counter(i["outcome"]["strategy"] for i in finished.incidents)),
        last_words=said[-1] if said else finished.err[-200:],
    )


def table(results: list[Recovered]) -> Table:
    shown = Table(title="stayfinite run --on-nan recover")
    for heading in ("script", "finite", "useful", "steps", "first", "done", "last words"):
        shown.add_column(heading)
    for each in results:
        done = ", ".join(f"{strategy} {times}" for strategy, times in each.strategies.items())
        shown.add_row(
            each.name,
            "yes" if each.is_finite else f"NO ({each.bad} of {each.parameters})",
            "yes" if each.is_useful else "stopped" if each.gave_up else f"no, exit {each.code}",
            str(each.steps),
            str(each.first),
            done,
            each.last_words.removeprefix("stayfinite: ")[:80],
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("folders", nargs="*", type=Path, default=[CASES])
    options = parser.parse_args()
    results = [recover(case) for case in cases_in(options.folders) if not case.is_benign]
    if options.json:
        facts: list[dict[str, Any]] = [
            {**vars(r), "finite": r.is_finite, "useful": r.is_useful} for r in results
        ]
        json.dump(facts, sys.stdout)
        return
    Console(width=160).print(table(results))
    finite, useful = sum(r.is_finite for r in results), sum(r.is_useful for r in results)
    print(f"finite {finite} of {len(results)}, useful {useful} of {len(results)}")


if __name__ == "__main__":
    main()
