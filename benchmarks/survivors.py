"""Who is sent through the hostile sequences: what people use, what papers propose, and ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam, AdamW, Optimizer

import stayfinite
from stayfinite.recover.config import RecoveryConfig

LEARNING_RATE = 1e-2


class Contestant:
    """The parts of a training step that are its own; without any, plain Adam."""

    name = "nothing at all"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer: Optimizer = Adam(model.parameters(), lr=LEARNING_RATE)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def unscale(self) -> None:
        """Bring the gradients to their true size."""

    def clip(self) -> None:
        """Make them smaller where they are too large."""

    def update(self) -> None:
        self.optimizer.step()

    def run(self, step: Callable[[int], Any], number: int) -> None:
        """Do the step with this number."""
        step(number)

    def last_log(self) -> float | None:
        """The loss that it printed last, if it prints any."""
        return None

    def close(self) -> None:
        """Leave torch as it was."""


class Scaler(Contestant):
    """torch.amp.GradScaler as in its documentation."""

    name = "GradScaler"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.scaler = torch.amp.GradScaler("cpu")

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ScalerAndClip(Scaler):
    """GradScaler and clip_grad_norm_, as torch's documentation puts them together."""

    name = "both"

    def clip(self) -> None:
        clip_grad_norm_(self.model.parameters(), 1.0)


class ClipNorm(Contestant):
    """torch's clip_grad_norm_, to a norm of 1."""

    name = "clip norm"

    def clip(self) -> None:
        clip_grad_norm_(self.model.parameters(), 1.0)


class TrainerDefaults(ClipNorm):
    """What transformers.Trainer does by default, but for its learning rate.

    AdamW, max_grad_norm=1.0, and logging_nan_inf_filter: of the losses since the last log, one
    that is not finite is replaced by the mean so far, which begins at 0. It logs every 500
    steps; here more often, as the runs are short.
    """

    name = "HF Trainer"
    logging_steps = 50

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self._total, self._count = 0.0, 0
        self._logged = math.nan

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        value = loss.item()
        self._total += value if math.isfinite(value) else self._total / (1 + self._count)
        self._count += 1
        if self._count == self.logging_steps:
            self._logged = self._total / self._count
            self._total, self._count = 0.0, 0

    def last_log(self) -> float | None:
        return self._logged


class ZScoreClip(Contestant):
    """ZClip (Kumar et al., 2025): moving mean and variance of the norm, z-score above 2.5.

    After 25 steps of warm-up, a norm with a z-score above the threshold is clipped to
    mean + threshold * std / (z / threshold), and the clipped norm enters the averages.
    """

    name = "z-score"
    warmup, threshold, alpha, eps = 25, 2.5, 0.97, 1e-6

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._first: list[float] = []
        self._mean = self._variance = 0.0

    def clip(self) -> None:
        norm = total_norm(self.model)
        if len(self._first) < self.warmup:
            self._first.append(norm)
            with np.errstate(invalid="ignore"):
                self._mean, self._variance = float(np.mean(self._first)), float(np.var(self._first))
            return
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / (deviation + self.eps)
        if z > self.threshold:
            allowed = self._mean + self.threshold * deviation / (z / self.threshold)
            scale_gradients(self.model, allowed / (norm + self.eps))
            norm = allowed
        self._mean = self.alpha * self._mean + (1 - self.alpha) * norm
        self._variance = self.alpha * self._variance + (1 - self.alpha) * (norm - self._mean) ** 2


class PercentileClip(Contestant):
    """AutoClip (Seetharaman et al., 2020): the 10th percentile of all norms so far."""

    name = "percentile"
    percentile = 10.0

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._norms: list[float] = []

    def clip(self) -> None:
        self._norms.append(total_norm(self.model))
        with np.errstate(invalid="ignore"):
            allowed = float(np.percentile(self._norms, self.percentile))
        clip_grad_norm_(self.model.parameters(), allowed)


class Ours(Contestant):
    """DynamicLossScaler, clip_gradients and stayfinite.watch by default, around the same step."""

    name = "stayfinite"
    config = RecoveryConfig()

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.scaler = stayfinite.DynamicLossScaler("cpu")
        self.guard = stayfinite.watch(
            model, self.optimizer, scaler=self.scaler, config=self.config, sinks=[]
        )

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def clip(self) -> None:
        stayfinite.clip_gradients(self.model, 1.0)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, step: Callable[[int], Any], number: int) -> None:
        self.guard.step(step, number)

    def close(self) -> None:
        self.guard.close()


class PatientOurs(Ours):
    """The same, but it does not end the run after five bad steps in a row."""

    name = "patient"
    config = RecoveryConfig(max_consecutive_nans=1000)


CONTESTANTS: tuple[type[Contestant], ...] = (
    Scaler,
    ClipNorm,
    ScalerAndClip,
    TrainerDefaults,
    ZScoreClip,
    PercentileClip,
    Ours,
    PatientOurs,
)


def total_norm(model: nn.Module) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())


def scale_gradients(model: nn.Module, factor: float) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(factor)
