"""Watching: every backward pass and every update, until a bad value becomes an incident."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from stayfinite.detect.finite import all_finite, classify, finite_number, nonfinite
from stayfinite.detect.hooks import (
    Attachment,
    StepListener,
    together,
    watch_backward,
    watch_buffers,
    watch_loading,
    watch_scalers,
    watch_scaling,
    watch_steps,
)
from stayfinite.distributed import rank
from stayfinite.errors import CapsuleError, TrainingAbortedError
from stayfinite.guard.evidence import (
    Evidence,
    Finding,
    bad_statistics,
    explained,
    gradients_found,
    in_short,
    incident_of,
    noticed_step,
    optimizer_behind,
    parameters_found,
    statistics_found,
)
from stayfinite.guard.job import Job
from stayfinite.living import Names, leaves_of
from stayfinite.locate.clock import Tracing
from stayfinite.nested import Named, named_tensors
from stayfinite.records import Incident, NaNType, Origin
from stayfinite.settings import GuardSettings
from stayfinite.training import params_of

if TYPE_CHECKING:
    from stayfinite.capsule.make import Redact
    from stayfinite.guard.capsule_step import Call, KeptStep
    from stayfinite.locate.capture import Beginning, Kept
    from stayfinite.locate.provenance import NodeSites
    from stayfinite.locate.samples import Delivery
    from stayfinite.report.html.notebook import GuardReport


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


# What only a bad step needs is imported there: a healthy run starts without it.


class ReportingWatcher(Watcher):
    """Watches, and tells of it when it is asked."""

    _kept_step: KeptStep | None = None
    examined: Sequence[tuple[Any, ...]] = ()
    """The places that experiments were made for."""

    def report(self) -> GuardReport:
        """The incidents so far, shown inline in a notebook and as text when printed."""
        from stayfinite.report.html.notebook import GuardReport

        folder = Path(self.settings.folder) if self.settings.folder else None
        return GuardReport(self.incidents, steps=self.steps, folder=folder)

    def capsule(
        self,
        path: str | os.PathLike[str],
        *,
        with_batch: bool = False,
        with_source: bool = True,
        redact: Redact | None = None,
    ) -> Path:
        """Write the last bad step that `step` ran into one file, which `stayfinite replay` runs.

        It has the state before the step, the generators, the guilty operation, versions, and your
        own source files. `with_batch` adds the batch, as `redact(batch)` gives it; without it
        only statistics of what was computed from data are in the file. Nothing is pickled.
        """
        from stayfinite.capsule.file import write_capsule
        from stayfinite.capsule.make import check_redaction

        check_redaction(redact, with_batch=with_batch)
        kept = self._kept_step
        same = [each for each in self.incidents if kept is not None and each.step == kept.step]
        if kept is None or not same:
            raise CapsuleError(
                "there is no bad step to put into a capsule: guard.step has to have run one. For "
                "a script as it is: stayfinite run --capsule FILE."
            )
        if same[-1].rank not in (rank(), -1):
            raise CapsuleError(
                f"the step went bad on rank {same[-1].rank}: call guard.capsule there."
            )
        made = kept.capsule(same[-1], with_batch=with_batch, with_source=with_source, redact=redact)
        return write_capsule(path, made)

    def keep_step(self, job: Job, calls: list[Call], *, step: int) -> None:
        """Remember a bad step whose beginning has just been put back."""
        with self._aside:
            from stayfinite.guard.capsule_step import keep_step

            self._kept_step = keep_step(job, calls, self._tracing.kept, step=step)

    def delivery_of(self, batch: Any, *, exactly: bool = False) -> Delivery | None:
        """The batch of a loader that this is; None if none is known."""
        return self._tracing.deliveries.of(batch, exactly=exactly)

    def node_sites(self) -> NodeSites | None:
        """Where the nodes of the graph were made; None if not traced now."""
        return self._tracing.nodes

    def is_diverging(self, incident: Incident, optimizer: Optimizer | None = None) -> bool:
        """Whether training was running away before the incident; by default by the busiest."""
        from stayfinite.explain.clue import Clue

        context = self.evidence.context(optimizer, step=incident.step, locations=())
        origin = incident.origin if incident.origin is not None else Origin(phase="forward")
        return Clue(origin, context).is_diverging

    def traced_pass(self) -> tuple[Kept | None, Beginning | None]:
        """What the guilty operation of the last incident was given, and how its pass began."""
        return self._tracing.kept, self._tracing.beginning

    @property
    def incident_clock(self) -> int | None:
        """The tick at which the first incident was noticed."""
        return self._incident_clock

    @property
    def clock(self) -> int:
        """Backward passes and updates so far."""
        return self._tracing.clock

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """A time in which operations are not looked at."""
        return self._tracing.paused()

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """A time in which every operation is looked at."""
        was_on = self._tracing.is_on
        if not was_on:
            self._tracing.switch_on()
        try:
            yield
        finally:
            if not was_on:
                self._tracing.switch_off()

    def trace_no_more(self) -> None:
        """Do not trace from here on."""
        self._tracing.switch_off()

    def keep_operations(self) -> None:
        """Keep what the guilty operation was given, in steps that are traced from now on."""
        self._tracing.keeps = True


logger = logging.getLogger("stayfinite")


class Aside:
    """A `with` block that is not traced, and whose failure is logged once and goes no further.

    Only TrainingAbortedError and what is no Exception leave it. Blocks may be inside one another.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._pauses: list[contextlib.AbstractContextManager[None]] = []
        self._has_failed = False

    def __enter__(self) -> None:
        pause = self._tracing.paused()
        pause.__enter__()
        self._pauses.append(pause)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._pauses.pop().__exit__(None, None, None)
        if not isinstance(error, Exception) or isinstance(error, TrainingAbortedError):
            return False
        if not self._has_failed:
            self._has_failed = True
            logger.error(
                "stayfinite failed inside a step; training goes on without it", exc_info=error
            )
        return True


