"""Steps that a long run on many ranks loses, with and without recovery: a simulation.

    python benchmarks/scale.py [--json] [--ranks N] [--days D] [--runs N] [--seed N]

Nothing is trained. Interruptions come at random moments at the rates that were published for Llama
3 405B (arXiv 2407.21783, section 3.3.4): 419 unplanned ones in 54 days on 16,384 GPUs, 6 of them
silent data corruption; the rate is per rank. What is assumed is in `Assumed`, and none of it was
published: change it there. Two kinds of faults are numerical: the part of the corruptions that
makes a value NaN or Inf, and bad batches. Three ways to meet them:

    nothing    nobody looks: it is noticed by a person, and checkpoints saved since are bad
    stop       a check of the loss ends the job, which goes on from its last checkpoint
    recover    all ranks leave the update out, and go on

All other interruptions end the job in each of the three, so they are counted once, for scale.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

PUBLISHED = {"days": 54, "ranks": 16_384, "interruptions": 419, "corruptions": 6}
WAYS = ("nothing", "stop", "recover")


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What was not published."""

    step_seconds: float = 10.0
    checkpoint_every: int = 180  # steps: half an hour
    restart_steps: int = 60  # ten minutes until the job trains again
    notice_steps: int = 720  # two hours until a person sees the NaN
    skipped_steps: int = 2  # the update that is left out, and its replay
    nonfinite_share: float = 0.5  # of the corruptions; the others stay finite, and nobody sees them
    bad_batches_per_week: float = 1.0
    word_seconds: float = 1e-3  # the all-reduce of 20 bytes, in each update


def simulated(ranks: int, days: float, runs: int, seed: int, assumed: Assumed) -> dict[str, Any]:
    """Steps lost in each way, as mean and as the 5th and 95th percentile over the runs."""
    random = np.random.default_rng(seed)
    rank_days = PUBLISHED["days"] * PUBLISHED["ranks"]
    share = ranks * days / rank_days
    others = random.poisson((PUBLISHED["interruptions"] - PUBLISHED["corruptions"]) * share, runs)
    flips = random.poisson(PUBLISHED["corruptions"] * assumed.nonfinite_share * share, runs)
    batches = random.poisson(assumed.bad_batches_per_week * days / 7, runs)
    lost = {way: np.zeros(runs) for way in (*WAYS, "other interruptions")}
    for run in range(runs):
        since = random.uniform(0, assumed.checkpoint_every, int(others[run]))
        lost["other interruptions"][run] = np.sum(since + assumed.restart_steps)
        since = random.uniform(0, assumed.checkpoint_every, int(flips[run] + batches[run]))
        noticed = random.exponential(assumed.notice_steps, len(since))
        lost["nothing"][run] = np.sum(since + noticed + assumed.restart_steps)
        lost["stop"][run] = np.sum(since + assumed.restart_steps)
        lost["recover"][run] = len(since) * assumed.skipped_steps
    steps = days * 86_400 / assumed.step_seconds
    lost["recover"] += steps * assumed.word_seconds / assumed.step_seconds
    return {
        "steps": round(steps),
        "numerical faults": float(np.mean(flips + batches)),
        "other interruptions": float(np.mean(others)),
        "lost": {
            name: {
                "mean": float(np.mean(found)),
                "low": float(np.percentile(found, 5)),
                "high": float(np.percentile(found, 95)),
            }
            for name, found in lost.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--days", type=float, default=54)
    parser.add_argument("--runs", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    assumed = Assumed()
    found = simulated(options.ranks, options.days, options.runs, options.seed, assumed)
    if options.json:
        print(json.dumps({"assumed": asdict(assumed), **found}))
        return
    console = Console(width=100)
    console.print(
        f"{options.ranks:,} ranks, {options.days:g} days, {found['steps']:,} steps; on average "
        f"{found['numerical faults']:.1f} numerical faults and "
        f"{found['other interruptions']:.0f} other interruptions."
    )
    table = Table("steps lost to", "way", "mean", "5%", "95%", "of all steps")
    for name, lost in found["lost"].items():
        is_way = name in WAYS
        table.add_row(
            "numerical faults" if is_way else name,
            name if is_way else "each",
            *(f"{lost[key]:,.0f}" for key in ("mean", "low", "high")),
            f"{100 * lost['mean'] / found['steps']:.3f}%",
        )
    console.print(table)


if __name__ == "__main__":
    main()
