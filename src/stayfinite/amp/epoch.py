"""What is around the updates of a trainer: progress, evaluation, callbacks, schedulers."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stayfinite.amp.config import AMPConfig
from stayfinite.amp.update import BatchLosses, BatchResult, Update
from stayfinite.detect.detector import bad_reports, report_on
from stayfinite.errors import ConfigError, InputError
from stayfinite.nested import named_tensors
from stayfinite.records import Forecast, Incident, NaNReport
from stayfinite.report.sinks import unchanged_random
from stayfinite.safely import Safely
from stayfinite.text import forecast_line, one_line, what_was_done

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("stayfinite")
_SECONDS = 0.1  # between two looks at the screen


class ProgressBar:
    """One line for each epoch: how far, the loss, and how many batches were skipped."""

    def __init__(self, *, epochs: int, console: Console | None = None) -> None:
        self._epochs = epochs
        self._task: Any = None
        self._drawn = 0.0
        with unchanged_random():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as TimeColumn

            console = console or Console(stderr=True)
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[said]}"),
                TimeColumn(),
                console=console,
                disable=not console.is_terminal,
                auto_refresh=False,  # a thread would draw random numbers at any time
            )

    def begin_epoch(self, number: int, length: int | None) -> None:
        with unchanged_random():
            description = f"epoch {number + 1}/{self._epochs}"
            self._task = self._progress.add_task(description, total=length, said="")

    def advance(self, *, loss: Any, skipped: int) -> None:
        """One batch is done. The loss is read from its device only when it is shown."""
        if self._progress.disable:
            return
        self._progress.advance(self._task)
        if time.monotonic() - self._drawn >= _SECONDS:
            self._show(loss, skipped)

    def end_epoch(self, *, loss: Any, skipped: int) -> None:
        """The last batch of an epoch is done."""
        if not self._progress.disable:
            self._show(loss, skipped)

    def _show(self, loss: Any, skipped: int) -> None:
        said = "skipped" if loss is None else f"loss {float(loss):.4g}"  # host sync
        said += f", {skipped} skipped" if skipped else ""
        with unchanged_random():
            self._progress.update(self._task, said=said)
            self._progress.refresh()
        self._drawn = time.monotonic()

    def __enter__(self) -> Self:
        with unchanged_random():
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with unchanged_random():
            self._progress.stop()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the finite batches, each sample with the same weight; NaN if there was none.

    `bad` has a report on each loss or term that is not finite, such as "batches.3.loss". These
    are in no mean.
    """

    loss: float
    terms: dict[str, float] = field(default_factory=dict)
    batches: int
    samples: int
    bad: tuple[NaNReport, ...] = ()