_MOST_FAR = 64


class Losses:
    """Judges losses as they were before a scaler multiplied them.

    One that is on another device is judged there; `far_flags` tells of it at the update.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._unscaled: Any = WeakIdKeyDictionary()
        self._far: list[Tensor] = []
        self._is_last_bad: bool | Tensor = False

    def scaled(self, losses: Any, results: Any) -> None:
        """A scaler has made `results` of `losses`."""
        self._evidence.uses_scaler = True
        before, after = named_tensors(losses, ""), named_tensors(results, "")
        for (_, loss), (_, result) in zip(before, after, strict=False):
            self._unscaled[result] = loss

    def bad_one(self, root: Tensor) -> Tensor | None:
        """The loss behind the root of a backward pass, if it is known to be bad."""
        loss: Tensor = self._unscaled.get(root, root) if self._evidence.uses_scaler else root
        value = finite_number(loss)
        if value is not None:
            self._is_last_bad = False
            self._evidence.saw_loss(value)
        elif loss.device.type != "cpu":
            self._saw_far(loss)
        elif not all_finite([loss]):
            self._is_last_bad = True
            self._evidence.bad_loss = loss.detach()
            return loss
        return None

    def _saw_far(self, loss: Tensor) -> None:
        flag = self._is_last_bad = nonfinite([loss], exact_on_device=True)
        if len(self._far) >= _MOST_FAR:  # no optimizer asks for them, so they are not all kept
            flag = torch.stack([*self._far, flag]).any()
            self._far.clear()
        self._far.append(flag)
        self._evidence.saw_loss(loss.detach())

    def is_last_bad(self) -> bool:
        """Whether the loss of the last backward pass was bad."""
        return bool(self._is_last_bad)  # host sync

    def any_far_bad(self) -> bool:
        """Whether one was bad that nobody has asked for; for the end, when no update comes."""
        return any(map(bool, self._far))  # host sync

    def far_flags(self) -> list[Tensor]:
        """One for each loss that was far away: NaN where it was bad, else 0. Each is told once."""
        if not self._far:
            return []
        far, self._far = self._far, []
        return [torch.where(flag, float("nan"), 0.0) for flag in far]


_MOST_NAMED = 8


class LastLook:
    """What is not finite among the parameters and buffers that are still alive.

    `bad` names it. There is no collective: of a DTensor the local shard is looked at.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.is_over = False
        self.bad: list[str] = []
        self.unseen: str | None = None

    def take(self, modules: Mapping[str, nn.Module]) -> Iterator[Finding]:
        """A finding for each optimizer, and for what was trained without one, that is bad."""
        try:
            yield from self._of_training()
            self._of_others(modules)
        except Exception as error:
            self.unseen = f"{type(error).__name__}: {error}"

    def _of_training(self) -> Iterator[Finding]:
        optimizers = self._evidence.optimizers()
        for optimizer in optimizers:
            if not all_finite(params_of(optimizer)):
                yield self._noted(parameters_found(optimizer))
        leaves: list[Tensor] = list(self._evidence.trained)
        seen = {id(param) for optimizer in optimizers for param in params_of(optimizer)}
        if bad := [leaf for leaf in leaves if id(leaf) not in seen and not all_finite([leaf])]:
            yield self._noted(_by_hand(bad))
        if statistics := bad_statistics(self._evidence.statistics()):
            yield self._noted(statistics_found(statistics, self._evidence.at_work()))

    def _noted(self, finding: Finding) -> Finding:
        self._note(name for name, tensor in finding.named if not all_finite([tensor]))
        return finding

    def _note(self, names: Iterator[str]) -> None:
        for name in names:
            if name not in self.bad and len(self.bad) < _MOST_NAMED:
                self.bad.append(name)

    def _of_others(self, modules: Mapping[str, nn.Module]) -> None:
        """Averaged weights, a target network; buffers that training may have poisoned."""
        if self.bad:
            return
        trained = {id(leaf) for leaf in self._evidence.trained}
        trained |= {id(p) for each in self._evidence.optimizers() for p in params_of(each)}
        for name, module in modules.items():
            params = list(module.named_parameters())
            self._note(f"{name}.{path}" for path, param in params if not all_finite([param]))
            if any(id(param) in trained for _, param in params):
                buffers = list(module.named_buffers())
                self._note(
                    f"{name}.{path}" for path, buffer in buffers if _last_look_is_nan(buffer)
                )


