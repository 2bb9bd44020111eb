"""What a trainer writes to the log, and the records it is made from."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stayfinite.amp.events import Callbacks, LogEvent, StepEvent
from stayfinite.amp.scaler import DynamicLossScaler
from stayfinite.amp.update import Done
from stayfinite.detect.reports import report_on
from stayfinite.records import Incident, NaNReport

logger = logging.getLogger("stayfinite")


class Teller:
    """Tells log and callbacks of each batch and incident, and keeps the incidents in the list.

    `bad_losses` are the bad losses and terms of the window that is under way, by name. `log`
    gives a function that logs a bad value and its step, or None once there is nobody to log.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        *,
        optimizer: Optimizer,
        scaler: DynamicLossScaler | None,
        bad_losses: dict[str, Tensor],
        incidents: list[Incident],
        log: Callable[[], Callable[[NaNReport, int], None] | None],
    ) -> None:
        self.callbacks = Callbacks(callbacks)
        self.incidents = incidents
        self._log_recovery = log
        self._optimizer, self._scaler, self._bad_losses = optimizer, scaler, bad_losses
        self._told = 0

    @property
    def news(self) -> list[Incident]:
        """The incidents since the last batch was done."""
        return self.incidents[self._told :]

    def noticed(self, incident: Incident) -> None:
        """The guard has found and answered a bad step."""
        reports = with_terms(incident.reports, self._bad_losses)
        incident = dataclasses.replace(incident, reports=reports)
        self.incidents.append(incident)
        log = self._log_recovery()
        if log is not None and incident.reports:
            log(incident.reports[0], incident.step)
        self.callbacks.tell("on_nan", incident)

    def incident_of(self, report: NaNReport, step: int) -> Incident:
        """The incident of this step that the report is about; one of its own where there is none.

        The report of a step that the trainer has not answered says what to do.
        """
        known = [each for each in self.incidents if each.step == step]
        matching = (each for each in reversed(known) if report in each.reports)
        return next(matching, Incident(step=step, reports=(report,)))

    def batch_done(self, done: Done | None, *, step: int, epoch: int) -> None:
        """A batch is over, without an abort; `done` is None if it was skipped or recovered."""
        news, self._told = self.news, len(self.incidents)
        for incident in news:
            self.callbacks.tell("on_recovery", incident)
        was_update = done is not None and done.was_update
        if done is not None and was_update:
            self._log(done, step=step, epoch=epoch)
        loss = None if done is None else done.kept_loss
        event = StepEvent(step=step, epoch=epoch, loss=loss, was_update=was_update)
        self.callbacks.tell("on_step", event)

    def _log(self, done: Done, *, step: int, epoch: int) -> None:
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        event = log_event(done, step=step, epoch=epoch, optimizer=self._optimizer, scale=scale)
        if event is not None:
            logger.info("%s", log_line(event))
            self.callbacks.tell("on_log", event)


def log_event(
    done: Done, *, step: int, epoch: int, optimizer: Optimizer, scale: float
) -> LogEvent | None:
    """The numbers of an update; None when no statistics were taken of it."""
    if done.before is None or done.after is None:
        return None
    return LogEvent(
        step=step,
        epoch=epoch,
        loss=float(done.loss),
        terms={name: float(term) for name, term in done.terms.items()},
        norm=done.before.norm,
        norm_after_clipping=done.after.norm,
        largest=done.before.largest,
        learning_rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
        scale=scale,
    )


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
    first = incident.reports[0] if incident.reports else None
    what = f"{first.location} is {first.nan_type.word}" if first else "a value is not finite"
    others = len(incident.reports) - 1
    more = f" and {others} more tensor{'s' * (others > 1)}" if others > 0 else ""
    origin, diagnosis, outcome = incident.origin, incident.diagnosis, incident.outcome
    where = f", from {origin.file}:{origin.line}" if origin and origin.file else ""
    why = f". {diagnosis.cause}: {diagnosis.why} {diagnosis.fix}" if diagnosis else "."
    did = f" Done: {outcome.strategy}: {outcome.detail}." if outcome else ""
    return f"step {incident.step}: {what}{more}{where}{why}{did}"


def with_terms(
    reports: tuple[NaNReport, ...], bad_losses: dict[str, Tensor]
) -> tuple[NaNReport, ...]:
    """The reports with one for each bad loss term, which comes before the loss it spoils."""
    seen = {report.location for report in reports}
    terms = [report_on(name, t) for name, t in bad_losses.items() if name not in seen]
    return (*sorted(terms, key=lambda report: report.location == "loss"), *reports)
