"""The hooks by which a script that nobody changed tells of its first steps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stayfinite.detect.entrypoints import together, watch_backward, watch_scaling, wrapped
from stayfinite.detect.hooks import Attachment
from stayfinite.detect.veto import StepAside
from stayfinite.errors import TrainingAbortedError
from stayfinite.locate.source import user_place
from stayfinite.prevent.preflight.eager import ignore_hooks
from stayfinite.prevent.preflight.merging import proven, said_once
from stayfinite.prevent.preflight.rehearsal import Rehearsal
from stayfinite.prevent.risks import Risk, ranked

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
        self._in_scaler = False
        self._aside = StepAside()
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
        return bool(self._updates) or bool(self._passes and not _optimizers_live())

    def risks(self) -> list[Risk]:
        """All that was found, the worst first; call it after `detach`."""
        found, edges = self.rehearsal.risks(), []
        if self.rehearsal.is_finite and not _is_distributed():
            for called in self.rehearsal.calls[:_MOST_PROBED]:
                edges += called.probed(self.rehearsal.scene)
        return ranked(said_once(proven(found, edges)))

    def _before_backward(self, roots: Sequence[Tensor], gradients: Any) -> None:
        self._guarded(lambda: self.rehearsal.going_back(roots, user_place(sys._getframe(4))))

    def _after_backward(self, result: Any) -> None:
        self._passes += 1
        self._guarded(self.rehearsal.went_back)
        if self._updates or self._passes < _ALONE:
            return
        if self._passes > _MOST or not _optimizers_live():
            self._enough()

    def _scaled(self, scaler: GradScaler, losses: Any, scaled: Any) -> None:
        if scaler.is_enabled():
            self._guarded(lambda: self.rehearsal.scaled(scaler.get_scale()))

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
            self._guarded(lambda: self._clipped(float(max_norm), norm))
            return norm

        return clip_grad_norm_

    def _clipped(self, max_norm: float, norm: Tensor) -> None:
        is_scaled = self.rehearsal.scaling.scale not in (None, 1.0) and not self._unscaled
        with self.rehearsal.recorder.paused():
            size = float(norm)
        place = user_place(sys._getframe(4))
        self.rehearsal.clipped(max_norm=max_norm, norm=size, is_scaled=is_scaled, place=place)

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
        self._guarded(lambda: self.rehearsal.updated(optimizer))

    def _update(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        count = self._updates_of[id(optimizer)] = self._updates_of.get(id(optimizer), 0) + 1
        if count > 1:
            self._enough()
            return
        self._updates += 1
        place = user_place(sys._getframe(2))
        self._guarded(lambda: self.rehearsal.updating(optimizer, is_scaled=is_scaled, place=place))

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except TrainingAbortedError:
            raise
        except Exception:
            self._aside()


def _is_distributed() -> bool:
    """Whether a pass of our own would have to be made by all ranks together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _optimizers_live() -> bool:
    return any(issubclass(type(thing), Optimizer) for thing in gc.get_objects())
