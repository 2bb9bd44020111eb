"""Forecaster: what is going to overflow in a training, told before it does."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.detect.hooks import watch_backward
from stayfinite.distributed import rank
from stayfinite.living import Names
from stayfinite.prevent.forecast.outlook import (
    Outlook,
    Row,
    ScaleWatch,
    SpikeDetector,
    Trend,
    TrendRules,
    forecast_from,
    size_of_loss,
    spike_of,
)
from stayfinite.prevent.forecast.signals import ModuleOutputs, SignalSampler
from stayfinite.records import Forecast, Signal
from stayfinite.safely import Safely

_MOST_WAITING = 64  # losses on a device that nobody has copied yet
_MOST_OPTIMIZERS = 8  # where each parameter has its own, a few of them show what comes
_ABANDONED = 8  # turns of all optimizers without a step of one whose step is measured
_SAME = 64  # steps in which several optimizers tell the same


class Forecaster:
    """Watches signals of a training and says what will overflow or diverge, and in how many steps.

    Each attempted update is given to `stepped`, or seen between `attach()` and `close()`.
    Every 32 steps it measures activations, gradients and updates on their device; the result is
    read when it has arrived, so no step waits. While something rises, each step is measured.
    Each onset is reported once, to `on_forecast`, and kept in `forecasts`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    >>> x = torch.eye(2)
    >>> with Forecaster(model, optimizer) as forecaster:
    ...     for _ in range(40):
    ...         optimizer.zero_grad()
    ...         (model(x) ** 2).mean().backward()
    ...         optimizer.step()
    >>> forecaster.forecasts[0].signal in ("gradient", "activation", "loss", "grad_norm")
    True
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        on_forecast: Callable[[Forecast], None] | None = None,
        rules: TrendRules | None = None,
    ) -> None:
        self.forecasts: list[Forecast] = []
        self._optimizer, self._on_forecast = optimizer, on_forecast
        self._rules = rules or TrendRules()
        self._watched: weakref.WeakKeyDictionary[Optimizer, _Watched] = weakref.WeakKeyDictionary()
        self._last: _Watched | None = None  # the one that stepped last
        self._steps = 0  # of all optimizers
        self._told: dict[tuple[Signal, str], tuple[Any, int]] = {}  # by which optimizer, and when
        self._handles: list[Any] = []
        self._failures = Safely("stayfinite stops forecasting in this run")
        self._outputs = ModuleOutputs(model, self._failures)

    def attach(self) -> Forecaster:
        """Hear of the updates of the optimizer by a hook of its own; `close` removes it."""
        if self._optimizer is None:
            raise ValueError("a Forecaster without an optimizer is given its steps by `stepped`.")
        root: list[Any] = [None]

        def before_backward(roots: Any, gradients: Any) -> None:
            root[0] = next((each.detach() for each in roots if each.numel() == 1), root[0])

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            loss = root[0]
            if isinstance(loss, Tensor) and loss.is_cpu:
                loss = float(loss)
            self.stepped(optimizer, loss=loss)

        self._handles = [
            self._optimizer.register_step_post_hook(after_step),
            watch_backward(before_backward, lambda result: None),
        ]
        return self

    def __enter__(self) -> Forecaster:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.close()

    def stepped(
        self,
        optimizer: Optimizer,
        *,
        loss: float | Tensor | None = None,
        norm: float | Tensor | None = None,
        scale: float | None = None,
        skipped: bool = False,
        rate: float | None = None,
    ) -> list[Forecast]:
        """An update was attempted; what is to be reported now, mostly nothing.

        A loss on a device is copied from there, and read later. `scale` is that of a loss scaler,
        in the steps that it has skipped; `rate` the learning rate of this update, where it is not
        that of the optimizer.
        """
        if _is_captured(loss):
            return []
        if self._failures.has_failed:  # in a hook during the step, or before
            self.close()
            return []
        try:
            watched = self._last
            if watched is None or watched.optimizer() is not optimizer:
                watched = self._of(optimizer)
                if watched is None:
                    return []
                self._last = watched
            self._steps += 1
            watched.seen_at = self._steps
            told = watched.stepped(loss, norm, scale, skipped, rate)
            if len(self._watched) > 1:
                self._close_abandoned()
                told = [each for each in told if self._is_first(each, watched)]
        except Exception as error:
            self._failures.note(error)
            self.close()
            return []
        if told:
            self.forecasts += told
            if self._on_forecast is not None:
                for forecast in told:
                    self._on_forecast(forecast)
        return told

    def _of(self, optimizer: Optimizer) -> _Watched | None:
        watched = self._watched.get(optimizer)
        if watched is None and len(self._watched) < _MOST_OPTIMIZERS:
            watched = _Watched(optimizer, SignalSampler(self._outputs), self._rules)
            self._watched[optimizer] = watched
            weakref.finalize(optimizer, watched.sampler.close).atexit = False
        return watched

    def _close_abandoned(self) -> None:
        """An optimizer that makes no more steps keeps no hooks."""
        oldest = self._steps - _ABANDONED * len(self._watched)
        for watched in self._watched.values():
            if watched.sampler.is_open and watched.seen_at < oldest:
                watched.sampler.close()

    def _is_first(self, forecast: Forecast, watched: _Watched) -> bool:
        """Whether no other optimizer, whose steps see the same modules, has just told it."""
        place = forecast.signal, forecast.where
        teller, step = self._told.get(place, (None, 0))
        if teller not in (None, watched.optimizer) and self._steps - step < _SAME:
            return False
        self._told[place] = watched.optimizer, self._steps
        return True

    def is_spike(self, optimizer: Optimizer, loss: float) -> bool:
        """Whether this loss, of an update that is still to come, is far outside of the recent."""
        watched = self._watched.get(optimizer)
        return watched is not None and loss > watched.outlook.losses.limit

    def room(self, optimizer: Optimizer) -> float | None:
        """Doublings that are left of the last forecast; None before anything was."""
        watched = self._watched.get(optimizer)
        return None if watched is None else watched.outlook.room

    def is_rising(self, optimizer: Optimizer) -> bool:
        """Whether what the last forecast was of still rises, as of the last sample."""
        watched = self._watched.get(optimizer)
        return watched is not None and watched.outlook.is_rising

    def close(self) -> None:
        """Read what is still on its way, and leave no hook behind."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        for watched in list(self._watched.values()):
            watched.sampler.close()
        self._outputs.detach()


class _Watched:
    """One optimizer's training."""

    def __init__(self, optimizer: Optimizer, sampler: SignalSampler, rules: TrendRules) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.sampler = sampler
        self.seen_at = 0  # the last step of all optimizers that was its own
        self.outlook = Outlook(self.sampler.rows, rules)
        limit = float(np.finfo("f4").max)
        self._loss_rows = np.array([self.sampler.number("loss", None, None, limit=limit)])
        self._norm_row = self.sampler.number("grad_norm", None, torch.float32)
        self._step = 0
        self._far: deque[tuple[int, _Late]] = deque(maxlen=_MOST_WAITING)
        self._norms = SpikeDetector()
        self._scale = ScaleWatch()
        self._loss = math.nan
        self._rate: float | None = None  # in the last sample
        self._ended = 0.0  # when the last step was over

    def stepped(
        self, loss: Any, norm: Any, scale: float | None, skipped: bool, rate: float | None = None
    ) -> list[Forecast]:
        """What is to be told after a step; most steps only look at their loss."""
        step = self._step
        self._step = step + 1
        began = time.perf_counter()
        outlook = self.outlook
        told: list[Forecast] = []
        if isinstance(loss, Tensor):
            self._far.append((step, _Late(loss)))
        elif loss is not None:
            self._loss = loss
            if outlook.saw_loss(step, loss):
                told.append(self._spike(step, "loss_spike", loss, outlook.losses))
        found = self._scale.stepped(step, skipped=skipped, scale=scale)
        if found is not None:
            told.append(found)
        if self.sampler.is_open:
            self._take(step, norm, rate)
        elif self._ended:
            outlook.pace.steps.append(began - self._ended)
        if self._far or self.sampler.waiting:
            told += self._read()
        if outlook.is_due(step + 1) and (optimizer := self.optimizer()) is not None:
            self.sampler.open(optimizer)
        self._ended = time.perf_counter()
        return told

    def _take(self, step: int, norm: Any, rate: float | None) -> None:
        optimizer = self.optimizer()
        if optimizer is not None:
            self._rate = _rate_of(optimizer) if rate is None else rate
            self.sampler.take(optimizer, step=step, norm=norm)

    def _read(self) -> list[Forecast]:
        told = []
        while self._far and self._far[0][1].is_there():
            at, copy = self._far.popleft()
            self._loss = copy.value()
            if self.outlook.saw_loss(at, self._loss):
                told.append(self._spike(at, "loss_spike", self._loss, self.outlook.losses))
        for reading in self.sampler.ready():
            began = time.perf_counter()
            rows, values = reading.rows, reading.values
            if not math.isnan(self._loss):
                size = size_of_loss(self._loss, self.outlook.losses)
                rows = np.concatenate((rows, self._loss_rows))
                values = np.concatenate((values, (size,)))
            trend = self.outlook.learn(reading.step, rows, values, rate=self._rate)
            if trend is not None:
                told.append(self._forecast(trend))
            told += self._norm_spike(reading.step, rows, values)
            taken, self.sampler.seconds = self.sampler.seconds, 0.0
            self.outlook.pace.sampled(taken + time.perf_counter() - began)
        return told

    def _norm_spike(self, step: int, rows: Any, values: Any) -> list[Forecast]:
        at = np.flatnonzero(rows == self._norm_row)
        if not len(at) or not self._norms.add(value := float(values[at[0]])):
            return []
        return [self._spike(step, "grad_norm_spike", value, self._norms)]

    def _forecast(self, trend: Trend) -> Forecast:
        row, where = Row(signal="divergence"), ""
        if trend.row is not None:
            row = self.sampler.rows[trend.row]
            where = self._where(trend.row, row)
        return forecast_from(trend, row, where=where, outlook=self.outlook, rank=rank())

    def _where(self, number: int, row: Row) -> str:
        if row.signal == "loss":
            return "loss"
        owner = self.sampler.owner(number)
        if owner is None:
            return ""
        names = Names()
        if isinstance(owner, nn.Module):
            return names.module(owner)[1]
        return names.tensor(owner) or ""

    def _spike(self, step: int, signal: Signal, value: float, among: SpikeDetector) -> Forecast:
        return spike_of(signal, step=step, value=value, detector=among, rank=rank())


def _is_captured(loss: Any) -> bool:
    """Whether this step is recorded as a CUDA graph, in which nothing can be read."""
    is_cuda = isinstance(loss, Tensor) and loss.is_cuda
    return is_cuda and torch.cuda.is_current_stream_capturing()


def _rate_of(optimizer: Optimizer) -> float | None:
    """The rate of the first parameters; None where it is no number, or would be waited for."""
    rate = optimizer.param_groups[0].get("lr")
    if isinstance(rate, Tensor) and rate.is_cpu and rate.numel() == 1:
        return float(rate)
    return float(rate) if isinstance(rate, (int, float)) else None


class _Late:
    """A number on its way to the host."""

    def __init__(self, number: Tensor) -> None:
        self._there = number.detach().reshape(()).to("cpu", non_blocking=True)
        self._event = torch.Event(number.device)
        self._event.record()

    def is_there(self) -> bool:
        return bool(self._event.query())

    def value(self) -> float:
        return float(self._there)
