"""One optimizer's training under watch: what belongs to it, and how a bad step of it is undone."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stayfinite.detect.finite import all_finite, surely_finite
from stayfinite.detect.memory import plain_parts
from stayfinite.errors import NonFiniteError, SnapshotError
from stayfinite.guard.evidence import RATES, BadValues, bad_gradients
from stayfinite.guard.precaution import Precaution
from stayfinite.guard.ranks import Ranks, is_inferring_shapes, unsharded_of
from stayfinite.living import living
from stayfinite.records import Incident
from stayfinite.recover.actions import Cannot, Done, Situation, Trouble, act
from stayfinite.recover.advice import Recovery
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.snapshot import Mark, Snapshot, SnapshotRing, TrainingState
from stayfinite.training import Pairs, gradients_of, params_of

if TYPE_CHECKING:
    from stayfinite.guard.replay import Replay


_LARGE = 1 << 20  # elements of a model whose parameters are looked at in turns
_TRAINED = ("parameters", "buffers", "optimizer", "ema")  # what an update changes
_FOLLOWING = ("param_groups", "scheduler", "scaler", "ema")  # what a loop updates after its step

COMPUTED_AGAIN = "the step was computed again"  # what an outcome says of a transient fault


class Job:
    """Marks where a step begins, takes snapshots now and then, and brings both back.

    A step is all that happens up to one attempted update: with accumulation, several
    forward and backward passes.
    """

    def __init__(
        self,
        parts: Parts,
        config: RecoveryConfig,
        manager: NaNRecoveryManager,
        *,
        look_around: Callable[[Parts], Parts] | None = None,
        takes_snapshots: bool = True,
    ) -> None:
        self.parts, self.config, self.manager = parts, config, manager
        self._look_around = look_around
        self._takes_snapshots = takes_snapshots  # one that stops needs no memory for going back
        self.trouble: BadValues | None = None
        self.replay: Replay | None = None  # of its steps; without, the guard may have one
        self.state = parts.state()
        self.ring = SnapshotRing(self.state, slots=config.snapshot_slots)
        self.good_steps = 0
        self.was_good = True  # the last update that was attempted
        self.repeats_steps = False  # a bad one is run again from its beginning
        self.precaution = Precaution(self)
        self.went_back = False  # as a precaution, in this step
        self.seen: dict[str, Any] = {}  # of the step that ends, for recommendations
        self._handles: list[RemovableHandle] = []
        self._mark: Mark | None = None
        self._next_snapshot = 0
        self._good_rates: list[Any] = []
        self._held: tuple[TrainingState, Snapshot] | None = None
        self._ranks: Ranks | None = None
        self._unconfirmed = -1  # step of a snapshot that other ranks may not have

    @property
    def ranks(self) -> Ranks | None:
        """Those that make its updates together; None if this process is alone with them."""
        return self._ranks

    @ranks.setter
    def ranks(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        if ranks is not None:
            self.ring.keep_at_least(2)  # the newest is not sure until all ranks have it

    @property
    def is_distributed(self) -> bool:
        return self._ranks is not None

    def watch_beginnings(self, begins: Callable[[Job], None]) -> None:
        """Call `begins(self)` when a forward pass begins a step."""

        def hook(module: nn.Module, args: Any) -> None:
            is_training = torch.is_grad_enabled() and not is_dynamo_compiling()
            if self._mark is None and is_training and not is_inferring_shapes(sys._getframe(1)):
                begins(self)

        for module in self.parts.modules:
            self._handles.append(module.register_forward_pre_hook(hook))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.precaution.close()

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank of this job; all ranks must ask together."""
        return flag if self._ranks is None else self._ranks.agree(flag)

    @property
    def has_begun(self) -> bool:
        """Whether a step has begun that has not ended."""
        return self._mark is not None

    def begin(self) -> bool:
        """Mark the beginning of a step, unless one is under way.

        False when a snapshot was due and the state turned out to be bad already.
        """
        if self._mark is not None:
            return True
        if self._held is not None:
            self.settle()
        is_sound = True
        if self._takes_snapshots and self.good_steps >= self._next_snapshot:
            self._next_snapshot = self.good_steps + self.config.snapshot_every
            try:
                self.ring.take(step=self.good_steps)
                self._unconfirmed = self.good_steps
            except NonFiniteError:
                is_sound = False
        self._mark = self.state.mark(exact=self.repeats_steps)
        return is_sound

    def confirm_snapshot(self, *, is_good: bool) -> None:
        """All ranks have told whether the state of this step's beginning was good."""
        newest = self.ring.back(0)
        if not is_good and newest is not None and newest.step == self._unconfirmed:
            self.ring.forget_newest()
        self._unconfirmed = -1

    @property
    def snapshot_step(self) -> int:
        """How many good steps there had been at the newest snapshot; 0 without one."""
        newest = self.ring.back(0)
        return newest.step if newest is not None else 0

    def undo(self) -> None:
        """Everything but parameters and optimizer state as at the beginning of this step.

        A learning rate that was bad then is the last good one.
        """
        # A GradScaler's notes about this step; they are not in its state_dict().
        noted = dict(getattr(self.parts.scaler, "_per_optimizer_states", ()))
        if self._mark is not None:
            self.state.go_back(self._mark)
        if noted:  # in this very step, and the scaler's update asks for it
            self.parts.scaler._per_optimizer_states.update(noted)
        for number, group in enumerate(self.parts.optimizer.param_groups):
            if is_bad_rate(group.get("lr")):
                good = self._good_rates[number] if number < len(self._good_rates) else None
                group["lr"] = self.parts.optimizer.defaults.get("lr", 0.0) if good is None else good

    def mark_again(self) -> None:
        """What was changed on purpose since the beginning is to stay."""
        if self._mark is not None:
            self._mark = self.state.mark(exact=self.repeats_steps)

    def end(self, *, is_good: bool, is_new: bool = True) -> None:
        """The update of this step was attempted; it is not new when it was counted before."""
        self._mark = self.trouble = None
        self.was_good = is_good
        if is_good:
            self.good_steps += not self.went_back  # else this update is not in the weights
            self._good_rates = self._rates()
            if is_new:
                self.manager.record_good_step(**self.seen)
        self.went_back = False

    def hold(self) -> None:
        """Remember what a loop updates after its step, to take that back in `settle`."""
        if self._held is None:
            state = self.parts.state()
            with contextlib.suppress(NonFiniteError):  # then there is nothing good to go back to
                self._held = state, state.capture(parts=_FOLLOWING)

    def settle(self) -> None:
        """Take back what followed a vetoed update."""
        held, self._held = self._held, None
        if held is not None:
            held[0].restore(held[1])
            # They were noted between the scaler's step and its update, which has come since.
            getattr(self.parts.scaler, "_per_optimizer_states", {}).clear()

    def undo_unfinished(self) -> None:
        """Take back what is left of a bad step, now that no update of it will come."""
        if self.trouble is not None:
            self.undo()
        self.settle()

    def forget_held(self) -> None:
        self._held = None

    def roll_back(self, *, is_in_step: bool = False) -> str | None:
        """Put the newest snapshot back; what was done, or None without one that is good."""
        if not len(self.ring):
            return None
        optimizer: Any = self.parts.optimizer
        called = getattr(optimizer, "_opt_called", None)
        scaler: Any = self.parts.scaler
        scale = getattr(scaler, "_scale", None)
        noted = dict(getattr(scaler, "_per_optimizer_states", ()))
        try:  # the loop goes on with its next batch
            snapshot = self.ring.restore(rewind_loader=False)
        except NonFiniteError:
            return None
        self._mark = None
        if scale is not None and scaler._scale is None:
            # Private: before its first loss a scaler has no scale, but its update() comes next.
            scaler._lazy_init_scale_growth_tracker(scale.device)
        if noted and is_in_step:  # in this very step, and the scaler's update asks for it
            scaler._per_optimizer_states.update(noted)
        if called:  # a mark of LRScheduler's own; else that of a loop that has called it warns
            optimizer._opt_called = called
        steps = self.good_steps - snapshot.step
        self.good_steps, self._next_snapshot = snapshot.step, snapshot.step + 1
        ago = "this step's beginning" if steps == 0 else f"{steps} good steps before"
        return f"the state of {ago} was put back"

    def go_back(self, back: int) -> Done | Cannot:
        """To the snapshot that is so many older than the newest, though this step was not bad.

        Weights, averages and what the optimizer has learned go back, and `good_steps`, which counts
        the updates that are in the weights, as Adam's own step does. Time goes on: rates and their
        schedules, an AMPTrainer's `step`, the loss scale, the batches and the random numbers stay
        where they are; so do the gradients, of an update that has been made.
        """
        back = min(back, len(self.ring) - 1)
        snapshot = self.ring.back(back)
        if snapshot is None:
            return Cannot("there is no snapshot")
        if self._has_more_optimizers():
            return Cannot("another optimizer updates a part of the model")
        optimizer: Any = self.parts.optimizer
        called = getattr(optimizer, "_opt_called", None)
        try:
            snapshot.restore(parts=_TRAINED)
        except (NonFiniteError, SnapshotError) as error:
            return Cannot(f"the snapshot cannot be used: {str(error).rstrip('.')}")
        if called:  # a mark of LRScheduler's own; else that of a loop that has called it warns
            optimizer._opt_called = called
        for _ in range(back):
            self.ring.forget_newest()
        self.good_steps, self.went_back = snapshot.step, True
        self._next_snapshot = self.good_steps + self.config.snapshot_every
        return Done(f"back at the snapshot of step {snapshot.step}", went_back_to=snapshot.step)

    def _has_more_optimizers(self) -> bool:
        """Whether one that is not ours updates parameters of our modules; may look at the heap."""
        ours = set(map(id, params_of(self.parts.optimizer)))
        params = (param for module in self.parts.modules for param in module.parameters())
        others = {id(param) for param in params} - ours
        return bool(others) and any(
            id(param) in others for other in living(Optimizer) for param in params_of(other)
        )

    def respond(self, incident: Incident, *, will_rerun: bool = False) -> Recovery:
        """Let the policy choose what to do, and do it."""
        if self._look_around is not None:
            self.parts = self._look_around(self.parts)
        module = incident.origin.module if incident.origin else None
        situation = self.situation(module=module, will_rerun=will_rerun)
        cause = incident.diagnosis.cause if incident.diagnosis else None
        recovery = self.manager.respond(
            incident.reports, situation, step=incident.step, cause=cause
        )
        if recovery.back_at is not None:
            self.good_steps = recovery.back_at
            self._next_snapshot = recovery.back_at + self.config.snapshot_every
        if recovery.checkpoint is not None:
            self._next_snapshot = self.good_steps
            self.mark_again()  # what was marked belongs to the state that was left
        return recovery

    def situation(self, *, module: str | None = None, will_rerun: bool = False) -> Situation:
        """What an action may work on."""
        return Situation(
            model=self.parts.model,
            optimizer=self.parts.optimizer,
            scaler=self.parts.scaler,
            schedulers=self.parts.schedulers,
            averages=self.parts.emas,
            snapshots=self.ring,
            module=module,
            will_rerun=will_rerun,
            good_steps=self.good_steps,
            any_rank=None if self._ranks is None else self._ranks.agree,
            is_sharded=self._ranks is not None and not self._ranks.is_replicated,
        )

    def clip(self) -> bool:
        """Drop what is bad in the gradients; whether anything is left to learn from."""
        clipped = act(RecoveryStrategy.CLIP_GRADIENTS, self.situation(), self.config, Trouble())
        return isinstance(clipped, Done)

    def _rates(self) -> list[Any]:
        return [group.get("lr") for group in self.parts.optimizer.param_groups]

    def is_finite(self) -> bool:
        """Whether all parameters are."""
        return all_finite(params_of(self.parts.optimizer))

    def is_finite_after_update(self, due: Callable[[Optimizer], list[Tensor]]) -> bool:
        """Whether the parameters that an update has just changed are finite.

        Of a large model only those that are `due`, since reading all takes as long as judging the
        gradients; what is missed shows in the next loss, or when its turn comes.
        """
        params = params_of(self.parts.optimizer)
        if sum(map(Tensor.numel, params)) > _LARGE:
            return all_finite(due(self.parts.optimizer))
        updated = [param for param in params if param.grad is not None]
        return surely_finite(updated, of=self) or all_finite(updated or params)

    def bad_rates(self) -> BadValues | None:
        """Learning rates that are not finite; those that are tensors are not looked at."""
        rates = self._rates()
        if not any(map(is_bad_rate, rates)):
            return None
        named = [
            (f"{RATES}{number}.lr", torch.tensor(rate))
            for number, rate in enumerate(rates)
            if is_bad_rate(rate)
        ]
        return BadValues(named, self.parts.optimizer)

    def initialise_anew(self) -> str | None:
        """Give parameters that were bad from the beginning small random values; which ones."""
        if self._look_around is None or self.good_steps or len(self.ring):
            return None
        if self._ranks is not None:  # each rank would make up values of its own
            return None
        bad = [p for p in params_of(self.parts.optimizer) if not all_finite([p])]
        generator = torch.Generator().manual_seed(0)  # always the same values
        for param in bad:
            bound = 1 / math.sqrt(max(1, param[0].numel())) if param.dim() else 1.0
            values = torch.rand(param.shape, generator=generator) * 2 * bound - bound
            with torch.no_grad():
                param.copy_(values)
        return (
            f"{len(bad)} uninitialised parameters were given small random values" if bad else None
        )

    def owns(self, leaves: Iterable[Tensor]) -> bool:
        """Whether any of the tensors is a parameter of this job."""
        params = params_of(self.parts.optimizer)
        if self._ranks is not None:
            params += unsharded_of(self.parts.modules)
        ours = set(map(id, params))
        return any(id(leaf) in ours for leaf in leaves)

    def forget_trouble_if_gone(self) -> None:
        """A bad loss does no harm when its gradients were thrown away, as a GAN's other step does.

        Of a DTensor only the local part is looked at.
        """
        if self._ranks is not None and not self._ranks.is_replicated:
            return  # FSDP keeps gradients elsewhere until it reduces them
        gradients = gradients_of(self.parts.optimizer)
        parts = (part for gradient in gradients for part in plain_parts(gradient))
        if not any(bool(part.any()) for part in parts):  # host sync; a NaN counts as any
            self.trouble = None
            if self._ranks is not None:
                self._ranks.loss = None


def is_bad_rate(rate: Any) -> bool:
    return isinstance(rate, float) and rate - rate != 0


def finding_of(job: Job, gradients: Pairs) -> BadValues:
    """The bad gradients, after the loss if that was bad too."""
    found = bad_gradients(gradients, job.parts.optimizer)
    bad = [(name, gradient) for name, gradient in found.named if not all_finite([gradient])]
    if job.trouble is None:
        return dataclasses.replace(found, named=bad)
    return dataclasses.replace(found, named=[*job.trouble.named, *bad], located=job.trouble.located)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What belongs to one optimizer's training; all but the optimizer may be missing."""

    optimizer: Optimizer
    modules: tuple[nn.Module, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    emas: tuple[Any, ...] = ()
    loader: Any = None

    @property
    def model(self) -> nn.Module | None:
        return self.modules[0] if self.modules else None

    def state(self) -> TrainingState:
        return TrainingState(
            self.modules,
            self.optimizer,
            scheduler=self.schedulers,
            scaler=self.scaler,
            ema=self.emas,
            loader=self.loader,
        )
