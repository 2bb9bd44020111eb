"""Guard: the one place where detecting, locating, explaining and acting meet."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from stayfinite.detect.entrypoints import together, watch_backward, watch_loading, watch_scaling
from stayfinite.detect.hooks import Attachment, StepListener, watch_scalers, watch_steps
from stayfinite.detect.norms import finite_norm
from stayfinite.detect.reports import bad_reports
from stayfinite.detect.scan import all_finite, nonfinite
from stayfinite.detect.walk import named_tensors
from stayfinite.errors import ConfigError, TrainingAbortedError
from stayfinite.evidence import Evidence, weight_ranges
from stayfinite.explain.rules import diagnose
from stayfinite.locate.events import Event
from stayfinite.locate.names import Names
from stayfinite.locate.origin import origin_of
from stayfinite.locate.tracer import Tracer
from stayfinite.records import Incident, NaNReport, Origin, Outcome

logger = logging.getLogger("stayfinite")

Named = tuple[str, Tensor]
_MOST_INCIDENTS = 50
_ROUND = 16  # every parameter is looked at once in so many steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """How a guard watches.

    `trace` "start" traces from the beginning, "armed" from the tick `arm_at` of the guard's
    clock (backward passes and attempted updates). `folder` is what files are named relative to.
    """

    on_nan: Literal["stop", "warn"] = "stop"
    max_scaler_skips: int = 20
    trace: Literal["never", "armed", "start"] = "never"
    arm_at: int | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.on_nan not in ("stop", "warn"):
            raise ConfigError(f"on_nan is {self.on_nan!r}; it must be 'stop' or 'warn'.")
        if self.max_scaler_skips < 1:
            raise ConfigError(
                f"max_scaler_skips is {self.max_scaler_skips}; it must be at least 1."
            )


class Guard:
    """Watches every backward pass and every optimizer of the process.

    A bad value becomes an Incident before it reaches the weights; with on_nan="stop"
    TrainingAbortedError is raised there, in the user's own step.
    """

    def __init__(
        self, settings: GuardSettings, *, on_incident: Callable[[Incident], None] | None = None
    ) -> None:
        self.settings = settings
        self.incidents: list[Incident] = []
        self.skipped_by_scaler = 0
        self.clock = 0
        self.stopped = False
        self._on_incident = on_incident
        self._evidence = Evidence()
        self._tracer: Tracer | None = None
        self._attachment: Attachment | None = None
        self._unscaled: Any = WeakIdKeyDictionary()
        self._far_losses: list[Tensor] = []
        self._ticks: list[int] = []
        self._steps_at: list[int] = []
        self._incident_clock: int | None = None
        self._skips_in_a_row = 0
        self._was_skipped = False
        self._scale: float | None = None
        self._loaded_bad: list[str] = []
        self._initial_weights: dict[str, tuple[float, float]] = {}
        self._has_failed = False

    @property
    def steps(self) -> int:
        """Updates attempted so far; without an optimizer, backward passes."""
        return self._evidence.steps

    def arm_at(self) -> int:
        """The tick from which a second run has to be traced: two steps before the incident."""
        end = self.clock if self._incident_clock is None else self._incident_clock
        earlier = [tick for tick in self._ticks if tick < end]
        return earlier[-3] if len(earlier) >= 3 else 0

    def attach(self) -> None:
        """Watch this process from now on."""
        self._attachment = together(
            watch_backward(self._before_backward, lambda result: None),
            watch_scaling(self._after_scaling),
            watch_loading(self._before_loading),
            watch_scalers(_Steps(self)),
            watch_steps(_Steps(self), defer=not _cpu_only()),
        )
        if self.settings.trace == "start" or (
            self.settings.trace == "armed" and not self.settings.arm_at
        ):
            self._arm()

    def close(self) -> None:
        """Detach from torch; flags that are still on a device are read first."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            with contextlib.suppress(TrainingAbortedError):
                attachment.flush()
                self._check_optimized(self._evidence.optimizers(), everything=True)
            attachment.remove()
        self._disarm()

    def after_fork(self) -> None:
        """Forget what the parent process has seen."""
        self.incidents = []
        self.skipped_by_scaler = self.clock = 0
        self.stopped = False
        self._evidence = Evidence()
        self._ticks, self._steps_at = [], []

    def _arm(self) -> None:
        self._tracer = Tracer(on_enter=self._evidence.entered)
        # A dispatch mode sees nothing inside compiled code.
        torch.compiler.set_stance("force_eager")
        self._tracer.__enter__()

    def _disarm(self) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.__exit__(None, None, None)
            torch.compiler.set_stance("default")

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Our own work inside the user's step: not traced, and a failure of it is only logged."""
        with self._tracer.paused() if self._tracer else contextlib.nullcontext():
            try:
                yield
            except TrainingAbortedError:
                raise
            except Exception:
                if not self._has_failed:
                    self._has_failed = True
                    logger.exception("stayfinite failed inside a step; training goes on without it")

    def _tick(self) -> None:
        self.clock += 1
        if self._tracer is not None:
            self._tracer.next_step(self.clock)
        elif self.settings.trace == "armed" and self.clock == self.settings.arm_at:
            self._arm()

    def _before_backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        with self._aside():
            self._tick()
            self._evidence.backward_passes += 1
            # Other roots may hold an Inf on purpose; their gradients are judged all the same.
            for root in roots:
                if root.numel() == 1:
                    self._judge_loss(root)

    def _judge_loss(self, root: Tensor) -> None:
        loss = self._unscaled.get(root, root)
        if loss.device.type != "cpu":
            self._far_losses.append(nonfinite([loss], exact_on_device=True))
            self._evidence.loss = loss.detach()
        elif all_finite([loss]):
            self._evidence.loss = _number(loss)
        else:
            self._notice([("loss", loss)], None, veto="backward was not run")

    def _after_scaling(self, scaler: Any, losses: Any, scaled: Any) -> None:
        with self._aside():
            if scaler.is_enabled():
                before = [tensor for _, tensor in named_tensors(losses, "")]
                after = [tensor for _, tensor in named_tensors(scaled, "")]
                for loss, result in zip(before, after, strict=False):
                    self._unscaled[result] = loss

    def _before_loading(self, target: Any, state: Mapping[str, Any]) -> None:
        with self._aside():
            bad = [
                (name, tensor)
                for name, tensor in named_tensors(state, "state")
                if not all_finite([tensor])
            ]
            self._loaded_bad.extend(name.removeprefix("state.") for name, _ in bad)
            if self._tracer is not None:
                for name, tensor in bad:
                    self._tracer.label([tensor], name.removeprefix("state."))

    def judge(
        self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool
    ) -> Tensor | None:
        """True on the device where this update must not happen; see StepListener."""
        with self._aside():
            self._tick()
            far, self._far_losses = self._far_losses, []
            self._evidence.grad_norm = finite_norm(gradients)
            if self._tracer is not None and not self._evidence.count(optimizer):
                self._initial_weights.update(weight_ranges(Names(), [optimizer]))
            if self._evidence.grad_norm is not None:
                return None
            everything = [*gradients, *(_poisoned(flag) for flag in far)]
            return nonfinite(everything, exact_on_device=on_device)
        return None

    def refused(
        self, optimizer: Optimizer, gradients: list[tuple[Tensor, Tensor]], *, late: bool
    ) -> bool:
        """A bad update is at hand: make it an incident; true vetoes it."""
        with self._aside():
            names = Names()
            named = [
                (f"gradients.{names.tensor(param) or number}", gradient)
                for number, (param, gradient) in enumerate(gradients)
            ]
            self._notice(named, optimizer, veto="the update was vetoed")
        return self.settings.on_nan != "warn"

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        """An update was attempted."""
        with self._aside():
            self._evidence.stepped(optimizer, scale=self._scale, skipped=bool(vetoed))
            self._ticks.append(self.clock)
            self._steps_at.append(self._evidence.steps)
            self._scale = None
            if not self._was_skipped:
                self._skips_in_a_row = 0
            self._was_skipped = False
            if not vetoed:
                self._check_optimized([optimizer], everything=self._tracer is not None)

    def skipped(self, optimizer: Optimizer, scaler: Any) -> None:
        """A GradScaler absorbed an overflow; an incident only when it goes on and on."""
        with self._aside():
            self._tick()
            self.skipped_by_scaler += 1
            self._was_skipped = True
            in_a_row = self._skips_in_a_row = self._skips_in_a_row + 1
            scale = scaler.get_scale() if scaler is not None else None
            self._scale = scale
            hopeless = scale is not None and scale <= 1.0 and in_a_row > 1
            if hopeless or in_a_row > self.settings.max_scaler_skips:
                pairs = [
                    (param, param.grad)
                    for group in optimizer.param_groups
                    for param in group["params"]
                    if param.grad is not None
                ]
                self.refused(optimizer, pairs, late=False)

    def _check_optimized(self, optimizers: list[Optimizer], *, everything: bool) -> None:
        """Look at a share of the parameters after the update, or at all of them."""
        for optimizer in optimizers:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            share = (
                params if everything else params[self._evidence.count(optimizer) % _ROUND :: _ROUND]
            )
            if not all_finite(share):
                names = Names()
                named = [(f"parameters.{names.tensor(p) or i}", p) for i, p in enumerate(params)]
                self._notice(named, optimizer, veto="")

    def _notice(self, named: list[Named], optimizer: Optimizer | None, *, veto: str) -> None:
        """Make an incident of bad tensors, tell of it, and stop if that is asked for."""
        if len(self.incidents) >= _MOST_INCIDENTS:
            return
        if self._incident_clock is None:
            self._incident_clock = self.clock
        reports = tuple(bad_reports(named, described=8))
        origin, born = self._origin(named)
        step = self._evidence.count(optimizer) if optimizer is not None else self.steps
        if veto == "":  # the update that made the parameters bad has been counted already
            step = max(0, step - 1)
        incident = self._incident(step, born, reports, origin, optimizer, veto)
        self.incidents.append(incident)
        if self._on_incident is not None:
            self._on_incident(incident)
        if self.settings.on_nan == "stop":
            self.stopped = True
            raise TrainingAbortedError(
                f"training stopped at step {step}: {reports[0].location if reports else 'a value'} "
                "is not finite",
                incident=incident,
            )

    def _incident(
        self,
        step: int,
        born: int | None,
        reports: tuple[NaNReport, ...],
        origin: Origin | None,
        optimizer: Optimizer | None,
        veto: str,
    ) -> Incident:
        diagnosis = None
        if origin is not None:
            origin = dataclasses.replace(origin, facts={**origin.facts, "noticed_step": step})
            names = Names()
            context = self._evidence.context(
                optimizer,
                step=step if born is None else born,
                locations=tuple(report.location for report in reports),
                scaler_skips=self._skips_in_a_row,
                scale=self._scale,
                uses_scaler=bool(len(self._unscaled)) or self.skipped_by_scaler > 0,
                initial_weights=self._initial_weights or self._weights(names),
                poisoned_buffers=tuple(names.bad_statistics()),
                loaded_keys=tuple(self._loaded_bad),
            )
            diagnosis = diagnose(origin, context)
        strategy = self.settings.on_nan
        detail = veto or "the weights were already bad"
        if strategy == "warn":
            detail = "nothing was changed"
        return Incident(
            step=step if born is None else min(born, step),
            time=time.time(),
            reports=reports,
            origin=origin,
            diagnosis=diagnosis,
            outcome=Outcome(strategy=strategy, detail=detail),
        )

    def _weights(self, names: Names) -> dict[str, tuple[float, float]]:
        return weight_ranges(names, self._evidence.optimizers())

    def _origin(self, named: list[Named]) -> tuple[Origin | None, int | None]:
        """Where it began and in which step, if the tracer has seen it."""
        if self._tracer is None:
            return None, None
        found = origin_of(
            self._tracer.events_of(tensor for _, tensor in named), folder=self.settings.folder
        )
        if found is None:
            return None, None
        origin, event = found
        return origin, self._step_of(event)

    def _step_of(self, event: Event) -> int:
        """The step in which an event happened: updates attempted before it."""
        # An update's own events carry the tick that it is booked under.
        find = bisect.bisect_left if event.phase == "optimizer" else bisect.bisect_right
        index = find(self._ticks, event.clock)
        return self._steps_at[index - 1] if index else 0


class _Steps(StepListener):
    """The guard's ear at the optimizers and scalers."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def judge(
        self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool
    ) -> Tensor | None:
        return self._guard.judge(optimizer, gradients, on_device=on_device)

    def refused(self, optimizer: Optimizer, gradients: Any, *, late: bool) -> bool:
        return self._guard.refused(optimizer, gradients, late=late)

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        self._guard.stepped(optimizer, vetoed=vetoed)

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: Any) -> None:
        self._guard.skipped(optimizer, scaler)


def _cpu_only() -> bool:
    return not torch.accelerator.is_available()


def _number(loss: Tensor) -> float | None:
    try:
        return float(loss.detach())
    except (RuntimeError, TypeError, ValueError):  # inside vmap a loss is many numbers
        return None


def _poisoned(flag: Tensor) -> Tensor:
    return torch.where(flag, float("nan"), 0.0)
