"""Around one optimizer's step: its gradients are judged, and bad ones are hidden from it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from stayfinite.detect.finite import all_finite
from stayfinite.errors import TrainingAbortedError
from stayfinite.nested import named_tensors
from stayfinite.safely import Safely
from stayfinite.training import HiddenGradients, gradients_of, pairs_of, params_of

if TYPE_CHECKING:
    from stayfinite.detect.hooks import StepListener


Closure: TypeAlias = Callable[..., Any]

alone: list[StepListener] = []
"""While a step is run again there is one listener for it, and no other hears of anything."""


def is_muted(listener: object) -> bool:
    """Whether another listener runs a step again just now."""
    return bool(alone) and alone[-1] is not listener


STEP_FAILED = "stayfinite failed inside a step; the step goes on without it"


class WatchedOptimizer:
    """The two hooks of one optimizer, and what they must remember between them.

    It does not keep the optimizer alive, and calls `gone` when that is no more. Without a
    `before_handle`, a global hook judges in its place.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        listener: StepListener,
        *,
        defer: bool,
        safely: Safely,
        gone: Callable[[object], object],
    ) -> None:
        self.optimizer = weakref.ref(optimizer, gone)
        self._listener = listener
        self._judge = listener.judge
        self._stepped = listener.stepped
        self._safely = safely
        self._defer = defer and obeys_flag(optimizer)
        self._on_device = self._defer or any(p.is_cuda for p in params_of(optimizer))
        self._hidden = HiddenGradients()
        self._installed: InstalledFlag | None = None
        self._late: LateFlag | None = None
        self._copy: LBFGSCopy | None = None
        self._looked = False
        self._vetoed: bool | None = False
        self._unclean = False
        self._depth = 0
        self.after_handle = optimizer.register_step_post_hook(self.after)
        self.before_handle: RemovableHandle | None = None

    def judge_last(self, optimizer: Optimizer) -> None:
        """Have the pre-hook called, after all others: those that clip."""
        if self.before_handle is None:
            self.before_handle = optimizer.register_step_pre_hook(self.before)
        hooks: Any = optimizer._optimizer_step_pre_hooks
        if next(reversed(hooks)) != self.before_handle.id:
            hooks.move_to_end(self.before_handle.id)

    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The pre-hook."""
        if is_dynamo_compiling() or (alone and is_muted(self._listener)):
            return None
        return self.judge(optimizer, args, kwargs)

    def judge(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Look at the gradients of the step that is about to run, now or in its closure."""
        try:
            if self._depth and (above := _steps_above(optimizer)):
                # A step() that calls super().step(), which torch has given the same hooks.
                self._depth = above + 1
                if not self._hidden and _closure(args, kwargs) is None:  # else it is wrapped
                    self._look(optimizer)
                return None
            if self._unclean:  # a raising step() skips the post-hook
                self._clean(optimizer)
            if self._late is not None:
                self.flush(optimizer)
            self._vetoed = False
            self._depth = 1
            if len(args) > 1 or kwargs:
                closure = _closure(args, kwargs)
                if closure is not None:
                    judged = self._wrap(optimizer, closure)
                    if "closure" in kwargs:
                        return args, {**kwargs, "closure": judged}
                    return (args[0], judged, *args[2:]), kwargs
            self._look(optimizer)
        except TrainingAbortedError:
            raise
        except Exception as error:
            self._fail(error)
        return None

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The post-hook; it must come first, so that others find the gradients in place."""
        if is_dynamo_compiling() or (alone and is_muted(self._listener)):
            return
        self._depth -= 1
        if self._depth > 0:
            return
        try:
            if self._unclean:
                self._finish(optimizer)
            self._stepped(optimizer, vetoed=self._vetoed)
        except TrainingAbortedError:
            raise
        except Exception as error:
            self._fail(error)

    def flush(self, optimizer: Optimizer) -> None:
        """Read the flag of the last step, if it is still on the device, and tell the listener."""
        late, self._late = self._late, None
        with self._safely:
            answer = FINE if late is None else late.read()
            if answer == BAD:
                self._listener.refused(optimizer, [], late=True)
            elif answer != FINE:
                self._listener.skipped_by_scaler(optimizer, scaler=None)

    def release(self, optimizer: Optimizer) -> None:
        """Leave the optimizer as it would be without us; a late flag can still be read."""
        if self.before_handle is not None:
            self.before_handle.remove()
        self.after_handle.remove()
        if self._unclean:
            self._clean(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        gradients = gradients_of(optimizer)
        if self._on_device or "grad_scale" in optimizer.__dict__:
            self._look_on_device(optimizer, gradients)
        elif self._judge(optimizer, gradients, on_device=False):
            self._answer(optimizer, BAD)

    def _look_on_device(self, optimizer: Optimizer, gradients: list[Tensor]) -> None:
        may_defer = self._defer and is_ready(optimizer)
        # While a CUDA graph is recorded nothing may be read.
        is_cuda = bool(gradients) and gradients[0].is_cuda
        may_read = not (is_cuda and torch.cuda.is_current_stream_capturing())
        if not (may_defer or may_read):
            return
        flag = self._judge(optimizer, gradients, on_device=True)
        if flag is None:
            return
        flag = with_scaler(optimizer, torch.as_tensor(flag))
        if may_defer:
            if self._installed is not None:
                self._installed.take_away(optimizer)
            self._installed = InstalledFlag(optimizer, flag)
            self._unclean = True
            if may_read:
                self._late = LateFlag(flag)
                self._vetoed = None
        elif answer := flag.item():  # host sync
            self._answer(optimizer, int(answer))

    def _answer(self, optimizer: Optimizer, answer: int) -> None:
        if answer != BAD:
            # On a first step the fused kernels do not skip cleanly on their own.
            self._hide(optimizer)
            self._listener.skipped_by_scaler(optimizer, scaler=None)
        elif self._is_refused(optimizer):
            self._vetoed = True
            self._hide(optimizer)

    def _is_refused(self, optimizer: Optimizer) -> bool:
        with self._safely:
            return self._listener.refused(optimizer, pairs_of(optimizer), late=False)
        return True  # the gradients are bad, whoever failed to say so

    def _hide(self, optimizer: Optimizer) -> None:
        self._unclean = True
        self._hidden.take(optimizer)

    def _clean(self, optimizer: Optimizer) -> None:
        self._unclean = False
        self._copy = None
        self._hidden.give_back()
        if self._installed is not None:
            self._installed.take_away(optimizer)
            self._installed = None

    def _finish(self, optimizer: Optimizer) -> None:
        copy = self._copy
        self._clean(optimizer)
        if copy is None:
            return
        try:
            if not self._vetoed and copy.ends_badly(optimizer):
                self._vetoed = self._is_refused(optimizer)
        except TrainingAbortedError:
            copy.restore(optimizer)
            raise
        if self._vetoed:
            copy.restore(optimizer)

    def _fail(self, error: Exception) -> None:
        self._safely.note(error)
        self._hidden.give_back()

    def _wrap(self, optimizer: Optimizer, closure: Closure) -> Closure:
        self._listener.begins(optimizer)
        self._looked = False
        if isinstance(optimizer, LBFGS):
            self._copy = LBFGSCopy(optimizer)
            self._unclean = True

        def judged(*args: Any, **kwargs: Any) -> Any:
            self._hidden.give_back()
            result = closure(*args, **kwargs)
            self._after_closure(optimizer)
            return result

        return judged

    def _after_closure(self, optimizer: Optimizer) -> None:
        try:
            if self._vetoed:  # refused at an earlier call in this same step
                self._hide(optimizer)
            elif self._copy is not None and self._looked:
                if self._judge(optimizer, gradients_of(optimizer), on_device=False):  # host sync
                    self._copy.note_bad_point(optimizer)
            else:
                self._looked = True
                self._look(optimizer)
        except TrainingAbortedError:
            if self._copy is not None:
                self._copy.restore(optimizer)
            raise
        except Exception as error:
            self._fail(error)


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    given = kwargs.get("closure") if len(args) < 2 else args[1]
    return given if callable(given) else None


def _steps_above(optimizer: Optimizer) -> int:
    """How many steps of this optimizer are running now, less the one that called our hook.

    After a step that raised there are none, though its post-hook never came.
    """
    hooked = sys._getframe(3)
    frame, count = hooked.f_back, 0
    while frame is not None:
        if frame.f_code is hooked.f_code:
            count += any(value is optimizer for value in frame.f_locals.values())
        frame = frame.f_back
    return count


# These hand `optimizer.found_inf` to a fused kernel, which then leaves everything as it was.
_OBEDIENT = frozenset(
    {"torch.optim.adam", "torch.optim.adamw", "torch.optim.sgd", "torch.optim.adagrad"}
)

FINE, BAD, SKIPPED_BY_SCALER = 0, 1, 2  # and 3: both


def obeys_flag(optimizer: Optimizer) -> bool:
    """Whether it is fused, and its step() one of torch's that read `found_inf`, not its own."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return is_fused and type(optimizer).step.__module__ in _OBEDIENT


