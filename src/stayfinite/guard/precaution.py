"""What is done about a forecast or a spike, before anything is bad; undone when it is over."""

from __future__ import annotations

import dataclasses
import math
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
_RISE = 0.5  # doublings since the last answer with which the trend goes on
_MOST = 6  # times that the rate is lowered for one trend
_CALM = 128  # steps without a rise before it is undone; each time that it comes back, four times


class Precaution:
    """Answers the forecasts of one job as its configuration says.

    An answer is the forecast itself, with its `outcome`. It lasts as long as the trend, that is, as
    long as what was told comes nearer to its limit; then it is taken back, the last one first.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._undo: list[Callable[[], None]] = []
        self._about: Forecast | None = None
        self._times = self._step = self._risen_at = 0
        self._room = math.inf  # the least since the last answer
        self._calm = _CALM

    @property
    def is_at_work(self) -> bool:
        """Whether something was done that may have to be done again, or undone."""
        return self._about is not None

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
        if self._job.is_distributed:  # what one rank foretells, the others do not
            return self._with(forecast, chosen, Cannot("each rank would act by itself"))
        self._begin(forecast, times=0)
        return self._with(forecast, chosen, self._do(chosen, forecast))

    def _begin(self, about: Forecast, *, times: int) -> None:
        self._about, self._times, self._room = about, times, math.inf
        self._risen_at = self._step = about.step

    def _do(self, chosen: str, forecast: Forecast) -> Done | Cannot:
        self._times += 1
        if chosen == "lower_lr":
            goes_back = self._job.config.lower_lr_goes_back is not False
            return self._lower(is_urgent=forecast.severity == "critical", goes_back=goes_back)
        if chosen == "clip":
            return self._clip()
        situation = dataclasses.replace(self._job.situation(), module=forecast.where)
        # An update is made outside of autocast: only the dtype tells that there is one.
        in_half = forecast.dtype in ("float16", "bfloat16")
        trouble = Trouble(step=forecast.step, cause="low_precision_overflow" if in_half else None)
        done = act(RecoveryStrategy.RAISE_PRECISION, situation, self._job.config, trouble)
        if isinstance(done, Done) and done.undo is not None:
            self._undo.append(done.undo)
        return done

    def _lower(self, *, is_urgent: bool, goes_back: bool = False) -> Done | Cannot:
        optimizer, factor = self._optimizer, self._job.config.lr_reduction_factor
        times = 3 if is_urgent else 2
        before = max(rates_of(optimizer), default=0.0)
        if not before > 0:
            return Cannot("there is no learning rate above 0")
        back = None
        if goes_back:
            back = self._job.rewind(step=self._step, by=RecoveryStrategy.LOWER_LR)
        # Going back has lowered it once.
        self._multiply_rates(factor ** (times - 1 if isinstance(back, Done) else times))
        # What was lowered at once is given back in parts, so that it is seen when it is too much.
        self._undo += [lambda: self._multiply_rates(1 / factor)] * times
        after = max(rates_of(optimizer))
        lowered = f"the learning rate went from {before:.3g} to {after:.3g}"
        if not isinstance(back, Done) or back.went_back_to is None:
            return Done(lowered)
        return Done(f"back at the snapshot of step {back.went_back_to}; {lowered}")

    def _multiply_rates(self, factor: float) -> None:
        schedulers = self._job.parts.schedulers or schedulers_of(self._optimizer)
        lower_rates(self._optimizer, schedulers, factor)

    def _clip(self) -> Done | Cannot:
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
            self._begin(forecast, times=_MOST)
            return self._with(forecast, chosen, self._lower(is_urgent=False))
        return self._with(forecast, chosen, self._job.rewind(step=forecast.step))

    def _with(self, forecast: Forecast, strategy: str, done: Done | Cannot) -> Forecast:
        detail = done.detail if isinstance(done, Done) else f"not possible: {done.reason}"
        return dataclasses.replace(forecast, outcome=Outcome(strategy=strategy, detail=detail))

    def skip(self, pairs: Any) -> None:
        """Leave out the update of a step whose loss is a spike: without gradients nothing moves."""
        put_gradients([(param, None) for param, _ in pairs])

    def stepped(self, step: int, *, room: float | None) -> Forecast | None:
        """An update was made: do more while the trend goes on, undo it when it is gone.

        `room` has the doublings that are left of what was told, None after a spike.
        """
        about = self._about
        if about is None:
            return None
        if room is not None and not about.is_spike:
            if self._room == math.inf:
                self._room = room
            if room < self._room - _RISE:
                self._risen_at = step
                wants_more = self._times < _MOST and self._job.config.on_forecast == "lower_lr"
                if wants_more and step - self._step >= _AGAIN_AFTER:
                    self._calm *= 1 if self._undo else 4  # it came back when all was undone
                    self._step, self._room = step, room
                    urgent = dataclasses.replace(about, step=step, severity="critical")
                    return self._with(urgent, "lower_lr", self._do("lower_lr", urgent))
        if step - self._risen_at < self._calm:
            return None
        return self._finish(about, step)

    def _finish(self, about: Forecast, step: int) -> Forecast | None:
        if not self._undo:  # it has stayed away since all was undone
            self._about = None
            return None
        gone_since, self._risen_at = self._risen_at, step
        self._undo.pop()()
        self._times, self._room, is_all = 0, math.inf, not self._undo
        what = "what was done is undone" if is_all else "the last that was done is undone"
        outcome = Outcome(strategy="undo", detail=f"the trend is gone since step {gone_since}")
        return dataclasses.replace(
            about,
            step=step,
            steps_left=None,
            steps_low=None,
            steps_high=None,
            severity="info",
            message=f"{about.where or 'training'}: the trend is gone; {what}",
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
