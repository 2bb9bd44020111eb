"""Around one optimizer's step: its gradients are judged, and bad ones are hidden from it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import LBFGS, Optimizer

from stayfinite.detect.finite import all_finite
from stayfinite.errors import TrainingAbortedError
from stayfinite.safely import Safely
from stayfinite.training import HiddenGradients, gradients_of, pairs_of, params_of

if TYPE_CHECKING:
    from stayfinite.detect.hooks import StepListener


Closure: TypeAlias = Callable[..., Any]

logger = logging.getLogger("stayfinite")


alone: list[StepListener] = []
"""While a step is run again there is one listener for it, and no other hears of anything."""


def is_muted(listener: object) -> bool:
    """Whether another listener runs a step again just now."""
    return bool(alone) and alone[-1] is not listener


STEP_FAILED = "stayfinite failed inside a step; the step goes on without it"


class WatchedOptimizer:
    """The two hooks of one optimizer, and what they must remember between them.

    It keeps no reference to the optimizer, so it does not keep it alive.
    """

    def __init__(
        self, optimizer: Optimizer, listener: StepListener, *, defer: bool, safely: Safely
    ) -> None:
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

    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The pre-hook; it must come last, after hooks that clip."""
        if is_dynamo_compiling() or (alone and is_muted(self._listener)):
            return None
        return self.judge(optimizer, args, kwargs)

    def judge(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Look at the gradients of the step that is about to run, now or in its closure."""
        try:
            if self._depth and (above := _steps_above(optimizer)):
                self._look_inside(optimizer, args, kwargs, depth=above + 1)
                return None
            if self._unclean:  # a raising step() skips the post-hook
                self._clean(optimizer)
            if self._late is not None:
                self.flush(optimizer)
            self._vetoed = False
            self._depth = 1
            if len(args) > 1 or kwargs:
                wrapped = self._with_closure(optimizer, args, kwargs)
                if wrapped is not None:
                    return wrapped
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
        try:
            answer = FINE if late is None else late.read()
            if answer == BAD:
                self._listener.refused(optimizer, [], late=True)
            elif answer != FINE:
                self._listener.skipped_by_scaler(optimizer, scaler=None)
        except TrainingAbortedError:
            raise
        except Exception as error:
            self._safely.note(error)

    def release(self, optimizer: Optimizer) -> None:
        """Leave the optimizer as it would be without us; a late flag can still be read."""
        if self._unclean:
            self._clean(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        gradients = gradients_of(optimizer)
        if self._on_device or "grad_scale" in optimizer.__dict__:
            self._look_on_device(optimizer, gradients)
        elif self._judge(optimizer, gradients, on_device=False):
            self._answer(optimizer, BAD)

    def _look_inside(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], *, depth: int
    ) -> None:
        """For a step() that calls super().step(), which torch has given the same hooks."""
        self._depth = depth
        if not self._hidden and _closure(args, kwargs) is None:  # else it is wrapped already
            self._look(optimizer)

    def _look_on_device(self, optimizer: Optimizer, gradients: list[Tensor]) -> None:
        may_defer = self._defer and is_ready(optimizer)
        may_read = not is_capturing(gradients)
        if not (may_defer or may_read):
            return
        flag = self._judge(optimizer, gradients, on_device=True)
        if flag is None:
            return
        flag = with_scaler(optimizer, torch.as_tensor(flag))
        if may_defer:
            self._leave_to_device(optimizer, flag, read_late=may_read)
        elif answer := flag.item():  # host sync
            self._answer(optimizer, int(answer))

    def _leave_to_device(self, optimizer: Optimizer, flag: Tensor, *, read_late: bool) -> None:
        if self._installed is not None:
            self._installed.take_away(optimizer)
        self._installed = InstalledFlag(optimizer, flag)
        self._unclean = True
        if read_late:
            self._late = LateFlag(flag)
            self._vetoed = None

    def _answer(self, optimizer: Optimizer, answer: int) -> None:
        if answer != BAD:
            # On a first step the fused kernels do not skip cleanly on their own.
            self._hide(optimizer)
            self._listener.skipped_by_scaler(optimizer, scaler=None)
        elif self._is_refused(optimizer):
            self._vetoed = True
            self._hide(optimizer)

    def _is_refused(self, optimizer: Optimizer) -> bool:
        try:
            return self._listener.refused(optimizer, pairs_of(optimizer), late=False)
        except TrainingAbortedError:
            raise
        except Exception as error:
            self._safely.note(error)
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
        if self._vetoed or (copy.ends_badly(optimizer) and self._undo_refused(optimizer, copy)):
            self._vetoed = True
            copy.restore(optimizer)

    def _undo_refused(self, optimizer: Optimizer, copy: LBFGSCopy) -> bool:
        try:
            return self._is_refused(optimizer)
        except TrainingAbortedError:
            copy.restore(optimizer)
            raise

    def _fail(self, error: Exception) -> None:
        self._safely.note(error)
        self._hidden.give_back()

    def _with_closure(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = _closure(args, kwargs)
        if closure is None:
            return None
        judged = self._wrap(optimizer, closure)
        self._looked = False
        if "closure" in kwargs:
            return args, {**kwargs, "closure": judged}
        return (args[0], judged, *args[2:]), kwargs

    def _wrap(self, optimizer: Optimizer, closure: Closure) -> Closure:
        self._listener.begins(optimizer)
        if isinstance(optimizer, LBFGS):
            self._copy = LBFGSCopy(optimizer)
            self._unclean = True

        def judged(*args: Any, **kwargs: Any) -> Any:
            self._hidden.give_back()
            result = closure(*args, **kwargs)
            self._after_closure(optimizer)
            return result

        return judged

    def _look_on_the_way(self, optimizer: Optimizer, copy: LBFGSCopy) -> None:
        if self._judge(optimizer, gradients_of(optimizer), on_device=False):  # host sync
            copy.note_bad_point(optimizer)

    def _after_closure(self, optimizer: Optimizer) -> None:
        try:
            if self._vetoed:  # refused at an earlier call in this same step
                self._hide(optimizer)
            elif self._copy is not None and self._looked:
                self._look_on_the_way(optimizer, self._copy)
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
        if not group.get("fused") or not _has_state(optimizer.state, group):
            return False
    return True


def _has_state(states: Any, group: dict[str, Any]) -> bool:
    if group.get("momentum", 1) == 0:  # plain SGD keeps none
        return True
    for param in group["params"]:
        if param.grad is not None:
            state = states.get(param)
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


def is_capturing(tensors: list[Tensor]) -> bool:
    """Whether a CUDA graph is being recorded, in which nothing may be read."""
    return bool(tensors) and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()


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
        values = [value for state in optimizer.state.values() for value in _flat(state.values())]
        numbers = [torch.tensor(v) if isinstance(v, float) else v for v in values]
        return not all_finite([*params, *numbers])  # host sync

    def restore(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for param, value in self._params:
                param.copy_(value)
        optimizer.state.clear()
        for param, state in self._states.items():
            optimizer.state[param].update(_copy_state(state))


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors inside its lists are never written to, only replaced."""
    return {key: _copy_value(value) for key, value in state.items()}


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list) else [value]
