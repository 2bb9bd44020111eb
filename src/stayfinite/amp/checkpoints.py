"""All of training in one file: written whole or not at all, and never with a bad value."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.amp.validation import bad_states, bad_weights
from stayfinite.detect.reports import bad_reports
from stayfinite.detect.walk import named_tensors
from stayfinite.errors import CheckpointError, NonFiniteError

FORMAT = 1
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Who has a state that is saved."""

    model: nn.Module
    optimizer: Optimizer
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    ema: Any = None

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, **self._optional()}
        state = {name: part.state_dict() for name, part in parts.items()}
        return {**state, "schedulers": [each.state_dict() for each in self.schedulers]}

    def load(self, state: Mapping[str, Any]) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, **self._optional()}
        for name, part in parts.items():
            part.load_state_dict(state[name])
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)

    def _optional(self) -> dict[str, Any]:
        parts = {"scaler": self.scaler, "ema": self.ema}
        return {name: part for name, part in parts.items() if part is not None}


def save(saved: Saved, path: Path, *, counts: Mapping[str, int]) -> None:
    """Write the state; NonFiniteError if it is bad, and then nothing is written."""
    bad = [*bad_weights(saved.model), *bad_states(saved.optimizer)]
    bad += bad_weights(saved.ema) if isinstance(saved.ema, nn.Module) else []
    if bad:
        raise NonFiniteError(
            f"{path} was not written: {bad[0].location} holds {bad[0].nan_type.value}.",
            report=bad[0],
        )
    state = {**saved.state(), "counts": dict(counts), "random": _random_state()}
    _write(path, {"format": FORMAT, **state})


def load(saved: Saved, path: Path) -> dict[str, int]:
    """Load all that was saved, and give the counts; checked before anything is changed."""
    state = _read(path)
    problems = list(_problems(saved, state))
    if problems:
        rest = len(problems) - _MOST_NAMED
        said = "; ".join(problems[:_MOST_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
        raise CheckpointError(f"{path} cannot be loaded: {said}.")
    saved.load(state)
    _restore_random(state["random"])
    return dict(state["counts"])


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint at {path}.") from error
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by AMPTrainer.save of this version.")
    return state


def _problems(saved: Saved, state: Mapping[str, Any]) -> Iterator[str]:
    own = saved.state()
    yield from (f"it has no {name}" for name in own if name not in state)
    if len(own["schedulers"]) != len(state.get("schedulers", ())):
        yield f"it has {len(state.get('schedulers', ()))} schedulers, not {len(own['schedulers'])}"
    yield from _mismatches(own["model"], state.get("model", {}))
    yield from _group_mismatches(own["optimizer"], state.get("optimizer", {}))
    parameters = {name for name, _ in saved.model.named_parameters()}
    weights = {name: t for name, t in state.get("model", {}).items() if name in parameters}
    kept = state.get("optimizer", {}).get("state", {})
    named = [*named_tensors(weights, "model"), *named_tensors(kept, "optimizer")]
    for report in bad_reports(named, described=0):
        yield f"{report.location} holds {report.nan_type.value}"


def _mismatches(own: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name} is missing" for name in own if name not in found)
    yield from (f"{name} is not in the model" for name in found if name not in own)
    for name, value in own.items():
        other = found.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor) and other.shape != value.shape:
            yield f"{name} has shape {list(other.shape)}, not {list(value.shape)}"


def _group_mismatches(own: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    sizes, others = (
        [len(group["params"]) for group in state.get("param_groups", ())] for state in (own, found)
    )
    if sizes != others:
        yield f"its optimizer has groups of {others} parameters, not {sizes}"


def _random_state() -> dict[str, Any]:
    """All global generators, in types that torch.load reads without trusting the file."""
    version, numbers, next_gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), next_gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), *map(float, rest)],
        "torch": torch.get_rng_state(),
        "devices": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random(saved: Mapping[str, Any]) -> None:
    version, numbers, next_gauss = saved["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    kind, keys, position, has_gauss, gauss = saved["numpy"]
    keys = np.array(keys, dtype=np.uint32)
    np.random.set_state((kind, keys, int(position), int(has_gauss), gauss))
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available() and len(saved["devices"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["devices"])
