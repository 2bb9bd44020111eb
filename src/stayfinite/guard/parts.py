"""What belongs to one optimizer's training."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stayfinite.snapshot import TrainingState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What belongs to one optimizer's training; all but the optimizer may be missing."""

    optimizer: Optimizer
    modules: tuple[nn.Module, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    emas: tuple[Any, ...] = ()
    loader: Any = None

    @property
    def model(self) -> nn.Module | None:
        return self.modules[0] if self.modules else None

    def state(self) -> TrainingState:
        return TrainingState(
            self.modules,
            self.optimizer,
            scheduler=self.schedulers,
            scaler=self.scaler,
            ema=self.emas,
            loader=self.loader,
        )
