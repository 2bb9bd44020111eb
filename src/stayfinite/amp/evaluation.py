"""The loss over a whole loader, without training on it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stayfinite.amp.losses import Losses
from stayfinite.detect.reports import bad_reports
from stayfinite.detect.walk import named_tensors
from stayfinite.records import NaNReport


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the finite batches, each sample with the same weight; NaN if there was none.

    `bad` has a report on each loss or term that is not finite, such as "batches.3.loss". These
    are in no mean.
    """

    loss: float
    terms: dict[str, float] = field(default_factory=dict)
    batches: int
    samples: int
    bad: tuple[NaNReport, ...] = ()


@torch.no_grad()
def evaluate(
    batches: Iterable[Any], *, model: nn.Module, losses_of_batch: Callable[[Any], Losses]
) -> Evaluation:
    """What the model makes of these batches; its train flags are as before afterwards."""
    means = _Means()
    with in_eval_mode(model):
        for batch in batches:
            means.add(losses_of_batch(batch), samples=batch_size(batch))
    return means.result()


class _Means:
    """Sums that no bad value gets into."""

    def __init__(self) -> None:
        self._batches = 0
        self._bad: list[NaNReport] = []
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, losses: Losses, *, samples: int) -> None:
        named = {"loss": losses.total, **{f"loss.{n}": term for n, term in losses.terms.items()}}
        found = bad_reports((f"batches.{self._batches}.{n}", value) for n, value in named.items())
        self._bad += found
        self._batches += 1
        is_bad = {report.location.split(".", 2)[2] for report in found}
        for name, value in named.items():
            if not is_bad & {"loss", name}:  # with a bad total none of the terms counts
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + float(value) * samples, count + samples  # host sync

    def result(self) -> Evaluation:
        means = {name: total / max(1, count) for name, (total, count) in self._sums.items()}
        return Evaluation(
            loss=means.pop("loss", math.nan),
            terms={name.removeprefix("loss."): mean for name, mean in means.items()},
            batches=self._batches,
            samples=self._sums.get("loss", (0.0, 0))[1],
            bad=tuple(self._bad),
        )


def batch_size(batch: Any) -> int:
    """The length of the first tensor in the batch that has one; else 1."""
    sizes = (tensor.shape[0] for _, tensor in named_tensors(batch, "") if tensor.dim())
    return next(sizes, 1)


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; each module has its own flag back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
