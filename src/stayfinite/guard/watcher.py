"""Watching: every backward pass and every update, until a bad value becomes an incident."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from stayfinite.detect.crash import bad_values_of
from stayfinite.detect.entrypoints import (
    together,
    watch_backward,
    watch_buffers,
    watch_loading,
    watch_scaling,
)
from stayfinite.detect.gradients import params_of
from stayfinite.detect.hooks import Attachment, StepListener, watch_scalers, watch_steps
from stayfinite.detect.leaves import leaves_of
from stayfinite.detect.scan import all_finite, nonfinite
from stayfinite.detect.walk import Named, named_tensors
from stayfinite.errors import TrainingAbortedError
from stayfinite.evidence import Evidence, bad_statistics
from stayfinite.guard.aside import Aside
from stayfinite.guard.last_look import LastLook
from stayfinite.guard.losses import Losses
from stayfinite.incidents import (
    Finding,
    explained,
    gradients_found,
    in_short,
    incident_of,
    noticed_step,
    optimizer_behind,
    parameters_found,
    statistics_found,
)
from stayfinite.locate.arming import Tracing
from stayfinite.records import Incident
from stayfinite.settings import GuardSettings

MOST_INCIDENTS = 50


class Watcher(StepListener):
    """Watches every backward pass and every optimizer of the process, or only one optimizer.

    A bad value becomes an Incident before it reaches the weights; with on_nan="stop"
    TrainingAbortedError is raised there.
    """

    def __init__(
        self,
        settings: GuardSettings,
        *,
        on_incident: Callable[[Incident], None] | None = None,
        only: Optimizer | None = None,
    ) -> None:
        self.settings = settings
        self._only = only
        self.incidents: list[Incident] = []
        self.scaler_skips = 0
        self.stopped = False
        self.crashed = False
        self._on_incident, self.evidence = on_incident, Evidence()
        self._tracing = Tracing(self.evidence.entered)
        self._aside = Aside(self._tracing)
        self._attachment: Attachment | None = None
        self.on_bad_loss: Callable[[Tensor], None] | None = None
        self.on_begin: Callable[[], None] | None = None  # told of the first backward pass
        self._losses = Losses(self.evidence)
        self._last_look = LastLook(self.evidence)
        self._leaves: list[Tensor] | None = None
        self._incident_clock: int | None = None
        self._was_skipped = False
        self._noticed: tuple[int, int] | None = None

    @property
    def steps(self) -> int:
        """Updates attempted so far; without an optimizer, backward passes."""
        return self.evidence.steps

    @property
    def looks_at_loss(self) -> bool:
        """Whether the next backward pass begins with a look at the loss."""
        return self.settings.check_loss and self.is_looking

    @property
    def is_looking(self) -> bool:
        """Whether the step that is under way, or comes next, is looked at."""
        return self._is_due(self._only)

    def _is_due(self, optimizer: Optimizer | None) -> bool:
        every = self.settings.check_every
        if every == 1:
            return True
        count = self.steps if optimizer is None else self.evidence.count(optimizer)
        return count % every == 0

    def arm_at(self) -> int:
        """The tick from which a second run has to be traced: two steps before the incident."""
        end = self._tracing.clock if self._incident_clock is None else self._incident_clock
        return self._tracing.clock_before(end, steps=2)

    def attach(self, *more: Attachment) -> None:
        """Watch this process from now on; what is attached `more` is removed with the rest."""
        # A flag that is read one step late would come too late to undo that step.
        may_defer = self.settings.on_nan != "recover" and torch.accelerator.is_available()
        self._attachment = together(
            *more,
            watch_backward(self._before_backward, self._after_backward),
            watch_scaling(self._after_scaling),
            watch_loading(self._before_loading),
            watch_scalers(self),
            watch_buffers(self.evidence.registered),
            self._tracing.watch_data(files=self.settings.hears_files),
            watch_steps(self, optimizer=self._only, defer=may_defer),
        )
        if self.settings.trace == "start" or self.settings.arm_at == 0:
            self._tracing.switch_on()

    def close(self) -> None:
        """Detach from torch; flags that are still on a device are read first."""
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        with contextlib.suppress(TrainingAbortedError), self._aside:
            attachment.flush()
            if not self.incidents and not self._last_look.is_over:
                self._check_parameters(self.evidence.optimizers(), everything=True)
        with contextlib.suppress(TrainingAbortedError):
            attachment.remove()
        self._tracing.switch_off()

    def after_fork(self) -> None:
        """Forget what the parent process has seen."""
        self.incidents, self.scaler_skips, self.stopped = [], 0, False
        self.evidence.forget_counts()

    def script_crashed(self, error: BaseException) -> None:
        """The script died of an error of its own; an incident if a NaN was behind it."""
        if self.incidents or self._attachment is None:
            return
        with self._aside:
            bad = bad_values_of(error)
            if bad and (not self._tracing.is_on or self._tracing.was_computed(bad[0][1])):
                self.crashed = True
                did = f"the script ended itself with {type(error).__name__}"
                self._notice(Finding(bad, did=did))

    def judge_every_backward(self) -> None:
        """Look at all gradients after each backward pass, not only those an optimizer gets."""
        self._leaves = []

    def judge_values(self, named: list[Named]) -> None:
        """Make an incident of those values that were computed to be bad."""
        bad = [(name.lstrip("."), t) for name, t in named if self._tracing.was_computed(t)]
        if bad:
            self._notice(Finding(bad))

    def _before_backward(self, roots: Sequence[Tensor], gradients: Any) -> None:
        with self._aside:
            passes = self.evidence.backward_passes
            if not passes & (passes - 1):  # none so far, or a power of two
                self._early_pass(roots)
            self._tracing.tick_for_backward(roots, arm_at=self.settings.arm_at)
            if self._leaves is not None:
                self._leaves = leaves_of(roots)
            # Other roots may hold an Inf on purpose; their gradients are judged all the same.
            for root in roots:
                if root.numel() == 1:
                    self._judge_loss(root)

    def _early_pass(self, roots: Sequence[Tensor]) -> None:
        """Before any update: who is trained here, should there be no optimizer to ask."""
        if not self.evidence.backward_passes and self.on_begin is not None:
            self.on_begin()
        if not self.evidence.has_stepped:
            with self._aside:
                self.evidence.trained.update(dict.fromkeys(leaves_of(roots), True))

    def _after_backward(self, result: Any) -> None:
        if self._leaves is not None:
            with self._aside:
                gradients = [(leaf, leaf.grad) for leaf in self._leaves if leaf.grad is not None]
                self._leaves = []
                if not all_finite(gradient for _, gradient in gradients):
                    self._notice(gradients_found(gradients, None))
        self.evidence.backward_passes += 1

    def _judge_loss(self, root: Tensor) -> None:
        if self.looks_at_loss and (bad := self._losses.bad_one(root)) is not None:
            if not self.evidence.passes.bad:
                self.evidence.passes.loss_before = self.evidence.loss
            self.evidence.passes.bad += 1
            if self.on_bad_loss is not None:
                self.on_bad_loss(bad)
            self._bad_loss(bad)

    def _bad_loss(self, loss: Tensor) -> None:
        optimizer = optimizer_behind(loss, self.evidence)
        if optimizer is not None and self._has_harmed(optimizer):
            self._notice(parameters_found(optimizer))
        else:
            self._notice(Finding([("loss", loss)], optimizer, did="the backward pass was not run"))

    def _has_harmed(self, optimizer: Optimizer) -> bool:
        """Whether its last update has made the parameters bad, and nobody has told of it."""
        count = self.evidence.count(optimizer)
        whose, step = self._noticed or (0, 0)
        if not count or (whose == id(optimizer) and step >= count - 1):
            return False
        return not all_finite(params_of(optimizer))

    def _after_scaling(self, scaler: Any, losses: Any, scaled: Any) -> None:
        with self._aside:
            if scaler.is_enabled():
                self.evidence.scaler = scaler
                self._losses.scaled(losses, scaled)

    def _before_loading(self, target: Any, state: Mapping[str, Any]) -> None:
        with self._aside:
            for path, tensor in named_tensors(state, "state"):
                if not all_finite([tensor]):
                    name = path.removeprefix("state.")
                    self.evidence.bad_keys.append(name)
                    self._tracing.label(tensor, name)

    def judge(
        self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool
    ) -> Tensor | None:
        """True on the device where this update must not happen; None where it may."""
        with self._aside:
            self._tracing.tick(arm_at=self.settings.arm_at)
            if self._tracing.is_on:
                self.evidence.first_look(optimizer)
            return self._verdict(optimizer, gradients, on_device)
        return None

    def _verdict(
        self, optimizer: Optimizer, gradients: list[Tensor], on_device: bool
    ) -> Tensor | None:
        if not self.settings.check_gradients or not self._is_due(optimizer):
            gradients = []
        far = self._losses.far_flags()
        if not on_device and not far and self.evidence.saw_finite(optimizer, gradients):
            return None
        return nonfinite([*gradients, *far], exact_on_device=on_device)

    def refused(self, optimizer: Optimizer, gradients: Any, *, late: bool) -> bool:
        """A bad update is at hand: make it an incident; true vetoes it."""
        with self._aside:
            self._notice(gradients_found(gradients, optimizer))
        return self.settings.on_nan != "warn"

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        """An update was attempted."""
        with self._aside:
            looks = self.settings.check_parameters and self._is_due(optimizer)
            self.evidence.stepped(optimizer, skipped=bool(vetoed) or self._was_skipped)
            count = self.evidence.count(optimizer)
            self._tracing.stepped(self.evidence.steps, of=optimizer, count=count)
            if not self._was_skipped:
                self.evidence.skips_in_a_row = 0
                if looks and not vetoed:
                    self._look_after_update(optimizer)
            self._was_skipped = False
            if vetoed or (self.evidence.saw_bad and not self._has_trained()):
                self.evidence.was_bad(optimizer)
            self.evidence.saw_bad = False

    def _has_trained(self) -> bool:
        """Whether what was finite in the last bad step was used all the same."""
        outcome = self.incidents[-1].outcome if self.incidents else None
        return outcome is not None and outcome.strategy == "clip"

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: Any) -> None:
        """A GradScaler absorbed an overflow; an incident only when it goes on and on."""
        with self._aside:
            self._tracing.tick(arm_at=self.settings.arm_at)
            self.scaler_skips += 1
            self._was_skipped = True
            evidence = self.evidence
            evidence.skips_in_a_row += 1
            evidence.scale = scaler.get_scale() if scaler is not None else None
            hopeless = evidence.scale is not None and evidence.scale <= 1.0
            if evidence.skips_in_a_row > (1 if hopeless else self.settings.max_scaler_skips):
                pairs = [(p, p.grad) for p in params_of(optimizer) if p.grad is not None]
                self._hopeless(optimizer, pairs)

    def _hopeless(self, optimizer: Optimizer, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """No loss scale is small enough."""
        self._notice(gradients_found(pairs, optimizer))

    def _look_after_update(self, optimizer: Optimizer) -> None:
        self._check_parameters([optimizer], everything=self._tracing.is_on)

    def _check_parameters(self, optimizers: list[Optimizer], *, everything: bool) -> None:
        """Look at those parameters whose turn it is after the update, or at all of them."""
        for optimizer in optimizers:
            params = params_of(optimizer) if everything else self.evidence.due(optimizer)
            if not all_finite(params):
                self._harmed(parameters_found(optimizer))
            if everything or self.evidence.statistics_are_due(optimizer):
                self._check_statistics(optimizer)

    def _check_statistics(self, optimizer: Optimizer) -> None:
        bad = bad_statistics(self.evidence.statistics())
        if bad:
            self._harmed(statistics_found(bad, optimizer))

    def _harmed(self, finding: Finding) -> None:
        """The state of training has taken bad values."""
        self._notice(finding)

    def _notice(self, finding: Finding) -> None:
        """Make an incident of bad tensors, tell of it, and stop if that is asked for."""
        self.evidence.saw_bad = True
        if self._is_told(finding):
            return
        if len(self.incidents) >= MOST_INCIDENTS:
            return
        strategy = "none" if self.crashed else self.settings.on_nan
        incident = self._incident(finding, strategy=strategy)
        self._record(incident)
        if self.settings.on_nan == "stop" and not self.crashed:
            self._stop(incident)

    def _is_told(self, finding: Finding) -> bool:
        """Whether the script goes on from a bad step of which this is only what follows.

        There is one incident for a bad step.
        """
        if self.settings.on_nan != "warn":
            return False
        noticed = id(finding.optimizer), noticed_step(finding, self.evidence)
        before, self._noticed = self._noticed, noticed
        return before == noticed

    def _incident(self, finding: Finding, *, strategy: str) -> Incident:
        """What was found, explained as far as it can be here and now."""
        if self._incident_clock is None:
            self._incident_clock = self._tracing.clock
        incident = incident_of(finding, self.evidence, strategy=strategy)
        with self._aside:
            return explained(incident, finding, self.evidence, self._tracing, self.settings)
        return incident

    def _record(self, incident: Incident) -> None:
        self.evidence.saw_bad = True
        self.incidents.append(incident)
        if self._on_incident is not None:
            self._on_incident(incident)

    def _stop(self, incident: Incident) -> NoReturn:
        self.stopped = True
        what = in_short(incident)
        raise TrainingAbortedError(f"stopped at step {incident.step}: {what}", incident=incident)
