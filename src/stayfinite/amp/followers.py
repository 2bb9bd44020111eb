"""Those who follow an update: schedulers, the warm-up, averaged weights."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stayfinite.amp.config import AMPConfig
from stayfinite.amp.rates import LinearWarmup
from stayfinite.errors import ConfigError, InputError

SchedulerEvery = Literal["update", "epoch"]


class Followers:
    """Steps the schedulers and updates the averaged weights, after each update or epoch.

    ReduceLROnPlateau needs a loss to look at, so it is stepped after each epoch, with its mean.
    """

    def __init__(
        self,
        config: AMPConfig,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        every: SchedulerEvery = "update",
        ema: Any = None,
    ) -> None:
        if every not in get_args(SchedulerEvery):
            known = " or ".join(map(repr, get_args(SchedulerEvery)))
            raise ConfigError(f"scheduler_every is {every!r}; it must be {known}.")
        given = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
        self.schedulers: list[Any] = [each for each in given if each is not None]
        self.warmup: LinearWarmup | None = None
        if config.warmup_epochs > 0 and not self.schedulers:
            self.warmup = LinearWarmup(optimizer, config.warmup_epochs)
        self.ema = ema
        self._config = config
        self._model = model
        self._every = every
        self._average = None if ema is None else _averaging(ema)

    @property
    def has_scheduler(self) -> bool:
        return bool(self.schedulers) or self.warmup is not None

    def all_schedulers(self) -> list[Any]:
        return [*self.schedulers, *([] if self.warmup is None else [self.warmup])]

    def begin_warmup(self, batches_per_epoch: int) -> None:
        """It is known now how long an epoch is."""
        if self.warmup is not None:
            updates = math.ceil(batches_per_epoch / self._config.accumulate_grad_batches)
            self.warmup.begin(updates)

    def require_length(self) -> None:
        """ConfigError if a warm-up is asked for that nobody knows the length of."""
        if self.warmup is not None and self.warmup.length is None:
            raise ConfigError(
                f"warmup_epochs is {self._config.warmup_epochs:g}, but it is not known how long "
                "an epoch is: give batches_per_epoch."
            )

    def after_update(self) -> None:
        """Weights have moved."""
        if self.warmup is not None:
            self.warmup.step()
        for scheduler in self.schedulers:
            if self._every == "update" and not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
        if self._average is not None:
            self._average(self._model)

    def after_epoch(self, loss: float) -> None:
        """An epoch with this mean loss is over."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                if math.isfinite(loss):
                    scheduler.step(loss)
            elif self._every == "epoch":
                scheduler.step()


def _averaging(ema: Any) -> Any:
    if callable(getattr(ema, "update_parameters", None)):
        return ema.update_parameters
    if callable(getattr(ema, "update", None)):
        return lambda model: ema.update()
    raise InputError(
        f"ema is a {type(ema).__name__}; it must have update_parameters(model), "
        "as torch.optim.swa_utils.AveragedModel has, or update()."
    )
