"""What Lightning keeps of a batch: counts, logged values, averages; and how it is struck out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from stayfinite.detect.scan import all_finite
from stayfinite.snapshot import Snapshot, TrainingState


def uncount(trainer: Any) -> None:
    """Let `global_step` be as before the update that is running, if Lightning counts it."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    if progress.total.ready == progress.total.completed + 1:
        progress.increment_by(-1)


class Logged:
    """What `self.log` has gathered before a step, to go back to it."""

    def __init__(self, trainer: Any) -> None:
        self._results: dict[str, Any] = trainer.fit_loop.epoch_loop._results
        # Values are replaced when they are updated, so the references are enough.
        self._kept = {name: dict(vars(metric)) for name, metric in self._results.items()}

    def strike(self) -> None:
        """As if nothing had been logged since; nothing is shown or sent for this batch."""
        for name in [*self._results]:
            if name not in self._kept:
                del self._results[name]
            else:
                vars(self._results[name]).update(self._kept[name], _forward_cache=None)


class LateAverages:
    """Averages that belong to the module, which updates them after everybody else."""

    def __init__(self, module: nn.Module) -> None:
        found = [each for each in module.modules() if isinstance(each, AveragedModel)]
        self._state = TrainingState(None, ema=found) if found else None
        self._held: Snapshot | None = None

    def hold(self) -> None:
        if self._state is not None and self._held is None:
            self._held = self._state.capture(parts=("ema",))

    def settle(self) -> None:
        held, self._held = self._held, None
        if held is not None and self._state is not None:
            self._state.restore(held)


def averages_of(trainer: Any) -> tuple[Any, ...]:
    """Averages of the weights that callbacks hold: models, and dicts of tensors."""
    values = [value for callback in trainer.callbacks for value in vars(callback).values()]
    return tuple(value for value in values if _is_average(value, trainer))


def _is_average(value: Any, trainer: Any) -> bool:
    if value is trainer.lightning_module or value is trainer.strategy.model:
        return False
    tensors = list(_tensors(value))
    return bool(tensors) and all_finite(tensors)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, dict) and all(isinstance(each, Tensor) for each in value.values()):
        yield from value.values()
