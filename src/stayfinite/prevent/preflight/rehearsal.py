"""The first steps of a training or of an unchanged script, and what is risky about them."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stayfinite.detect.finite import largest
from stayfinite.detect.hooks import Attachment, together, watch_backward, watch_scaling, wrapped
from stayfinite.detect.memory import unwrap
from stayfinite.detect.veto import STEP_FAILED
from stayfinite.living import living
from stayfinite.locate.operators import is_bad
from stayfinite.locate.provenance import Site
from stayfinite.locate.search import ignore_hooks
from stayfinite.locate.source import Place, user_place
from stayfinite.prevent.data.check import batch_risks
from stayfinite.prevent.forecast.outlook import possible_forecasts
from stayfinite.prevent.preflight.bounds import Reach
from stayfinite.prevent.preflight.operator_checks import Places, line_risks
from stayfinite.prevent.preflight.probe import ModuleCall
from stayfinite.prevent.preflight.range_tracer import RangeTracer
from stayfinite.prevent.preflight.training_checks import (
    FirstLosses,
    Scaling,
    clip_risks,
    optimizer_risks,
    other_line_risks,
    present_risk,
    rising_risks,
    scaling_risks,
    stack_risks,
    weight_risks,
)
from stayfinite.prevent.risks import Risk, as_info, proven, worst_of_each
from stayfinite.safely import Safely
from stayfinite.training import gradients_of, params_of


class Rehearsal:
    """What was seen of the first steps; told by hooks in a script, or by preflight() itself.

    Use it inside `with rehearsal.recorder:`. `folder` is what files are named relative to, and
    `outside` the place from which all is called, which is no answer to where. `on_new` is told of
    each top-level module before its first call.
    """

    def __init__(
        self,
        *,
        folder: str | None,
        outside: Place | None = None,
        on_new: Callable[[nn.Module], None] = lambda module: None,
    ) -> None:
        self._on_new = on_new
        self.recorder = RangeTracer(on_enter=self.enter_module)
        self.places = Places(folder, outside=outside)
        self.scaling = Scaling()
        self.modules: list[nn.Module] = []
        self.is_finite = True
        self.calls: list[ModuleCall] = []
        self._roots: list[Reach] = []
        self._risks: list[Risk] = []
        self._of_data: list[Risk] = []
        self._losses: dict[str, FirstLosses] = {}

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """A top-level module is called."""
        if any(known is module for known in self.modules):
            return
        self.modules.append(module)
        self._on_new(module)
        # Tensors inside vmap or grad of torch.func do not live on; only this private call tells.
        in_transform = _functorch.peek_interpreter_stack() is not None
        if module.training and torch.is_grad_enabled() and not in_transform:
            self.calls.append(ModuleCall.now(module, args))
        self._risks += [*weight_risks(module), *stack_risks(module)]
        tensors = [number for number, value in enumerate(args) if isinstance(value, Tensor)]
        name = f"{type(module).__name__} input"
        for risk in batch_risks(args, inputs=tensors or None):
            where = risk.where.replace("batch", name)
            self._of_data.append(dataclasses.replace(risk, where=where))

    def before_backward(self, roots: Sequence[Tensor], place: Place | None) -> None:
        """A backward pass begins from these."""
        self.recorder.begin()
        with self.recorder.paused():
            plain = [unwrap(root) for root in roots]
            reaches = [self.recorder.reach(root) for root in plain]
            self._note_bad("The loss", plain)
            # Of what is complex or has more elements there is no one size.
            single = [root for root in plain if root.numel() == 1 and not root.is_complex()]
            sizes = [float(root.detach()) for root in single]
        self._roots += reaches
        scaling, line = self.scaling, self.places.line(Site(place))
        scaling.backward_at = scaling.backward_at or line
        scaling.scales_itself |= any(reach.op == "mul" for reach in reaches)
        seen = self._losses.setdefault(line, FirstLosses())
        values = seen.after if self.recorder.lap else seen.before
        values += [size / (scaling.scale or 1.0) for size in sizes if math.isfinite(size)]

    def after_backward(self) -> None:
        """A backward pass is over."""
        params = [param for module in self.modules for param in module.parameters()]
        with self.recorder.paused():
            sizes = [
                largest(param.grad)
                for param in params
                if param.dtype is torch.float16 and param.grad is not None
            ]
        size = max(sizes, default=0.0)
        self.scaling.largest_gradient = max(self.scaling.largest_gradient, size)

    def after_clip(
        self, norm: Tensor, limit: float, place: Place | None, *, is_scaled: bool
    ) -> None:
        """Gradients of this norm were clipped."""
        with self.recorder.paused():
            size = float(norm)
        where = self.places.line(Site(place))
        self._risks += clip_risks(size, limit, where, is_scaled=is_scaled)

    def before_update(self, optimizer: Optimizer, *, is_scaled: bool, place: Place | None) -> None:
        """An optimizer is about to make its first update; `is_scaled`: by a loss scale still."""
        grads = gradients_of(optimizer)
        with self.recorder.paused():
            self._roots += [self.recorder.reach(grad) for grad in grads]
            if self.scaling.scale is None:  # else an overflow is what the scaler is there for
                self._note_bad("A gradient", grads)
            found = optimizer_risks(optimizer, self.places.line(Site(place)), is_scaled=is_scaled)
        self._risks += found
        self.is_finite &= all(risk.level != "high" for risk in found)

    def after_update(self, optimizer: Optimizer) -> None:
        """An optimizer has made an update."""
        self.recorder.lap += 1
        with self.recorder.paused():
            self._note_bad("A weight", params_of(optimizer))

    def _note_bad(self, what: str, tensors: Sequence[Tensor]) -> None:
        bad = [tensor for tensor in tensors if is_bad(tensor)]
        if bad and self.is_finite:
            self.is_finite = False
            events = self.recorder.events_of(bad)
            self._risks.append(present_risk(what, events, self.places))

    def risks(self) -> list[Risk]:
        """All of them, the worst first."""
        self.scaling.uses_half = self.recorder.trains_in_half
        found = [
            *line_risks(self.recorder.uses, self._roots, self.places),
            *other_line_risks(self.recorder, self.places),
            *scaling_risks(self.scaling),
            *rising_risks(self._losses),
            *self._risks,
            # A loss that is finite all the same can take what is odd about the first batch.
            *(as_info(risk) if self.is_finite else risk for risk in self._of_data),
        ]
        return worst_of_each(found)


_ALONE = 3  # backward passes in a script that has no optimizer
_MOST_PROBED = 4  # top-level modules
_MOST = 500  # backward passes without an update, after which it is enough
Original = Callable[..., Any]


class ScriptRehearsal:
    """Watches this process until an optimizer is about to make its second update.

    Then `enough` is called, at every such moment; it is there to raise what ends the script.
    """

    def __init__(self, *, folder: str | None, enough: Callable[[], None]) -> None:
        self.rehearsal = Rehearsal(folder=folder)
        self._updates = 0
        self._passes = 0
        self._enough = enough
        self._updates_of: dict[int, int] = {}
        self._unscaled: set[int] = set()
        self._in_scaler = self._has_adam = False
        self._safely = Safely(STEP_FAILED)
        self._attachment: Attachment | None = None
        self._stance: Any = None

    def attach(self) -> None:
        """Begin to record."""
        hooks = (
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        )
        self._attachment = together(
            watch_backward(self._before_backward, self._after_backward),
            watch_scaling(self._scaled),
            wrapped(GradScaler, "step", self._scaler_step),
            wrapped(GradScaler, "unscale_", self._scaler_unscale),
            wrapped(clip_grad, "clip_grad_norm_", self._clip),
            wrapped(nn.utils, "clip_grad_norm_", self._clip),
            wrapped(torch, "compile", self._compile),
            *(Attachment(hook.remove) for hook in hooks),
        )
        ignore_hooks()
        if "torch._dynamo" in sys.modules:
            self._stay_eager()
        self.rehearsal.recorder.__enter__()

    def detach(self) -> None:
        """Leave torch as it was; a second call does nothing."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            self.rehearsal.recorder.__exit__(None, None, None)
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
            attachment.remove()

    @property
    def steps(self) -> int:
        """Updates that were begun; without an optimizer, backward passes."""
        return self._updates or self._passes

    @property
    def has_trained(self) -> bool:
        """Whether an update was begun; without an optimizer, whether a backward pass is over."""
        return bool(self._updates or (self._passes and not living(Optimizer)))

    def risks(self) -> list[Risk]:
        """All that was found, the worst first; call it after `detach`."""
        found, edges = self.rehearsal.risks(), []
        # A pass of our own would have to be made by all ranks together.
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if self.rehearsal.is_finite and is_alone:
            for call in self.rehearsal.calls[:_MOST_PROBED]:
                edges += call.probe(self.rehearsal.places)
        return worst_of_each(proven(found, edges))

    def forecasts(self) -> tuple[str, ...]:
        """What `stayfinite run --forecast` can tell of in this training."""
        return possible_forecasts(
            in_half=self.rehearsal.recorder.trains_in_half,
            is_scaled=self.rehearsal.scaling.scale is not None,
            has_adam=self._has_adam,
            is_compiled=self._stance is not None,
        )

    def _before_backward(self, roots: Sequence[Tensor], gradients: Any) -> None:
        with self._safely:
            self.rehearsal.before_backward(roots, user_place(sys._getframe(1)))

    def _after_backward(self, result: Any) -> None:
        self._passes += 1
        with self._safely:
            self.rehearsal.after_backward()
        if self._updates or self._passes < _ALONE:
            return
        if self._passes > _MOST or not living(Optimizer):
            self._enough()

    def _scaled(self, scaler: GradScaler, losses: Any, scaled: Any) -> None:
        if scaler.is_enabled():
            with self._safely:
                self.rehearsal.scaling.scale = scaler.get_scale()

    def _scaler_unscale(self, original: Original) -> Original:
        def unscale_(scaler: GradScaler, optimizer: Optimizer) -> None:
            self._unscaled.add(id(optimizer))
            original(scaler, optimizer)

        return unscale_

    def _scaler_step(self, original: Original) -> Original:
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._update(optimizer, is_scaled=id(optimizer) not in self._unscaled)
            self._in_scaler = True
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self._in_scaler = False
                self._unscaled.discard(id(optimizer))

        return step

    def _clip(self, original: Original) -> Original:
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            norm = original(parameters, max_norm, *args, **kwargs)
            with self._safely:
                is_scaled = self.rehearsal.scaling.scale not in (None, 1.0) and not self._unscaled
                place = user_place(sys._getframe(1))
                self.rehearsal.after_clip(norm, float(max_norm), place, is_scaled=is_scaled)
            return norm

        return clip_grad_norm_

    def _compile(self, original: Original) -> Original:
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._stay_eager()
            return original(*args, **kwargs)

        return compile

    def _stay_eager(self) -> None:
        """Nothing is seen inside compiled code. Asked for late: it loads the compiler."""
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_scaler:
            self._update(optimizer, is_scaled=False)

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._safely:
            self.rehearsal.after_update(optimizer)

    def _update(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        count = self._updates_of[id(optimizer)] = self._updates_of.get(id(optimizer), 0) + 1
        if count > 1:
            self._enough()
            return
        self._updates += 1
        self._has_adam |= "betas" in optimizer.defaults and "eps" in optimizer.defaults
        with self._safely:
            place = user_place(sys._getframe(1))
            self.rehearsal.before_update(optimizer, is_scaled=is_scaled, place=place)
