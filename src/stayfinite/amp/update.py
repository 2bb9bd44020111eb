"""One batch: forward, backward and, at the end of its window, the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.amp.config import AMPConfig
from stayfinite.amp.gradients import GradientStatistics, gradient_statistics
from stayfinite.amp.losses import LossFunction, losses_of
from stayfinite.amp.precision import autocast_for
from stayfinite.amp.scaler import DynamicLossScaler
from stayfinite.clip import clip_gradients
from stayfinite.detect.gradients import gradients_of
from stayfinite.detect.norms import finite_number
from stayfinite.detect.scan import all_finite
from stayfinite.detect.terms import note_terms
from stayfinite.records import Incident


@dataclass(kw_only=True)
class Accumulation:
    """Where training is: updates made, and batches in the window that leads to the next one.

    It has the methods of a scheduler, so that a snapshot holds it and a step that is undone
    leaves no trace in it.
    """

    updates: int = 0
    batches: int = 0
    size: int = 1

    @property
    def is_at_start(self) -> bool:
        return self.batches == 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates, "batches": self.batches, "size": self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates, self.batches = state["updates"], state["batches"]
        self.size = state["size"]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What came of a batch. `loss` is that of this batch alone, neither scaled nor divided.

    An update that was attempted but is none was skipped by the scaler. The statistics are there
    when they were due: before clipping, and after it.
    """

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    was_attempted: bool = False
    was_update: bool = False
    before: GradientStatistics | None = None
    after: GradientStatistics | None = None

    @property
    def kept_loss(self) -> Tensor | None:
        """The loss, unless the update that it led to was skipped."""
        return None if self.was_attempted and not self.was_update else self.loss


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an update works on; `after_update` is called when weights have moved.

    `incidents` grows when the guard finds something bad, also in the middle of an update.
    """

    config: AMPConfig
    model: nn.Module
    optimizer: Optimizer
    loss_fn: LossFunction | None
    device: torch.device
    scaler: DynamicLossScaler | None
    window: Accumulation
    after_update: Callable[[], None]
    incidents: list[Incident]


class Update:
    """Called with each batch; at the last one of a window it updates the weights."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.looks_at_loss = True
        self.bad_losses: dict[str, Tensor] = {}  # of this window, also of runs that were undone

    def begin_window(self, size: int, *, looks_at_loss: bool) -> None:
        """A window of so many batches begins."""
        self._setup.window.size = size
        self.looks_at_loss = looks_at_loss
        self.bad_losses.clear()

    def __call__(self, batch: Any) -> Done:
        setup, window = self._setup, self._setup.window
        if window.is_at_start:
            setup.optimizer.zero_grad()
        with autocast_for(setup.config, setup.device):
            losses = losses_of(batch, model=setup.model, loss_fn=setup.loss_fn)
        note_terms(losses.terms)
        self._look_at(losses.named())
        self._backward(losses.total)
        window.batches += 1
        terms = {name: term.detach() for name, term in losses.terms.items()}
        done = Done(loss=losses.total.detach(), terms=terms)
        return self._updated(done) if window.batches >= window.size else done

    def _look_at(self, named: list[tuple[str, Tensor]]) -> None:
        # A finite number on the CPU is known at once; all else is looked at properly.
        doubtful = [item for item in named if finite_number(item[1]) is None]
        if self.looks_at_loss and not all_finite(loss for _, loss in doubtful):
            for name, loss in doubtful:
                if not all_finite([loss]):
                    self.bad_losses.setdefault(name, loss.detach())

    def _backward(self, loss: Tensor) -> None:
        scaler, size = self._setup.scaler, self._setup.window.size
        loss = loss if size == 1 else loss / size
        (loss if scaler is None else scaler.scale(loss)).backward()

    def _updated(self, done: Done) -> Done:
        """Unscale, look, clip, step, update the scale, then whoever follows."""
        setup = self._setup
        if setup.scaler is not None:
            setup.scaler.unscale_(setup.optimizer)
        before, after = self._clipped()
        was_update = self._stepped()
        if was_update:
            setup.window.updates += 1
            setup.after_update()
        setup.window.batches = 0
        return dataclasses.replace(
            done, was_attempted=True, was_update=was_update, before=before, after=after
        )

    def _clipped(self) -> tuple[GradientStatistics | None, GradientStatistics | None]:
        """Statistics before and after clipping, if they are due."""
        config, optimizer = self._setup.config, self._setup.optimizer
        is_due = config.log_every > 0 and (self._setup.window.updates + 1) % config.log_every == 0
        before = self._statistics() if is_due else None
        if config.gradient_clip_val is None:
            return before, before
        # What is bad must not be clipped away: the guard and the scaler judge it after this.
        if all_finite(gradients_of(optimizer), writable=True):
            clip_gradients(optimizer, config.gradient_clip_val)
        return before, self._statistics() if is_due else None

    def _statistics(self) -> GradientStatistics:
        return gradient_statistics(self._setup.model.named_parameters())

    def _stepped(self) -> bool:
        """Whether weights have moved: neither the scaler nor the guard has taken that back."""
        optimizer, scaler, seen = self._setup.optimizer, self._setup.scaler, self._incidents()
        if scaler is None:
            optimizer.step()
            return self._incidents() == seen
        scaler.step(optimizer)
        if self._incidents() > seen:  # all is as in a snapshot, the scaler too
            return False
        found = scaler._found_inf_per_device(optimizer).values()
        was_skipped = any(bool(flag) for flag in found)  # host sync
        scaler.update()
        return not was_skipped

    def _incidents(self) -> int:
        return len(self._setup.incidents)
