"""What is done about a forecast or a spike, before anything is bad; undone when it is over."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from stayfinite.clip import clip_gradients
from stayfinite.records import Forecast, Outcome, Severity
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
from stayfinite.training import pairs_of, params_of, put_gradients

if TYPE_CHECKING:
    from stayfinite.guard.job import Job

_AGAIN_AFTER = 4  # steps in which a trend may show that it has been broken
_RISE = 0.5  # doublings beyond the highest so far with which the trend goes on
_MOST = 6  # times that the rate is lowered before it has been calm
_CALM = 128  # steps without a rise before something is undone
_LONGER = 4  # times as long, when the trend comes back after that
_OLDEST = sys.maxsize
_OF_PRECISION = ("activation", "gradient", "attention_logits")
_OF_NO_TREND = ("loss_scale", "loss_spike", "grad_norm_spike")  # the outlook does not follow them

_Kind = Literal["lower_lr", "clip", "raise_precision"]


@dataclass(frozen=True, kw_only=True)
class _Measure:
    """Something that was done and lasts; `undo` where more has to be done than to forget it."""

    kind: _Kind
    undo: Callable[[], None] | None = None


class Precaution:
    """Answers the forecasts of one job as its configuration says.

    An answer is the forecast itself, with its `outcome`. It lasts as long as the trend, that is, as
    long as what was told comes nearer to its limit; then it is taken back, the last one first.

    A rate is lowered for the time of each update only. Between updates the optimizer has the
    user's own, so that schedules, loops that set it, checkpoints and snapshots know nothing of
    this, and an update is never made with more.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.skipped = False  # whether the update of this step was left out as a spike
        self._taken: list[_Measure] = []
        self._lowered: list[tuple[dict[str, Any], Any, Any]] = []  # group, its own rate, the lower
        self._about: Forecast | None = None
        self._times = 0  # that the rate was lowered
        self._went_back = False
        self._step = self._risen_at = 0  # of the last answer, and of the last rise
        self._undone_at: int | None = None
        self._room = (
            math.inf
        )  # the least so far, in steps of `_RISE`; after an undo, that of a calm
        self._calmly = math.inf  # the least in the second half of the calm that is under way
        self._calm = _CALM

    @property
    def is_at_work(self) -> bool:
        """Whether something was done that may have to be done again, or undone."""
        return self._about is not None

    @property
    def _optimizer(self) -> Optimizer:
        return self._job.parts.optimizer

    @property
    def _factor(self) -> float:
        cuts = sum(measure.kind == "lower_lr" for measure in self._taken)
        return float(self._job.config.lr_reduction_factor**cuts)

    def rate(self) -> float | None:
        """The rate of the first group in updates, where that is not its own, and a number."""
        rate: Any = self._optimizer.param_groups[0].get("lr")
        is_own = self._factor == 1 or rate is None or isinstance(rate, Tensor)
        return None if is_own else float(rate * self._factor)

    def answered(self, forecast: Forecast) -> Forecast:
        """The forecast, with what was done about it if that was asked for."""
        if forecast.is_spike:
            return self._answer_spike(forecast)
        chosen = self._job.config.on_forecast
        if chosen is None:
            return forecast
        if self._job.is_distributed:  # what one rank foretells, the others do not
            return _with(forecast, chosen, Cannot("each rank would act by itself"))
        self._begin(forecast)
        done: Done | Cannot
        if chosen == "lower_lr":
            done = self._lower(goes_back=self._job.config.lower_lr_goes_back is not False)
        elif chosen == "clip":
            done = self._clip()
        else:
            done = self._raise_precision(forecast)
        return _with(forecast, chosen, done)

    def _answer_spike(self, forecast: Forecast) -> Forecast:
        chosen = self._job.config.on_spike
        if chosen is None or forecast.signal != "loss_spike":
            return forecast
        if self._job.is_distributed:
            return _with(forecast, chosen, Cannot("each rank would act by itself"))
        if chosen == "skip":
            late = Cannot("the loss was still on its device when the update was made")
            return _with(forecast, chosen, Done("the step was skipped") if self.skipped else late)
        if chosen == "lower_lr":
            self._begin(forecast)
            return _with(forecast, chosen, self._lower())
        config = self._job.config
        back = self._job.go_back(config.rewind_snapshots)
        if isinstance(back, Done) and config.rewind_skip_batches:
            self._job.manager.batches_to_skip = config.rewind_skip_batches
            skips = f"; the next {config.rewind_skip_batches} batches are skipped"
            back = dataclasses.replace(back, detail=back.detail + skips)
        return _with(forecast, chosen, back)

    def _begin(self, about: Forecast) -> None:
        """A trend is told, or a spike: a new one, or that which is being answered already."""
        before, step = self._about, about.step
        if before is None:
            self._times, self._went_back, self._room = 0, False, math.inf
            if self._undone_at is not None and step - self._undone_at > 8 * self._calm:
                self._calm, self._undone_at = _CALM, None  # this is another trend
        elif (before.signal, before.where) != (about.signal, about.where) and not about.is_spike:
            self._room = math.inf  # that of something else
        if before is None or not about.is_spike:
            self._about = about
        self._step = step
        self._rises(step)

    def _rises(self, step: int) -> None:
        """What was told goes on, or begins again."""
        if self._undone_at is not None and self._undone_at >= self._risen_at:
            self._calm *= _LONGER  # what was undone was needed
        self._risen_at, self._calmly = step, math.inf

    def _lower(self, *, goes_back: bool = False, is_urgent: bool = False) -> Done | Cannot:
        before = max(rates_of(self._optimizer), default=0.0)
        if not before > 0:
            return Cannot("there is no learning rate above 0")
        if isinstance(self._optimizer, LBFGS):
            return Cannot("LBFGS reads its learning rate before it is known what the update is")
        if self._times >= _MOST:
            return Cannot(f"the learning rate was lowered {_MOST} times already")
        self._times += 1
        # What is lowered at once is given back in parts, so that it is seen when it is too much.
        self._taken += [_Measure(kind="lower_lr")] * (3 if is_urgent else 2)
        said = f"updates are made with {self._factor:.3g} of the learning rate"
        said += f", {before * self._factor:.3g} instead of {before:.3g}"
        if not goes_back or self._went_back:
            return Done(said)
        back = self._job.go_back(_OLDEST)
        if isinstance(back, Cannot):
            return Done(f"{said}; no going back: {back.reason}")
        self._went_back = True
        return Done(f"{back.detail}; {said}")

    def _clip(self) -> Done | Cannot:
        limit = self._limit
        if any(measure.kind == "clip" for measure in self._taken):
            return Cannot(f"gradients are clipped already, to a norm of {limit:g}")
        self._taken.append(_Measure(kind="clip"))
        return Done(f"gradients are clipped to a norm of {limit:g}")

    @property
    def _limit(self) -> float:
        return self._job.config.grad_clip_value or 1.0

    def _raise_precision(self, forecast: Forecast) -> Done | Cannot:
        if forecast.signal not in _OF_PRECISION:
            name = _NAMES.get(forecast.signal, forecast.signal)
            return Cannot(f"{name} is no matter of one module's precision")
        # The gradients belong to an update that was made, so there are none to drop.
        situation = self._job.situation(module=forecast.where, will_rerun=True)
        # An update is made outside of autocast: only the dtype tells that there is one.
        in_half = forecast.dtype in ("float16", "bfloat16")
        trouble = Trouble(step=forecast.step, cause="low_precision_overflow" if in_half else None)
        done = act(RecoveryStrategy.RAISE_PRECISION, situation, self._job.config, trouble)
        if isinstance(done, Done) and done.undo is not None:
            self._taken.append(_Measure(kind="raise_precision", undo=done.undo))
        return done

    def skip(self) -> None:
        """Leave out the update of a step whose loss is a spike: without gradients nothing moves."""
        self.skipped = True
        put_gradients([(param, None) for param, _ in pairs_of(self._optimizer)])

    def before_update(self, flag: Tensor | None = None) -> None:
        """The update comes: clip its gradients and lower its rate, unless the flag says it is bad.

        Nothing is done while a CUDA graph is recorded, which would keep it for ever.
        """
        if not self._taken:
            return
        on_cuda = any(param.is_cuda for param in params_of(self._optimizer))
        if on_cuda and torch.cuda.is_current_stream_capturing():
            return
        self.after_update()  # of one that raised, or for a step() in a step()
        if flag is not None and bool(flag):  # host sync
            return
        optimizer = self._optimizer
        if any(measure.kind == "clip" for measure in self._taken):
            # With a scaler, a fused optimizer divides by the scale itself, in its update.
            scale = getattr(optimizer, "grad_scale", None)
            limit = self._limit * (1.0 if scale is None else float(scale))  # host sync
            if math.isfinite(limit):
                clip_gradients(optimizer, limit, drop="nothing")  # what is bad stays to be seen
        if (factor := self._factor) < 1:
            self._lower_groups(factor)

    def _lower_groups(self, factor: float) -> None:
        tensors: dict[int, Tensor] = {}
        for group in self._optimizer.param_groups:
            own = group.get("lr")
            if isinstance(own, Tensor):
                if id(own) not in tensors:  # in place, because a captured graph reads this one
                    tensors[id(own)] = own
                    self._lowered.append((group, own.clone(), own))
                    own.mul_(factor)
            elif own is not None:
                group["lr"] = own * factor
                self._lowered.append((group, own, group["lr"]))

    def after_update(self) -> None:
        """Give the optimizer its own rates back, but for those that were set in the meantime."""
        lowered, self._lowered = self._lowered, []
        for group, own, lower in lowered:
            if group.get("lr") is not lower:
                continue
            if isinstance(lower, Tensor):
                lower.copy_(own)
            else:
                group["lr"] = own

    def stepped(self, step: int, *, room: float | None, is_rising: bool) -> Forecast | None:
        """An update was made: do more while the trend goes on, undo it when it is gone.

        `room` has the doublings that are left of what was told, None where that is not known.
        """
        about = self._about
        if about is None:
            return None
        if room is not None and about.signal not in _OF_NO_TREND:
            if self._room == math.inf:
                self._room = room
            if is_rising and room < self._room - _RISE:
                self._room = room
                self._rises(step)
                wants_more = self._times < _MOST and self._job.config.on_forecast == "lower_lr"
                if wants_more and step - self._step >= _AGAIN_AFTER:
                    self._step = step
                    goes_back = self._job.config.lower_lr_goes_back is not False
                    done = self._lower(goes_back=goes_back, is_urgent=True)
                    said = _later(about, step, "critical", "the trend goes on")
                    return _with(said, "lower_lr", done)
        calm = step - max(self._risen_at, self._undone_at or 0)
        if room is not None and 2 * calm >= self._calm:
            self._calmly = min(self._calmly, room)
        return self._finish(about, step) if calm >= self._calm else None

    def _finish(self, about: Forecast, step: int) -> Forecast | None:
        self._times, self._went_back = 0, False
        if not self._taken:  # it has stayed away since all was undone
            self._about = None
            return None
        measure = self._taken.pop()
        if measure.undo is not None:
            measure.undo()
        self._undone_at = step
        if self._calmly < math.inf:  # what is beyond this, noise and all, is a new rise
            self._room, self._calmly = self._calmly, math.inf
        is_all = not self._taken
        what = "what was done is undone" if is_all else "the last that was done is undone"
        detail = f"it has not risen since step {self._risen_at}"
        if measure.kind == "lower_lr":
            part = f"{self._factor:.3g} of " if self._factor < 1 else ""
            detail += f"; updates are made with {part}the learning rate"
        said = _later(about, step, "info", f"the trend is gone; {what}")
        return dataclasses.replace(said, outcome=Outcome(strategy="undo", detail=detail))

    def forget_rate(self) -> None:
        """The rate is the user's from now on: a state was loaded that this was not about."""
        self.after_update()
        self._taken = [measure for measure in self._taken if measure.kind != "lower_lr"]

    def close(self) -> None:
        """Leave nothing behind that is not the user's own; a lowered rate stays."""
        self.after_update()
        if (factor := self._factor) < 1:
            schedulers = self._job.parts.schedulers or schedulers_of(self._optimizer)
            lower_rates(self._optimizer, schedulers, factor)
        for measure in self._taken[::-1]:
            if measure.undo is not None:
                measure.undo()
        self._taken.clear()
        self._about = None


_NAMES = {
    "divergence": "a divergence",
    "grad_norm": "the norm of all gradients",
    "loss": "the loss",
    "loss_scale": "the loss scale",
}


def _with(forecast: Forecast, strategy: str, done: Done | Cannot) -> Forecast:
    detail = done.detail if isinstance(done, Done) else f"not possible: {done.reason}"
    return dataclasses.replace(forecast, outcome=Outcome(strategy=strategy, detail=detail))


def _later(about: Forecast, step: int, severity: Severity, said: str) -> Forecast:
    """The same at a later step, of which nothing else was measured."""
    return Forecast(
        step=step,
        signal=about.signal,
        where=about.where,
        dtype=about.dtype,
        limit=about.limit,
        severity=severity,
        message=f"{about.where or 'training'}: {said}",
        time=time.time(),
        rank=about.rank,
    )
