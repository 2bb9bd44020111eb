"""What a stable operation or loss costs beside the form that people write, and what each survives.

    python benchmarks/stable.py [--json] [--elements N] [--rounds N] [--only NAME...]

Cost: processor time of forward and backward, in float32, on everyday numbers, with one thread; both
forms take turns in every round, and a ratio is the median over the rounds.

Survived: how many of the edge inputs have a finite value and finite gradients, in float32, float16
and bfloat16. They are 0, subnormal, tiny, around 1, large and the largest numbers, of both signs;
all pairs of them for two operands, draws of a few for rows.

The last table trains a factorisation of counts in which some rates are exactly 0, with the log
that has a gradient of 1 / eps there and with ours that has none.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import stayfinite as sf

SHOWN = (0, 1, 20, 299)  # steps of the training
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Call = Callable[..., Tensor]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Duel:
    """Two ways to write the same, for rows of `row` numbers; a mask leaves some rows empty."""

    naive: Call
    ours: Call
    operands: int = 1
    row: int = 1
    has_mask: bool = False


def bce(logits: Tensor) -> Tensor:
    p, target = logits.sigmoid(), labels(logits)
    return -(target * p.log() + (1 - target) * (1 - p).log()).mean()


def focal(logits: Tensor) -> Tensor:
    p, target = logits.sigmoid(), labels(logits)
    true = target * (1 - p) ** 2 * p.log() * 0.25
    return -(true + (1 - target) * p**2 * (1 - p).log() * 0.75).mean()


def dice(logits: Tensor) -> Tensor:
    p, target = logits.sigmoid(), labels(logits)
    return (1 - (2 * (p * target).sum(-1) + 1) / (p.sum(-1) + target.sum(-1) + 1)).mean()


def dfl(logits: Tensor) -> Tensor:
    p, target = logits.softmax(-1), places(logits)
    left = target.long()
    pair = p.gather(-1, torch.stack([left, left + 1], -1)).log()
    weight = target - left
    return -(pair[:, 0] * (1 - weight) + pair[:, 1] * weight).mean()


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    return (p * (p / q).log()).sum(-1).mean()


def info_nce(queries: Tensor, keys: Tensor) -> Tensor:
    queries, keys = (each / each.norm(dim=-1, keepdim=True) for each in (queries, keys))
    scores = (queries @ keys.T / 0.07).exp()
    return -(scores.diagonal() / scores.sum(-1)).log().mean()


def masked_softmax(x: Tensor) -> Tensor:
    return x.masked_fill(~mask(x), -torch.inf).softmax(-1)


def masked_mean(x: Tensor) -> Tensor:
    return (x * mask(x)).sum(-1) / mask(x).sum(-1)


def overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    shared = (high - low).clamp_min(0).prod(-1)
    union = sum((box[:, 2:] - box[:, :2]).prod(-1) for box in (a, b)) - shared
    around = torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])
    return shared / union, union, around


def giou(a: Tensor, b: Tensor) -> Tensor:
    iou, union, around = overlap(a, b)
    area = around.prod(-1)
    return (1 - iou + (area - union) / area).mean()


def ciou(a: Tensor, b: Tensor) -> Tensor:
    iou, _, around = overlap(a, b)
    apart = (a[:, :2] + a[:, 2:] - b[:, :2] - b[:, 2:]) / 2
    sides = [box[:, 2:] - box[:, :2] for box in (a, b)]
    angles = [torch.atan(side[:, 0] / side[:, 1]) for side in sides]
    aspect = 4 / math.pi**2 * (angles[0] - angles[1]) ** 2
    with torch.no_grad():
        alpha = aspect / (1 - iou + aspect)
    return (1 - iou + (apart**2).sum(-1) / (around**2).sum(-1) + alpha * aspect).mean()


def labels(like: Tensor) -> Tensor:
    return (torch.arange(like.numel(), device=like.device) % 2).reshape(like.shape).to(like.dtype)


def places(like: Tensor) -> Tensor:
    return (torch.arange(len(like)) % ((like.shape[-1] - 1) * 4) / 4).to(like.dtype)


def mask(like: Tensor) -> Tensor:
    """A third is left out, and of every eighth row all."""
    kept = (torch.arange(like.numel()) % 3 > 0).reshape(like.shape)
    return kept & (torch.arange(len(like)) % 8 > 0).unsqueeze(-1)


DUELS = {
    "safe_log": Duel(naive=torch.log, ours=sf.safe_log),
    "safe_sqrt": Duel(naive=torch.sqrt, ours=sf.safe_sqrt),
    "safe_div": Duel(naive=torch.div, ours=sf.safe_div, operands=2),
    "safe_pow": Duel(naive=lambda x: x**0.5, ours=lambda x: sf.safe_pow(x, 0.5)),
    "safe_pow(x, y)": Duel(naive=torch.pow, ours=sf.safe_pow, operands=2),
    "safe_acos": Duel(naive=torch.acos, ours=sf.safe_acos),
    "safe_atan2": Duel(naive=torch.atan2, ours=sf.safe_atan2, operands=2),
    "log1mexp": Duel(naive=lambda x: (1 - (-x.abs()).exp()).log(), ours=sf.log1mexp),
    "safe_norm": Duel(
        naive=lambda x: x.square().sum(-1).sqrt(), ours=lambda x: sf.safe_norm(x, -1), row=16
    ),
    "masked_softmax": Duel(
        naive=masked_softmax, ours=lambda x: sf.masked_softmax(x, mask(x)), row=16, has_mask=True
    ),
    "masked_mean": Duel(
        naive=masked_mean, ours=lambda x: sf.masked_mean(x, mask(x), -1), row=16, has_mask=True
    ),
    "stable_bce": Duel(naive=bce, ours=lambda x: sf.stable_bce(x, labels(x)), row=16),
    "focal": Duel(naive=focal, ours=lambda x: sf.focal(x, labels(x)), row=16),
    "dice": Duel(naive=dice, ours=lambda x: sf.dice(x, labels(x)), row=16),
    "dfl_loss": Duel(naive=dfl, ours=lambda x: sf.dfl_loss(x, places(x)), row=16),
    "kl": Duel(naive=kl, ours=sf.kl, operands=2, row=16),
    "info_nce": Duel(naive=info_nce, ours=sf.info_nce, operands=2, row=256),
    "giou": Duel(naive=giou, ours=sf.giou, operands=2, row=4),
    "ciou": Duel(naive=ciou, ours=sf.ciou, operands=2, row=4),
}


def everyday(duel: Duel, elements: int) -> list[Tensor]:
    """Between 0.1 and 0.9; boxes with their corners in order; as few rows as info_nce has."""
    generator = torch.Generator().manual_seed(0)
    rows = min(elements, 256 * 1024) if duel.row == 256 else elements
    shape = (rows,) if duel.row == 1 else (rows // duel.row, duel.row)
    made = [0.1 + 0.8 * torch.rand(shape, generator=generator) for _ in range(duel.operands)]
    if duel.row == 4:
        made = [torch.cat([box[:, :2], box[:, :2] + box[:, 2:]], -1) for box in made]
    return made


def edges(dtype: torch.dtype) -> Tensor:
    about = torch.finfo(dtype)
    sizes = [0.0, about.tiny * about.eps, about.tiny, 1e-8, about.eps, 1 - about.eps / 2, 1.0]
    sizes += [1 + about.eps, 20.0, 120.0, math.sqrt(about.max), about.max / 2, about.max]
    numbers = torch.tensor([sign * size for size in sizes for sign in (1.0, -1.0)]).double()
    return numbers.clamp(about.min, about.max).to(dtype)


def edge_inputs(duel: Duel, dtype: torch.dtype) -> list[list[Tensor]]:
    """One call each: for elementwise ones all pairs, for others 500 draws of up to four numbers."""
    numbers = edges(dtype)
    if duel.row == 1:
        points = torch.cartesian_prod(*[numbers] * duel.operands).view(-1, duel.operands, 1)
        return [list(point) for point in points]
    generator = torch.Generator().manual_seed(0)
    shape = (8 if duel.has_mask else 1, min(duel.row, 4))
    return [
        [
            numbers[torch.randint(len(numbers), shape, generator=generator)]
            for _ in range(duel.operands)
        ]
        for _ in range(500)
    ]


def gradients(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """The value, then the gradients of its sum."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    value = call(*leaves)
    return [value, *torch.autograd.grad(value, leaves, torch.ones_like(value))]


