"""What is done about a forecast or a spike, before anything is bad; undone when it is over."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from stayfinite.clip import clip_gradients
from stayfinite.records import Forecast, Outcome
from stayfinite.recover.actions import (
    Cannot,
    Done,
    Trouble,
    act,
    lower_rates,
    rates_of,
    schedulers_of,
)
from stayfinite.recover.config import RecoveryStrategy
from stayfinite.training import put_gradients

if TYPE_CHECKING:
    from stayfinite.guard.job import Job

_AGAIN_AFTER = 4  # steps in which a trend may show that it has been broken
_MOST = 6  # times that the rate is lowered for one trend
_CALM = 64  # steps without a trend before it is undone; each time that it comes back, four times


class Precaution:
    """Answers the forecasts of one job as its configuration says.

    An answer is the forecast itself, with its `outcome`. It lasts as long as the trend.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._undo: list[Callable[[], None]] = []
        self._about: Forecast | None = None
        self._times = self._step = self._risen_at = 0
        self._calm = _CALM

    @property
    def _optimizer(self) -> Optimizer:
        return self._job.parts.optimizer

    def answered(self, forecast: Forecast) -> Forecast:
        """The forecast, with what was done about it if that was asked for."""
        if forecast.is_spike:
            return self._answer_spike(forecast)
        chosen = self._job.config.on_forecast
        if chosen is None:
            return forecast
        self._about, self._times = forecast, 0
        self._risen_at = self._step = forecast.step
        return self._with(forecast, chosen, self._do(chosen, forecast))

    def _do(self, chosen: str, forecast: Forecast) -> Done | Cannot:
        self._times += 1
        if chosen == "lower_lr":
            return self._lower(is_urgent=forecast.severity == "critical")
        if chosen == "clip":
            return self._clip()
        situation = dataclasses.replace(self._job.situation(), module=forecast.where)
        done = act(RecoveryStrategy.RAISE_PRECISION, situation, self._job.config, Trouble())
        if isinstance(done, Done) and done.undo is not None:
            self._undo.append(done.undo)
        return done

    def _lower(self, *, is_urgent: bool) -> Done | Cannot:
        optimizer, factor = self._optimizer, self._job.config.lr_reduction_factor
        factor = factor**3 if is_urgent else factor
        before = max(rates_of(optimizer), default=0.0)
        if not before > 0:
            return Cannot("there is no learning rate above 0")
        self._multiply_rates(factor)
        self._undo.append(lambda: self._multiply_rates(1 / factor))
        after = max(rates_of(optimizer))
        return Done(f"the learning rate went from {before:.3g} to {after:.3g}")

    def _multiply_rates(self, factor: float) -> None:
        schedulers = self._job.parts.schedulers or schedulers_of(self._optimizer)
        lower_rates(self._optimizer, schedulers, factor)

    def _clip(self) -> Done | Cannot:
        if self._job.is_distributed:
            return Cannot("each rank would clip by itself")
        if self._undo:
            return Cannot("gradients are clipped already")
        limit = self._job.config.grad_clip_value or 1.0

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            clip_gradients(self._job.parts.model or optimizer, limit)

        self._undo.append(self._optimizer.register_step_pre_hook(before_step).remove)
        return Done(f"gradients are clipped to a norm of {limit:g}")

    def _answer_spike(self, forecast: Forecast) -> Forecast:
        chosen = self._job.config.on_spike
        if chosen is None or self._job.is_distributed or chosen == "skip":
            return forecast  # one rank must not do this alone; a step is skipped by `skips`
        if chosen == "lower_lr":
            self._about, self._times = forecast, _MOST
            self._risen_at = self._step = forecast.step
            return self._with(forecast, chosen, self._lower(is_urgent=False))
        return self._with(forecast, chosen, self._job.rewind(step=forecast.step))

    def _with(self, forecast: Forecast, strategy: str, done: Done | Cannot) -> Forecast:
        detail = done.detail if isinstance(done, Done) else f"not possible: {done.reason}"
        return dataclasses.replace(forecast, outcome=Outcome(strategy=strategy, detail=detail))

    def skip(self, pairs: Any) -> None:
        """Leave out the update of a step whose loss is a spike: without gradients nothing moves."""
        put_gradients([(param, None) for param, _ in pairs])

    def stepped(self, step: int, *, is_rising: bool) -> Forecast | None:
        """An update was made: do more while the trend goes on, and undo all when it is gone."""
        about = self._about
        if about is None:
            return None
        if is_rising:
            self._risen_at = step
            wants_more = self._times < _MOST and self._job.config.on_forecast == "lower_lr"
            if wants_more and step - self._step >= _AGAIN_AFTER:
                self._step = step
                urgent = dataclasses.replace(about, step=step, severity="critical")
                return self._with(urgent, "lower_lr", self._do("lower_lr", urgent))
            return None
        if step - self._risen_at < self._calm:
            return None
        return self._finish(about, step)

    def _finish(self, about: Forecast, step: int) -> Forecast | None:
        undo, self._undo, self._about = self._undo[::-1], [], None
        self._calm *= 4
        if not undo:
            return None
        for each in undo:
            each()
        outcome = Outcome(strategy="undo", detail=f"the trend is gone since step {self._risen_at}")
        return dataclasses.replace(
            about,
            step=step,
            steps_left=None,
            steps_low=None,
            steps_high=None,
            severity="info",
            message=f"{about.where or 'training'}: the trend is gone; what was done is undone",
            time=time.time(),
            evidence=(),
            outcome=outcome,
        )

    def close(self) -> None:
        """Leave nothing behind that is not the user's own; a lowered rate stays."""
        if self._job.config.on_forecast != "lower_lr":
            for undo in self._undo[::-1]:
                undo()
        self._undo.clear()