def _by_hand(bad: list[Tensor]) -> Finding:
    names = Names()
    named = [(f"parameters.{names.tensor(t) or number}", t) for number, t in enumerate(bad)]
    return Finding(named, did="the weights had taken the bad values already")


def _last_look_is_nan(buffer: Tensor) -> bool:
    # A mask may hold an Inf on purpose.
    return not all_finite([buffer]) and classify(buffer) is NaNType.NAN


# What torch and careful scripts say when they meet one.
_TELLING = re.compile(
    r"\bnan\b|\binf(inite|inity)?\b|non-?finite|not finite|invalid values|within the support"
    r"|positive-?definite|singular|converge|probability tensor",
    re.IGNORECASE,
)
_FRAMES = 8
_MOST = 500


def bad_values_of(error: BaseException) -> list[Named]:
    """NaN tensors in the variables around the error, innermost frame first; mostly none.

    Only where the message speaks of one, or where the script left by sys.exit() with a NaN
    number at hand: an ordinary bug beside NaN-padded data is no incident.
    """
    left = isinstance(error, SystemExit)
    if not left and not _TELLING.search(str(error)):
        return []
    frames = _frames(error)[: 1 if left else _FRAMES]
    for frame in frames:
        found = [(name, tensor) for name, tensor in _tensors(frame) if _crash_is_nan(tensor)]
        found = [pair for pair in found if pair[1].numel() == 1] if left else found
        if found:
            return found
    return []


def _frames(error: BaseException) -> list[FrameType]:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def _tensors(frame: FrameType) -> Iterator[Named]:
    """Tensors in local variables, and one level inside containers and distributions."""
    seen = 0
    for name, value in frame.f_locals.items():
        for label, item in [(name, value), *_inside(name, value)]:
            seen += 1
            if isinstance(item, Tensor) and seen < _MOST:
                yield label, item


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{name}.{key}", item) for key, item in list(value.items())[:50]]
    if isinstance(value, (list, tuple)):
        return [(f"{name}.{index}", item) for index, item in enumerate(value[:50])]
    return []


def _crash_is_nan(tensor: Tensor) -> bool:
    return classify(tensor) is NaNType.NAN
