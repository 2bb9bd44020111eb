"""All of training in one file, as stayfinite.checkpoint writes and validates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stayfinite.amp.validation import bad_states, bad_weights
from stayfinite.checkpoint import load_checkpoint, save_checkpoint
from stayfinite.errors import NonFiniteError
from stayfinite.records import NaNReport


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Who has a state that is saved."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: tuple[Any, ...] = ()
    scaler: Any = None
    ema: Any = None

    def first_bad(self) -> NaNReport | None:
        bad = [*bad_weights(self.model), *bad_states(self.optimizer)]
        bad += bad_weights(self.ema) if isinstance(self.ema, nn.Module) else []
        return bad[0] if bad else None


def save(saved: Saved, path: Path, *, counts: Mapping[str, int]) -> None:
    """Write the state; NonFiniteError if it is bad, and then nothing is written."""
    try:
        save_checkpoint(path, **vars(saved), step=counts["updates"], extra={"counts": dict(counts)})
    except NonFiniteError as error:
        error.report = saved.first_bad()
        raise


def load(saved: Saved, path: Path) -> dict[str, int]:
    """Load all that was saved, and give the counts; checked before anything is changed.

    A file that a trainer did not write begins with its step, and with epoch 0.
    """
    loaded = load_checkpoint(path, **vars(saved))
    known = loaded.extra.get("counts", {}) if isinstance(loaded.extra, dict) else {}
    return {"epoch": 0, "updates": loaded.step or 0, **known}
