"""Going back to a checkpoint on disk, where no snapshot in memory can be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stayfinite.detect.gradients import params_of
from stayfinite.detect.scan import all_finite
from stayfinite.detect.walk import named_states
from stayfinite.errors import CheckpointError
from stayfinite.recover.rates import schedulers_of
from stayfinite.recover.situation import Answer, Cannot, Done, Situation

if TYPE_CHECKING:
    from stayfinite.checkpoint.loading import Restored


def load_from_disk(situation: Situation, place: str | os.PathLike[str]) -> Answer:
    """Load the checkpoint, or the newest good one of a folder; all of it or nothing.

    The optimizer, schedulers, scaler and averages get their states back where the file has them.
    Random states stay as they are: they would deliver the same batches once more.
    """
    # Late: training that stays finite reads no checkpoint of ours.
    from stayfinite.checkpoint.loading import restore_checkpoint

    model, optimizer = situation.model, situation.optimizer
    if model is None:
        return Cannot(f"it is not known which model {place} is for")
    ours = {id(param) for param in model.parameters()}
    others = [param for param in params_of(optimizer) if id(param) not in ours]
    if not all_finite(others):
        return Cannot("the optimizer has bad parameters that are not the model's")
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        loaded = restore_checkpoint(
            place,
            model=model,
            optimizer=optimizer,
            needs_optimizer=not all_finite(tensor for _, tensor in named_states(optimizer)),
            scheduler=_schedulers(situation),
            scaler=situation.scaler,
            ema=situation.averages,
        )
    except CheckpointError as error:
        return Cannot(_reason(error))
    if "scheduler" not in loaded.parts:
        # The schedule goes on from where it is, and a rate that was lowered stays so.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
    return Done(_said(loaded), loaded_from=str(loaded.path))


def changed_at(place: str | os.PathLike[str]) -> int:
    """When the checkpoint, or anything in the folder of checkpoints, was last written."""
    path = Path(place)
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def _schedulers(situation: Situation) -> tuple[Any, ...]:
    optimizer = situation.optimizer
    known = situation.schedulers or schedulers_of(optimizer)
    return tuple(each for each in known if getattr(each, "optimizer", None) is optimizer)


def _said(loaded: Restored) -> str:
    step = "" if loaded.step is None else f" of step {loaded.step}"
    kept = "" if "optimizer" in loaded.parts else "; the optimizer's state is not in it, and stays"
    return f"back at the checkpoint {loaded.path}{step}{kept}"


def _reason(error: CheckpointError) -> str:
    """The error in one line."""
    return " ".join(str(error).split()).rstrip(".")
