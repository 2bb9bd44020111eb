"""Which batch is the first bad one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stayfinite.detect.reports import bad_reports
from stayfinite.detect.walk import named_tensors
from stayfinite.errors import InputError
from stayfinite.locate.replay import LossFunction, bad_values, find_source
from stayfinite.records import NaNReport, Origin
from stayfinite.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class BadBatch:
    """The first batch that gives a non-finite loss or gradient.

    `reason` is a sentence; `reports` are about the batch itself and are empty when its values
    are finite; `origin` is the operation at which it went wrong.

    >>> bad = BadBatch(index=4, batch=None, reason="inputs holds NaN")
    >>> bad.index, bad.origin
    (4, None)
    """

    index: int
    batch: Any
    reason: str
    reports: tuple[NaNReport, ...] = ()
    origin: Origin | None = None


def find_first_bad_batch(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: LossFunction | None = None,
    num_batches: int | None = None,
) -> BadBatch | None:
    """The first batch of the loader with a non-finite loss or gradient; None if there is none.

    A batch is (inputs, targets) for `loss_fn(model(inputs), targets)`; without `loss_fn` it is
    what the model itself turns into a loss. Each batch is tried on the same weights, and the
    model, its gradients and the random states are as before afterwards.

    >>> loader = [(torch.ones(2, 3), torch.ones(2, 1)) for _ in range(5)]
    >>> loader[3][0][1, 2] = float("nan")
    >>> bad = find_first_bad_batch(nn.Linear(3, 1), loader, nn.functional.mse_loss)
    >>> bad.index, bad.reports[0].location
    (3, 'inputs.0')
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    snapshot = Snapshot([model])
    try:
        for index, batch in enumerate(_shown(loader, num_batches)):
            if num_batches is not None and index >= num_batches:
                break
            inputs, targets = _parted(batch, loss_fn)
            with torch.enable_grad():
                is_bad = bool(bad_values(model, inputs, targets, loss_fn))
            snapshot.restore()
            if is_bad:
                return _described(index, batch, model, loss_fn)
    finally:
        snapshot.restore()
    return None


def _shown(loader: Iterable[Any], total: int | None) -> Iterable[Any]:
    # Here, where random states are put back: importing rich draws a random number.
    from rich.console import Console
    from rich.progress import track

    console = Console(file=sys.stderr)
    lengths = [len(loader)] if isinstance(loader, Sized) else []
    lengths += [total] if total is not None else []
    return track(
        loader,
        "looking for a bad batch",
        total=min(lengths, default=None),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _parted(batch: Any, loss_fn: LossFunction | None) -> tuple[Any, Any]:
    if loss_fn is not None and isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, None


def _described(index: int, batch: Any, model: nn.Module, loss_fn: LossFunction | None) -> BadBatch:
    inputs, targets = _parted(batch, loss_fn)
    origin = find_source(model, inputs, targets=targets, loss_fn=loss_fn)
    reports = tuple(bad_reports(named_tensors(batch, "inputs")))
    if reports:
        reason = f"{reports[0].location} holds {reports[0].nan_type.word}"
    elif origin is not None and origin.line is not None:
        reason = f"{origin.op or origin.phase} at {origin.file}:{origin.line} is not finite"
    else:
        reason = "its loss or a gradient is not finite"
    return BadBatch(index=index, batch=batch, reason=reason, reports=reports, origin=origin)
