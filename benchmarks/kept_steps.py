"""How many good steps are kept: rungs that follow the cause, beside plain skipping.

    python benchmarks/kept_steps.py [--json]

Each training runs twice, with the same seeds, in one loop that knows nothing of us. "Kept" are the
updates that are in the weights at the end: going back to a snapshot takes those since away.
"Useful": the weights are finite, and at least half of the updates after the first bad step were
made. Plain skipping leaves each bad update out, and does nothing else, however often.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import stayfinite
from stayfinite.detect.finite import all_finite
from stayfinite.errors import TrainingAbortedError
from stayfinite.recover.config import UNATTENDED, RecoveryConfig

PLAIN = RecoveryConfig(
    primary_strategy="skip", fallback_strategy="skip", max_consecutive_nans=10**6, quarantine=False
)
STEPS = 160
NAN = float("nan")
Loss = Callable[[nn.Module, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A small model, its batches, and the loss of a step by its number."""

    name: str
    loss: Loss
    bad_rows: tuple[int, ...] = ()
    rate: float = 0.01
    batch: int = 4
    model: Callable[[], nn.Module] = lambda: nn.Sequential(
        nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)
    )
    sets_rate: bool = False

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        torch.manual_seed(1)
        rows = STEPS // 4 * self.batch
        x = torch.randn(rows, 3)
        x[list(self.bad_rows), 1] = NAN
        data = TensorDataset(x, x.nan_to_num().sum(1, keepdim=True).sin())
        for _ in range(4):
            yield from DataLoader(data, batch_size=self.batch)


def plain_loss(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return mse_loss(model(x), y)


def singular(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    """A vector of length 0 in every fifth step."""
    scale = torch.ones(len(x), 1)
    scale[0] = 0.0 if step % 5 == 3 else 1.0
    return (model(x) * scale - y * scale).square().sum(1).sqrt().mean()


def overflowing(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    """Inputs that half precision cannot square, from step 40 on."""
    with torch.autocast("cpu", torch.float16):
        return mse_loss(model(x * (3e5 if step >= 40 else 1.0)).float(), y)


def missing(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    """A weight from outside of torch that is NaN for twelve steps in a row."""
    return mse_loss(model(x), y) * (NAN if 60 <= step < 72 else 1.0)


def without_gradient(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    """One parameter at 0 whose root has no gradient, in all steps from 40 on."""
    offset = model[2].bias
    return mse_loss(model(x), y) + (0.0 * offset).abs().sqrt().sum() * (step >= 40)


def large(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return (model(x).pow(4) - y).square().mean()


TRAININGS = (
    Training(name="bad samples in a row", loss=plain_loss, bad_rows=tuple(range(16, 28)), batch=1),
    Training(
        name="a third of the samples bad", loss=plain_loss, bad_rows=tuple(range(0, 40, 3)), batch=1
    ),
    Training(name="four bad samples", loss=plain_loss, bad_rows=(7, 50, 90, 130)),
    Training(name="singular values", loss=singular),
    Training(name="half precision overflows", loss=overflowing),
    Training(name="NaN from outside, 12 steps", loss=missing),
    Training(name="one gradient always NaN", loss=without_gradient),
    Training(name="learning rate too high", loss=large, rate=0.6),
    Training(name="too high, and set back", loss=large, rate=0.6, sets_rate=True),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one training ended."""

    training: str
    config: str
    kept: int
    first: int | None
    steps: int
    strategies: dict[str, int]
    is_finite: bool
    rate: float
    ended: str = ""

    @property
    def is_useful(self) -> bool:
        if self.first is None:
            return self.is_finite
        return self.is_finite and not self.ended and self.kept >= (self.first + self.steps) / 2


def outcome(training: Training, config: RecoveryConfig, name: str) -> Row:
    torch.manual_seed(0)
    model = training.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=training.rate)
    guard, ended = stayfinite.watch(model, optimizer, config=config, sinks=[]), ""
    try:
        with guard:
            for step, (x, y) in enumerate(training.batches()):
                if training.sets_rate:
                    optimizer.param_groups[0]["lr"] = training.rate
                optimizer.zero_grad()
                training.loss(model, x, y, step).backward()
                optimizer.step()
    except TrainingAbortedError as error:
        ended = str(error)
    (job,) = guard.jobs.values()
    done = [each.outcome.strategy for each in guard.incidents if each.outcome is not None]
    return Row(
        training=training.name,
        config=name,
        kept=job.good_steps,
        first=min((each.step for each in guard.incidents), default=None),
        steps=guard.steps,
        strategies=dict(Counter(done)),
        is_finite=all_finite(model.parameters()),
        rate=optimizer.param_groups[0]["lr"],
        ended=ended,
    )


def rows_of(training: Training) -> tuple[Row, Row]:
    """With plain skipping, and with rungs that follow the cause."""
    return outcome(training, PLAIN, "plain"), outcome(training, UNATTENDED, "by cause")


def table(pairs: Iterable[tuple[Row, Row]]) -> Table:
    shown = Table(title="good steps kept")
    for heading in ("training", "steps", "plain skipping", "by cause", "useful", "done"):
        shown.add_column(heading)
    for plain, ours in pairs:
        done = ", ".join(f"{strategy} {times}" for strategy, times in ours.strategies.items())
        useful = "yes" if ours.is_useful else "no"
        shown.add_row(
            plain.training, str(ours.steps), str(plain.kept), str(ours.kept), useful, done
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("stayfinite").setLevel(logging.CRITICAL)
    pairs = [rows_of(training) for training in TRAININGS]
    if options.json:
        facts: list[Any] = [[asdict(row) for row in pair] for pair in pairs]
        json.dump(facts, sys.stdout)
    else:
        Console(width=130).print(table(pairs))
        useful = sum(ours.is_useful for _, ours in pairs)
        fewer = sum(ours.kept < plain.kept for plain, ours in pairs)
        print(f"useful {useful} of {len(pairs)}; fewer than with plain skipping: {fewer}")
    return int(any(ours.kept < plain.kept for plain, ours in pairs))


if __name__ == "__main__":
    sys.exit(main())
