"""Ignite: a handler for the Engine that trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from stayfinite.detect.hooks import Attachment, together, wrapped
from stayfinite.errors import InputError
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job
from stayfinite.guard.watch import watch as watch_loop
from stayfinite.integrations import check_package
from stayfinite.integrations.shared import (
    OnNaN,
    guard_of,
    keep_bad_gradients,
    step_carefully,
    watch_options,
)
from stayfinite.records import Incident
from stayfinite.recover.config import RecoveryConfig
from stayfinite.report.alerts import AlertRule
from stayfinite.report.sinks import Sink
from stayfinite.safely import harmless

check_package("pytorch-ignite", extra="ignite")

from ignite.engine import Engine, Events  # noqa: E402

logger = logging.getLogger("stayfinite")
Update = Callable[[Engine, Any], Any]


class StayFinite:
    """Keeps an Engine's training finite: `StayFinite(model, optimizer).attach(trainer)`.

    A bad step is undone, run again under the tracer by the engine's own update function, so
    that its report has the line, and left out. Give it the scheduler too, of torch or of
    Ignite. A step that was skipped has the output of the one before it, so that averages and
    TerminateOnNan do not see it. on_nan="stop" raises TrainingAbortedError at the first bad
    step, "warn" only tells. With `prove_seconds`, experiments on a bad step may take so long:
    the update function is called again and again without its update, to find the bad samples
    and to prove the diagnosis. The other options are those of `stayfinite.watch`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any = None,
        *,
        scaler: Any = None,
        ema: Any = None,
        config: RecoveryConfig | None = None,
        on_nan: OnNaN = "recover",
        sinks: Iterable[Sink] | None = None,
        alerts: Iterable[AlertRule] = (),
        prove_seconds: float = 0.0,
    ) -> None:
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._options: dict[str, Any] = {
            "scheduler": scheduler,
            "ema": ema,
            **watch_options(config, on_nan, sinks, alerts, prove_seconds),
        }
        self.guard: Guard | None = None
        self._past: list[Incident] = []
        self._handles: list[Any] = []
        self._attachment = Attachment(lambda: None)

    @property
    def incidents(self) -> list[Incident]:
        """All that happened, over all runs of the engine."""
        return [*self._past, *(self.guard.incidents if self.guard is not None else ())]

    def attach(self, engine: Engine) -> Self:
        """Watch each run of this engine, until `detach()` or the end of a `with` block."""
        if not isinstance(engine, Engine):
            raise InputError(
                f"engine is a {type(engine).__name__}; it must be an ignite.engine.Engine."
            )
        if self._handles:
            raise InputError("this handler is attached already; detach() it first.")
        for event, handler in (
            (Events.STARTED, self._begin_run),
            (Events.TERMINATE, self._end_run),
            (Events.COMPLETED, self._end_run),
        ):
            self._handles.append(engine.add_event_handler(event, handler))
        return self

    def detach(self) -> None:
        """Leave torch and the engine as they were."""
        while self._handles:
            self._handles.pop().remove()
        self._end_run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _begin_run(self, engine: Engine) -> None:
        self._end_run()
        with harmless("attaching to an engine"):
            if guard_of(self._optimizer) is not None:
                logger.warning("StayFinite does nothing here: this optimizer has a guard already")
                return
            found = getattr(engine.state, "scaler", None)
            scaler = self._scaler if self._scaler is not None else found
            self.guard = watch_loop(self._model, self._optimizer, scaler=scaler, **self._options)
            for job in self.guard.jobs.values():
                self._attachment = _Steps(self.guard, job, self._end_run).attach(engine)

    def _end_run(self) -> None:
        guard, self.guard = self.guard, None
        if guard is None:
            return
        with harmless("leaving an engine"):
            guard.close()
            self._attachment.remove()
        self._past += guard.incidents


class _Steps:
    """The updates of one engine; `fails` is called when an error will end its run."""

    def __init__(self, guard: Guard, job: Job, fails: Callable[[], None]) -> None:
        self._guard, self._job, self._fails = guard, job, fails
        self._outputs: list[Any] = []  # the last good one
        self._was_left_out = False
        self._has_failed = False

    def attach(self, engine: Engine) -> Attachment:
        # Handlers that are added now come after those of the user.
        handles = [
            engine.add_event_handler(Events.ITERATION_COMPLETED, self.end_iteration),
            engine.add_event_handler(Events.EPOCH_STARTED, self._keep_what_follows),
            engine.add_event_handler(Events.EPOCH_COMPLETED, self._keep_what_follows),
        ]
        return together(
            keep_bad_gradients(self._job.parts.optimizer),
            # Nothing public stands around one call of the update function.
            wrapped(engine, "_process_function", self._around_update),
            *(Attachment(handle.remove) for handle in handles),
        )

    def _around_update(self, original: Update) -> Update:
        def update(engine: Engine, batch: Any) -> Any:
            made: list[Any] = []
            iteration = engine.state.iteration

            def update_at_its_time(given: Any) -> Any:
                """The update as the engine called it first, which may be some iterations ago."""
                now, engine.state.iteration = engine.state.iteration, iteration
                try:
                    made.append(original(engine, given))
                finally:
                    engine.state.iteration = now
                return made[-1]

            try:
                output = step_carefully(
                    self._guard, update_at_its_time, batch, gives_up=self._give_up
                )
            except BaseException:
                # As the engine asks itself: without such a handler the error ends the run.
                if Events.EXCEPTION_RAISED not in engine._event_handlers:
                    self._fails()
                raise
            if self._has_failed:
                return output
            with harmless("ending an update"):
                return self._output_after(output, made)
            return output

        return update

    def _give_up(self) -> None:
        self._has_failed = True
        self._fails()

    def _output_after(self, output: Any, made: list[Any]) -> Any:
        """The output; of a step that is bad, that of the last good one."""
        job = self._job
        self._was_left_out = not job.has_begun and not job.was_good
        if self._was_left_out:
            job.hold()
        if job.trouble is None and not self._was_left_out:
            self._outputs = [output]
            return output
        return (self._outputs or made or [None])[0]

    def end_iteration(self) -> None:
        """What handlers did after a step that was left out is taken back."""
        if self._was_left_out:
            with harmless("ending an iteration"):
                self._job.settle()
                self._job.hold()

    def _keep_what_follows(self) -> None:
        """What handlers do at the end or the beginning of an epoch is to stay."""
        if self._was_left_out:
            with harmless("ending an epoch"):
                self._job.forget_held()
                self._job.hold()
