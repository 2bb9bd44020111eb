"""The learning rate of a config, put into effect: at once, and slowly at the beginning."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stayfinite.errors import ConfigError


def set_learning_rate(optimizer: Optimizer, rate: float, *, scheduler: Any = None) -> None:
    """As if the optimizer had been made with lr=rate: groups with a rate of their own keep it.

    ConfigError where a scheduler was made for another rate: it would bring that one back.
    """
    default = optimizer.defaults.get("lr")
    ours = [group for group in optimizer.param_groups if _initial(group) == _number(default)]
    if scheduler is not None and _number(default) != rate:
        raise ConfigError(
            f"learning_rate is {rate:g}, but the scheduler was made for an optimizer with "
            f"lr={_number(default):g}. Make the optimizer with lr=config.learning_rate."
        )
    for group in ours if scheduler is None else ():
        _write(group, rate)
    optimizer.defaults["lr"] = default.fill_(rate) if isinstance(default, Tensor) else rate


def _initial(group: dict[str, Any]) -> float:
    return _number(group.get("initial_lr", group["lr"]))


def _number(rate: Any) -> float:
    return math.nan if rate is None else float(rate)


def _write(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class LinearWarmup:
    """Brings each learning rate up in a straight line over the first epochs, then leaves it alone.

    Update k of w (from 0) has (k + 1) / w of the rate. It has the methods of a torch scheduler
    that a snapshot and a checkpoint need. Nothing happens before `begin` says how long an
    epoch is.
    """

    def __init__(self, optimizer: Optimizer, epochs: float) -> None:
        self._optimizer = optimizer
        self._epochs = epochs
        self.updates = 0
        self.length: int | None = None
        self.base_lrs: list[float] = [_number(group["lr"]) for group in optimizer.param_groups]

    def begin(self, updates_per_epoch: int) -> None:
        """The epochs are this long; a second call changes nothing."""
        if self.length is None:
            self.length = max(1, round(self._epochs * updates_per_epoch))
            self._apply()

    def step(self) -> None:
        """An update was made."""
        self.updates += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        return {
            "updates": self.updates,
            "length": self.length,
            "base_lrs": list(self.base_lrs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.length = state["updates"], state["length"]
        self.base_lrs = list(state["base_lrs"])

    def _apply(self) -> None:
        # Once it is over the rates are the user's: nothing is written any more.
        if self.length is None or self.updates >= self.length:
            return
        part = (self.updates + 1) / self.length
        for group, rate in zip(self._optimizer.param_groups, self.base_lrs, strict=False):
            _write(group, rate * part)