@torch.no_grad()
def evaluate(
    batches: Iterable[Any], *, model: nn.Module, losses_of_batch: Callable[[Any], BatchLosses]
) -> Evaluation:
    """What the model makes of these batches; its train flags are as before afterwards."""
    count, bad, sums = 0, list[NaNReport](), dict[str, tuple[float, int]]()
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for batch in batches:
            losses = losses_of_batch(batch)
            named = {"loss": losses.total} | {f"loss.{n}": t for n, t in losses.terms.items()}
            found = bad_reports((f"batches.{count}.{name}", t) for name, t in named.items())
            bad += found
            count += 1
            is_bad = {report.location.split(".", 2)[2] for report in found}
            # The length of the first tensor in the batch that has one; else 1.
            sizes = (tensor.shape[0] for _, tensor in named_tensors(batch, "") if tensor.dim())
            size = next(sizes, 1)
            for name, value in named.items():
                if not is_bad & {"loss", name}:  # with a bad total none of the terms counts
                    total, samples = sums.get(name, (0.0, 0))
                    sums[name] = total + float(value) * size, samples + size  # host sync
    finally:
        for module, flag in flags:
            module.training = flag
    means = {name: total / max(1, samples) for name, (total, samples) in sums.items()}
    return Evaluation(
        loss=means.pop("loss", math.nan),
        terms={name.removeprefix("loss."): mean for name, mean in means.items()},
        batches=count,
        samples=sums.get("loss", (0.0, 0))[1],
        bad=tuple(bad),
    )


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One batch is done. `loss` is None when it was skipped; `was_update` when weights moved."""

    step: int
    epoch: int
    loss: Tensor | None
    was_update: bool


@dataclass(frozen=True, kw_only=True)
class EpochEvent:
    """One epoch is done. `loss` is the mean over its finite batches, NaN if there was none."""

    epoch: int
    step: int
    loss: float
    batches: int
    skipped_batches: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LogEvent:
    """Numbers of one update, every `log_every` of them.

    The norms are of all gradients together, `largest` of single parameters before clipping, the
    largest first. `learning_rates` has one number for each group of the optimizer.
    """

    step: int
    epoch: int
    loss: float
    terms: dict[str, float] = field(default_factory=dict)
    norm: float
    norm_after_clipping: float
    largest: tuple[tuple[str, float], ...]
    learning_rates: tuple[float, ...]
    scale: float


class Callback(Protocol):
    """Who is told; derive from it and change what you need, or give any object with some of these.

    A callback that raises is logged once and called again; only TrainingAbortedError leaves it,
    and ends the training.
    """

    def on_step(self, event: StepEvent) -> None:
        """A batch is done."""

    def on_nan(self, incident: Incident) -> None:
        """A bad value was found; `incident.outcome` is what was done about it."""

    def on_recovery(self, incident: Incident) -> None:
        """Training goes on after this incident."""

    def on_epoch(self, event: EpochEvent) -> None:
        """An epoch of `fit` is done."""

    def on_log(self, event: LogEvent) -> None:
        """Statistics of this update."""


class Teller:
    """Tells log and callbacks of each batch and incident, and keeps the incidents in the list.

    `log` gives a function that logs a bad value and its step, or None once there is nobody to log.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        update: Update,
        *,
        log: Callable[[], Callable[[NaNReport, int], None] | None],
    ) -> None:
        message = "callback {} failed; training goes on"
        self._callbacks = [
            (callback, Safely(message.format(type(callback).__name__))) for callback in callbacks
        ]
        self._update, self._log_recovery = update, log
        self._told = 0

    def tell(self, name: str, event: Any) -> None:
        """Call the method of this name on each callback that has it, in the order they came in."""
        for callback, safely in self._callbacks:
            method = getattr(callback, name, None)
            if method is not None:
                with safely:
                    method(event)

    @property
    def news(self) -> list[Incident]:
        """The incidents since the last batch was done."""
        return self._update.incidents[self._told :]

    def add_incident(self, incident: Incident) -> None:
        """The guard has found and answered a bad step."""
        seen = {report.location for report in incident.reports}
        bad_losses = self._update.bad_losses.items()
        terms = [report_on(name, loss) for name, loss in bad_losses if name not in seen]
        terms.sort(key=lambda report: report.location == "loss")  # which the others spoil
        incident = dataclasses.replace(incident, reports=(*terms, *incident.reports))
        self._update.incidents.append(incident)
        log = self._log_recovery()
        if log is not None and incident.reports:
            log(incident.reports[0], incident.step)
        self.tell("on_nan", incident)

    def on_forecast(self, forecast: Forecast) -> None:
        """Something is going to overflow or diverge, or has jumped."""
        level = logging.INFO if forecast.severity == "info" else logging.WARNING
        logger.log(level, "%s", forecast_line(forecast))
        self.tell("on_forecast", forecast)

    def incident_of(self, report: NaNReport, step: int) -> Incident:
        """The incident of this step that the report is about; one of its own where there is none.

        The report of a step that the trainer has not answered says what to do.
        """
        known = [each for each in self._update.incidents if each.step == step]
        matching = (each for each in reversed(known) if report in each.reports)
        return next(matching, Incident(step=step, reports=(report,)))

    def end_batch(self, done: BatchResult | None, *, epoch: int) -> None:
        """A batch is over, without an abort; `done` is None if it was skipped or recovered."""
        step = self._update.window.updates
        news, self._told = self.news, len(self._update.incidents)
        for incident in news:
            self.tell("on_recovery", incident)
        was_update = done is not None and done.was_update
        if done is not None and was_update:
            self._log(done, step=step, epoch=epoch)
        loss = None if done is None else done.loss
        event = StepEvent(step=step, epoch=epoch, loss=loss, was_update=was_update)
        self.tell("on_step", event)

    def _log(self, done: BatchResult, *, step: int, epoch: int) -> None:
        if done.loss is None or done.before is None or done.after is None:
            return
        scaler, groups = self._update.scaler, self._update.optimizer.param_groups
        event = LogEvent(
            step=step,
            epoch=epoch,
            loss=float(done.loss),
            terms={name: float(term) for name, term in done.terms.items()},
            norm=done.before.norm,
            norm_after_clipping=done.after.norm,
            largest=done.before.largest,
            learning_rates=tuple(float(group["lr"]) for group in groups),
            scale=1.0 if scaler is None else scaler.get_scale(),
        )
        logger.info("%s", log_line(event))
        self.tell("on_log", event)


