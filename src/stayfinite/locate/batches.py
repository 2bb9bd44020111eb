"""Which batch is the first bad one, and which checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from stayfinite.detect.reports import bad_reports
from stayfinite.detect.scan import all_finite
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

    >>> bad = BadBatch(index=4, batch=None, reason="inputs holds nan values")
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
        reason = f"{reports[0].location} holds {reports[0].nan_type.value} values"
    elif origin is not None and origin.line is not None:
        reason = f"{origin.op or origin.phase} at {origin.file}:{origin.line} is not finite"
    else:
        reason = "its loss or a gradient is not finite"
    return BadBatch(index=index, batch=batch, reason=reason, reports=reports, origin=origin)


def first_bad_checkpoint(
    checkpoints: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    is_bad: Callable[[Path], bool] | None = None,
) -> Path | None:
    """The first bad one of a series of checkpoints, by bisection; None when the last is good.

    Give a folder (its files are taken by time of writing) or the paths, oldest first. A bad one
    stays bad in the checkpoints after it, so about log2(n) files are read. `is_bad(path)` may
    replace the default: any tensor in the file that is not finite. Nothing is unpickled.

    >>> import tempfile
    >>> files = [Path(tempfile.mkdtemp()) / f"{step}.pt" for step in range(4)]
    >>> for step, file in enumerate(files):
    ...     torch.save({"weight": torch.tensor(1.0 if step < 2 else float("nan"))}, file)
    >>> first_bad_checkpoint(files).name
    '2.pt'
    """
    paths = _series(checkpoints)
    judge = is_bad if is_bad is not None else has_bad_tensor
    low, high = 0, len(paths)
    if not paths or not judge(paths[-1]):
        return None
    high = len(paths) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if judge(paths[middle]) else (middle + 1, high)
    return paths[low]


def _series(checkpoints: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    if not isinstance(checkpoints, (str, os.PathLike)):
        return [Path(path) for path in checkpoints]
    folder = Path(checkpoints)
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder; give a folder of checkpoints or a list of files."
        )
    kinds = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
    files = [path for path in folder.iterdir() if path.suffix in kinds]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def has_bad_tensor(path: Path) -> bool:
    """Whether any tensor in the file is not finite."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"{path} cannot be read as a checkpoint: {error}") from error
    return not all_finite(tensor for _, tensor in named_tensors(state, "state"))
