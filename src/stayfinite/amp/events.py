"""What a trainer tells while it trains, and to whom."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from stayfinite.errors import TrainingAbortedError
from stayfinite.records import Incident

logger = logging.getLogger("stayfinite")


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One batch is done. `loss` is None when it was skipped; `was_update` when weights moved."""

    step: int
    epoch: int
    loss: Tensor | None
    was_update: bool


@dataclass(frozen=True, kw_only=True)
class EpochEvent:
    """One epoch is done. `loss` is the mean over its finite batches, NaN if there was none."""

    epoch: int
    step: int
    loss: float
    batches: int
    skipped_batches: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LogEvent:
    """Numbers of one update, every `log_every` of them.

    The norms are of all gradients together, `largest` of single parameters before clipping, the
    largest first. `learning_rates` has one number for each group of the optimizer.
    """

    step: int
    epoch: int
    loss: float
    terms: dict[str, float] = field(default_factory=dict)
    norm: float
    norm_after_clipping: float
    largest: tuple[tuple[str, float], ...]
    learning_rates: tuple[float, ...]
    scale: float


class Callback(Protocol):
    """Who is told; derive from it and change what you need, or give any object with some of these.

    A callback that raises is logged once and called again; only TrainingAbortedError leaves it,
    and ends the training.
    """

    def on_step(self, event: StepEvent) -> None:
        """A batch is done."""

    def on_nan(self, incident: Incident) -> None:
        """A bad value was found; `incident.outcome` is what was done about it."""

    def on_recovery(self, incident: Incident) -> None:
        """Training goes on after this incident."""

    def on_epoch(self, event: EpochEvent) -> None:
        """An epoch of `fit` is done."""

    def on_log(self, event: LogEvent) -> None:
        """Statistics of this update."""


class Callbacks:
    """Tells all callbacks, in the order in which they were given."""

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self._callbacks = list(callbacks)
        self._failed: set[int] = set()

    def add(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def tell(self, name: str, event: Any) -> None:
        """Call the method of this name on each callback that has it."""
        for number, callback in enumerate(self._callbacks):
            method = getattr(callback, name, None)
            if method is not None:
                self._call(number, method, event)

    def _call(self, number: int, method: Any, event: Any) -> None:
        try:
            method(event)
        except TrainingAbortedError:
            raise
        except Exception:
            if number not in self._failed:
                self._failed.add(number)
                logger.exception("callback %r failed; training goes on", method)
