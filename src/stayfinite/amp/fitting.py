"""Epochs over a loader, with a progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stayfinite.amp.progress import ProgressBar


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What came of one epoch; `loss` is the mean over the finite batches."""

    loss: float
    batches: int
    skipped_batches: int
    seconds: float


def length_of(loader: Any) -> int | None:
    """How many batches it has; None when it does not know."""
    try:
        return len(loader)
    except TypeError:  # no __len__, or a DataLoader over a stream
        return None


def run_epochs(
    train: Callable[[Any, int | None], Tensor | None],
    loader: Iterable[Any],
    epochs: int,
    *,
    after_epoch: Callable[[Epoch], None],
) -> None:
    """Call `train` with each batch, and with how many the epoch has left with it."""
    length = length_of(loader)
    with ProgressBar(epochs=epochs) as bar:
        for number in range(epochs):
            bar.begin_epoch(number, length)
            after_epoch(_run_epoch(train, loader, length, bar))


def _run_epoch(
    train: Callable[[Any, int | None], Tensor | None],
    loader: Iterable[Any],
    length: int | None,
    bar: ProgressBar,
) -> Epoch:
    # The loader is asked for one batch at a time: asking ahead would change the order in which
    # it and the model draw random numbers.
    started, count, skipped = time.perf_counter(), 0, 0
    total: Tensor | None = None
    loss: Tensor | None = None
    for batch in loader:
        loss = train(batch, None if length is None else max(1, length - count))
        count += 1
        if loss is None:
            skipped += 1
        else:
            total = loss.double() if total is None else total + loss
        bar.advance(loss=loss, skipped=skipped)
    bar.end_epoch(loss=loss, skipped=skipped)
    return Epoch(
        loss=math.nan if total is None else float(total) / (count - skipped),  # host sync
        batches=count,
        skipped_batches=skipped,
        seconds=time.perf_counter() - started,
    )