def log_line(event: LogEvent) -> str:
    """The event in one line."""
    terms = ", ".join(f"{name} {value:.4g}" for name, value in event.terms.items())
    norm = f"{event.norm:.4g}"
    if event.norm_after_clipping != event.norm:
        norm += f" clipped to {event.norm_after_clipping:.4g}"
    largest = ", ".join(f"{name} {value:.3g}" for name, value in event.largest[:3])
    rates = ", ".join(f"{rate:.3g}" for rate in event.learning_rates)
    parts = [
        f"loss {event.loss:.4g}" + (f" ({terms})" if terms else ""),
        f"gradient norm {norm}" + (f" (largest: {largest})" if largest else ""),
        f"lr {rates}",
        *([f"scale {event.scale:g}"] if event.scale != 1.0 else []),
    ]
    return f"step {event.step}: " + "; ".join(parts)


def incident_line(incident: Incident) -> str:
    """The incident in one line: what, where, why, and what was done."""
    diagnosis = incident.diagnosis
    why = f". {diagnosis.cause}: {diagnosis.why} {diagnosis.fix}" if diagnosis else "."
    did = f" Done: {what_was_done(incident)}." if incident.outcome else ""
    return f"{one_line(incident)}{why}{did}"


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
        self._config, self._model, self._every = config, model, every
        self._average = None if ema is None else _average_of(ema)

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
                f"warmup_epochs is {self._config.warmup_epochs:g}, but the length of an "
                "epoch is unknown: give batches_per_epoch."
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


def _average_of(ema: Any) -> Any:
    if callable(getattr(ema, "update_parameters", None)):
        return ema.update_parameters
    if callable(getattr(ema, "update", None)):
        return lambda model: ema.update()
    raise InputError(
        f"ema is a {type(ema).__name__}; it must have update_parameters(model), "
        "as torch.optim.swa_utils.AveragedModel has, or update()."
    )


def set_learning_rate(optimizer: Optimizer, rate: float, *, scheduler: Any = None) -> None:
    """As if the optimizer had been made with lr=rate: groups with a rate of their own keep it.

    ConfigError where a scheduler was made for another rate: it would bring that one back.
    """
    default = optimizer.defaults.get("lr")
    if scheduler is not None and _number(default) != rate:
        raise ConfigError(
            f"learning_rate is {rate:g}, but the scheduler was made for an optimizer with "
            f"lr={_number(default):g}. Make the optimizer with lr=config.learning_rate."
        )
    for group in optimizer.param_groups if scheduler is None else ():
        if _number(group.get("initial_lr", group["lr"])) == _number(default):
            _set_rate(group, rate)
    optimizer.defaults["lr"] = default.fill_(rate) if isinstance(default, Tensor) else rate


def _number(rate: Any) -> float:
    return math.nan if rate is None else float(rate)


def _set_rate(group: dict[str, Any], rate: float) -> None:
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
        return {"updates": self.updates, "length": self.length, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.length = state["updates"], state["length"]
        self.base_lrs = list(state["base_lrs"])

    def _apply(self) -> None:
        # Once it is over the rates are the user's: nothing is written any more.
        if self.length is None or self.updates >= self.length:
            return
        part = (self.updates + 1) / self.length
        for group, rate in zip(self._optimizer.param_groups, self.base_lrs, strict=False):
            _set_rate(group, rate * part)