def is_ready(optimizer: Optimizer) -> bool:
    """Whether a flag alone leaves this step without any trace.

    All groups must be fused (the other kernels refuse a flag), and all state must exist:
    on a first step fused SGD would keep an uninitialised momentum buffer.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            return False
        if group.get("momentum", 1) == 0:  # plain SGD keeps no state
            continue
        for param in group["params"]:
            if param.grad is not None:
                state = optimizer.state.get(param)
                if not state or state.get("momentum_buffer", state) is None:
                    return False
    return True


def with_scaler(optimizer: Optimizer, flag: Tensor) -> Tensor:
    """FINE, BAD or SKIPPED_BY_SCALER, on the device, where a GradScaler drives this step.

    A GradScaler leaves `grad_scale` and `found_inf` on an optimizer that supports them. What it
    found itself it also skips itself; a scale of 0 it does not find, and it makes NaN of all.
    """
    given = vars(optimizer)
    if "grad_scale" not in given:
        return flag
    found, scale = given.get("found_inf"), given["grad_scale"]
    if scale is not None:
        flag = flag | (scale == 0).to(flag.device, non_blocking=True)
    if found is None:
        return flag
    is_skip: Tensor = (found > 0).to(flag.device, non_blocking=True)
    return flag + SKIPPED_BY_SCALER * is_skip


class LateFlag:
    """An answer on its way from the device to the host."""

    __slots__ = ("_arrived", "_flag")

    def __init__(self, flag: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._flag = flag
        if flag.is_cuda:  # a read would wait for all queued work; this copy only for its own
            self._flag = flag.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.current_stream(flag.device).record_event()

    def read(self) -> int:
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._flag.item())  # host sync


class InstalledFlag:
    """`optimizer.found_inf`, set for the length of one step."""

    __slots__ = ("_before", "_flag")

    def __init__(self, optimizer: Optimizer, flag: Tensor) -> None:
        # Above 1 a fused kernel would take back more than the one step it counted.
        self._flag = (flag > 0).float() if flag.dtype != torch.bool else flag.float()
        self._before: Tensor | None = vars(optimizer).get("found_inf")
        if self._before is not None:
            before = self._before.to(self._flag.device, non_blocking=True)
            self._flag = torch.maximum(self._flag, before)
        optimizer.found_inf = self._flag  # type: ignore[attr-defined]

    def take_away(self, optimizer: Optimizer) -> None:
        given = vars(optimizer)
        if given.get("found_inf") is not self._flag:
            return  # a later step has set its own
        if self._before is None:
            del given["found_inf"]
        else:
            given["found_inf"] = self._before


class LBFGSCopy:
    """Parameters and state of an LBFGS, which moves through several points within one step.

    A line search may look at a point that is not finite and turn back, so what counts is
    the first gradient and the point where it ends.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._params = [(p, p.detach().clone()) for p in params_of(optimizer)]
        self._states = {p: _copy_state(s) for p, s in optimizer.state.items()}
        self._bad_points: list[list[Tensor]] = []

    def note_bad_point(self, optimizer: Optimizer) -> None:
        """The gradients here are bad: the step must not end here."""
        self._bad_points.append([p.detach().clone() for p in params_of(optimizer)])

    def ends_badly(self, optimizer: Optimizer) -> bool:
        """Whether parameters or state are non-finite now, or the gradients at this point were."""
        params = params_of(optimizer)
        if any(all(map(torch.equal, params, point)) for point in self._bad_points):
            return True
        states = (tensor for _, tensor in named_tensors(list(optimizer.state.values()), ""))
        return not all_finite([*params, *states])  # host sync

    def restore(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for param, value in self._params:
                param.copy_(value)
        optimizer.state.clear()
        for param, state in self._states.items():
            optimizer.state[param].update(_copy_state(state))


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    copied = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor):
            copied[key] = value.clone()
        elif isinstance(value, list):  # the tensors inside are never written to, only replaced
            copied[key] = list(value)
    return copied
