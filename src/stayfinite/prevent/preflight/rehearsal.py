"""The first steps of a training, recorded, and what is risky about them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.optim import Optimizer

from stayfinite.detect.parts import unwrapped
from stayfinite.detect.scan import largest
from stayfinite.locate.events import Site
from stayfinite.locate.ops import is_bad
from stayfinite.locate.source import Place
from stayfinite.prevent.data.batch import batch_risks
from stayfinite.prevent.preflight.checks.judging import line_risks
from stayfinite.prevent.preflight.checks.lines import other_line_risks
from stayfinite.prevent.preflight.checks.optimizers import optimizer_risks
from stayfinite.prevent.preflight.checks.present import present_risk
from stayfinite.prevent.preflight.checks.rising import Losses, rising_risks
from stayfinite.prevent.preflight.checks.scaling import Clip, Scaling, scaling_risks
from stayfinite.prevent.preflight.checks.stacks import stack_risks
from stayfinite.prevent.preflight.checks.weights import weight_risks
from stayfinite.prevent.preflight.merging import lowered, said_once
from stayfinite.prevent.preflight.probe import Called
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.recorder import Recorder
from stayfinite.prevent.preflight.scene import Scene
from stayfinite.prevent.risks import Risk, ranked


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
        self.recorder = Recorder(on_enter=self.entered)
        self.scene = Scene(folder, outside=outside)
        self.scaling = Scaling()
        self.modules: list[nn.Module] = []
        self.is_finite = True
        self.calls: list[Called] = []
        self._roots: list[Reach] = []
        self._risks: list[Risk] = []
        self._of_data: list[Risk] = []
        self._losses: dict[str, Losses] = {}

    def entered(self, module: nn.Module, args: Any) -> None:
        """A top-level module is called."""
        if any(known is module for known in self.modules):
            return
        self.modules.append(module)
        self._on_new(module)
        if module.training and torch.is_grad_enabled() and not _in_transform():
            self.calls.append(Called.now(module, args))
        self._risks += [*weight_risks(module), *stack_risks(module)]
        self._of_data += _input_risks(module, args)

    def going_back(self, roots: Sequence[Tensor], place: Place | None) -> None:
        """A backward pass begins from these."""
        self.recorder.begin()
        with self.recorder.paused():
            plain = [unwrapped(root) for root in roots]
            reaches = [self.recorder.reach(root) for root in plain]
            self._note_bad("The loss", plain)
        self._roots += reaches
        scaling, line = self.scaling, self.scene.line(Site(place))
        scaling.backward_at = scaling.backward_at or line
        self._note_losses(line, plain)
        scaling.scales_itself |= any(reach.op == "mul" for reach in reaches)

    def _note_losses(self, line: str, roots: Sequence[Tensor]) -> None:
        seen = self._losses.setdefault(line, Losses())
        values = seen.after if self.recorder.lap else seen.before
        with self.recorder.paused():
            sizes = [
                float(root.detach())
                for root in roots
                if root.numel() == 1 and not root.is_complex()
            ]
        values += [size / (self.scaling.scale or 1.0) for size in sizes if math.isfinite(size)]

    def went_back(self) -> None:
        """A backward pass is over."""
        halves = [
            parameter.grad
            for module in self.modules
            for parameter in module.parameters()
            if parameter.dtype is torch.float16 and parameter.grad is not None
        ]
        if halves:
            with self.recorder.paused():
                size = max(largest(gradient) for gradient in halves)
            self.scaling.largest_gradient = max(self.scaling.largest_gradient, size)

    def scaled(self, scale: float) -> None:
        """A GradScaler has multiplied the loss."""
        self.scaling.scale = scale

    def clipped(
        self, *, max_norm: float, norm: float, is_scaled: bool, place: Place | None
    ) -> None:
        """Gradients were clipped."""
        where = self.scene.line(Site(place))
        clip = Clip(where=where, max_norm=max_norm, norm=norm, is_scaled=is_scaled)
        self.scaling.clips.append(clip)

    def updating(self, optimizer: Optimizer, *, is_scaled: bool, place: Place | None) -> None:
        """An optimizer is about to make its first update; `is_scaled`: by a loss scale still."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        with self.recorder.paused():
            self._roots += [self.recorder.reach(grad) for grad in grads]
            if self.scaling.scale is None:  # else an overflow is what the scaler is there for
                self._note_bad("A gradient", grads)
            found = optimizer_risks(optimizer, self.scene.line(Site(place)), is_scaled=is_scaled)
        self._risks += found
        self.is_finite &= all(risk.level != "high" for risk in found)

    def updated(self, optimizer: Optimizer) -> None:
        """An optimizer has made an update."""
        self.recorder.lap += 1
        params = [param for group in optimizer.param_groups for param in group["params"]]
        with self.recorder.paused():
            self._note_bad("A weight", params)

    def _note_bad(self, what: str, tensors: Sequence[Tensor]) -> None:
        bad = [tensor for tensor in tensors if is_bad(tensor)]
        if bad and self.is_finite:
            self.is_finite = False
            events = self.recorder.events_of(bad)
            self._risks.append(present_risk(what, events, self.scene))

    def risks(self) -> list[Risk]:
        """All of them, the worst first."""
        self.scaling.uses_half = self.recorder.heights.trains_in_half
        found = [
            *line_risks(self.recorder.uses, self._roots, self.scene),
            *other_line_risks(self.recorder, self.scene),
            *scaling_risks(self.scaling),
            *rising_risks(self._losses),
            *self._risks,
            *self.data_risks(),
        ]
        return ranked(said_once(found))

    def data_risks(self) -> list[Risk]:
        """What is odd about the first batch; a loss that is finite all the same can take it."""
        if not self.is_finite:
            return self._of_data
        return [lowered(risk) for risk in self._of_data]


def _input_risks(module: nn.Module, args: Any) -> list[Risk]:
    """What is odd about the arguments of a top-level module."""
    tensors = [number for number, value in enumerate(args) if isinstance(value, Tensor)]
    found = batch_risks(args, inputs=tensors or None)
    name = type(module).__name__
    return [dataclasses.replace(r, where=r.where.replace("batch", f"{name} input")) for r in found]


def _in_transform() -> bool:
    """Whether this is inside vmap or grad of torch.func, whose tensors do not live on."""
    return _functorch.peek_interpreter_stack() is not None