def survived(call: Call, inputs: list[list[Tensor]]) -> int:
    return sum(
        all(bool(each.isfinite().all()) for each in gradients(call, point)) for point in inputs
    )


def timings(duel: Duel, elements: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of the processor for both in every round, after one round of warm-up."""
    inputs, times = everyday(duel, elements), ([], [])
    for number in range(rounds + 1):
        for call, taken in zip((duel.naive, duel.ours), times, strict=True):
            start = time.process_time()
            gradients(call, inputs)
            if number:
                taken.append((time.process_time() - start) * 1e3)
    return times


def measure(name: str, elements: int, rounds: int) -> Row:
    duel = DUELS[name]
    naive, ours = timings(duel, elements, rounds)
    points = [point for dtype in DTYPES for point in edge_inputs(duel, dtype)]
    return {
        "name": name,
        "naive_ms": statistics.median(naive),
        "ours_ms": statistics.median(ours),
        "ratio": statistics.median(b / a for a, b in zip(naive, ours, strict=True)),
        "edge_inputs": len(points),
        "naive_survived": survived(duel.naive, points) / len(points),
        "ours_survived": survived(duel.ours, points) / len(points),
    }


def factorise(log: Call, kind: type[torch.optim.Optimizer], lr: float) -> list[float]:
    """The loss of a Poisson factorisation; projection has emptied one row, whose rates are 0."""
    generator = torch.Generator().manual_seed(0)
    rates = 3 * uniform(generator, 40, 4) @ uniform(generator, 4, 30)
    counts = torch.poisson(rates, generator=generator)
    left, right = uniform(generator, 40, 6), uniform(generator, 6, 30)
    left[3] = 0.0
    factors = [each.requires_grad_() for each in (left, right)]
    optimizer, losses = kind(factors, lr=lr), []
    for _ in range(300):
        rate = left @ right
        loss = (rate - counts * log(rate)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for each in factors:
                each.clamp_(min=0)
        losses.append(loss.item())
    return losses


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator)


def trainings() -> list[Row]:
    forms: dict[str, Call] = {
        "log(x + 1e-8)": lambda x: (x + 1e-8).log(),
        "safe_log(x)": sf.safe_log,
    }
    optimizers = {"SGD": (torch.optim.SGD, 0.5), "Adam": (torch.optim.Adam, 0.02)}
    return [
        {"optimizer": name, "form": form, **{f"step {at}": json_number(losses[at]) for at in SHOWN}}
        for name, (kind, lr) in optimizers.items()
        for form, log in forms.items()
        for losses in [factorise(log, kind, lr)]
    ]


def json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def table(title: str, rows: list[Row]) -> Table:
    shown = Table(title=title)
    for name, value in rows[0].items():
        shown.add_column(name.replace("_", " "), justify="left" if value == str(value) else "right")
    for row in rows:
        shown.add_row(*(cell(name, value) for name, value in row.items()))
    return shown


def cell(name: str, value: Any) -> str:
    if name.endswith("survived"):
        return f"{value:.0%}" if value in (0, 1) else f"{value:.1%}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--only", nargs="+", choices=DUELS, default=list(DUELS), metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, options.elements, options.rounds) for name in options.only]
    trained = trainings()
    if options.json:
        print(
            json.dumps({"elements": options.elements, "rows": rows, "trained": trained}, indent=1)
        )
        return
    console = Console()
    console.print(table(f"forward and backward of {options.elements:,} numbers", rows))
    console.print(table("loss of a factorisation with rates of 0", trained))


if __name__ == "__main__":
    main()
