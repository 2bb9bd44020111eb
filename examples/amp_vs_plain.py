"""A network that float16 cannot train, with plain torch and with AMPTrainer, side by side.

python examples/amp_vs_plain.py

It learns prices of houses, in the plain unit that they come in. Above 65504 a price does not fit
into float16: what the last layer gives out becomes Inf, and so does the loss.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from stayfinite.amp.config import AMPConfig, NaNDetectionConfig
from stayfinite.amp.trainer import AMPTrainer
from stayfinite.recover.config import RecoveryConfig

SEEDS = (0, 1, 2)
UPDATES = 500
UNIT = 100_000.0

Plain = Literal["fp32", "fp16", "fp16 and GradScaler"]


def houses(count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Area, rooms, age and distance, each from 0 to 1; prices from about 10,000 to 190,000."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 4, generator=generator)
    area, rooms, age, distance = x.unbind(1)
    near = torch.exp(-3 * distance)
    price = 20_000 + 90_000 * area + 30_000 * rooms * area + 40_000 * near - 15_000 * age
    noise = torch.randn(count, generator=generator)
    return x, (price * (1 + 0.05 * noise))[:, None]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def loss_fn(predicted: Tensor, price: Tensor) -> Tensor:
    return nn.functional.mse_loss(predicted.float() / UNIT, price / UNIT)


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = houses(4096, seed=1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(UPDATES):
        chosen = torch.randint(0, len(x), (64,), generator=generator)
        yield x[chosen], y[chosen]


@torch.no_grad()
def error_of(model: nn.Module) -> float:
    """Root mean square error on houses that were not trained on, computed in float32."""
    x, y = houses(2048, seed=2)
    return (model(x) - y).square().mean().sqrt().item()


def plain_run(seed: int, kind: Plain) -> tuple[float, str]:
    """The usual loop; its error, and a word on how it went."""
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "fp16 and GradScaler")
    first_bad = None
    for number, (x, y) in enumerate(batches(seed)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=kind != "fp32"):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if first_bad is None and not math.isfinite(loss.item()):
            first_bad = number
    said = "" if first_bad is None else f"loss not finite from step {first_bad}"
    said += f", loss scale {scaler.get_scale():g} at the end" if scaler.is_enabled() else ""
    return error_of(model), said


def our_run(seed: int) -> tuple[float, str]:
    """The same in AMPTrainer: what overflows is found, and from then on runs in float32."""
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    recovery = RecoveryConfig(primary_strategy="raise_precision")
    config = AMPConfig(precision="fp16", nan_detection=NaNDetectionConfig(recovery=recovery))
    with AMPTrainer(config, model, optimizer, loss_fn) as trainer:
        for batch in batches(seed):
            trainer.training_step(batch)
        said = [f"step {each.step}: {each.outcome.detail}" for each in trainer.incidents]
        return error_of(model), "; ".join(said)


def main() -> None:
    torch.set_num_threads(1)  # faster for a network this small
    logging.getLogger("stayfinite").setLevel(logging.ERROR)
    kinds: tuple[Plain, ...] = ("fp32", "fp16", "fp16 and GradScaler")
    runs = {f"plain torch, {kind}": [plain_run(seed, kind) for seed in SEEDS] for kind in kinds}
    runs["AMPTrainer, fp16"] = [our_run(seed) for seed in SEEDS]
    print(f"Error of the predicted price after {UPDATES} updates, for {len(SEEDS)} seeds:\n")
    for name, results in runs.items():
        print(f"{name:32}" + "".join(f"{error:>10,.0f}" for error, _ in results))
    print()
    for name, results in runs.items():
        print(f"{name}, seed {SEEDS[0]}: {results[0][1] or 'nothing to report'}")
    ours, fp32 = (
        [error for error, _ in runs[name]] for name in ("AMPTrainer, fp16", "plain torch, fp32")
    )
    apart = statistics.mean(ours) - statistics.mean(fp32)
    spread = statistics.stdev(fp32)
    print(f"\nAMPTrainer in fp16 is {apart:+.1f} from fp32; seeds alone differ by {spread:.1f}.")


if __name__ == "__main__":
    main()
