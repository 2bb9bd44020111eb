"""What happens around one optimizer's step: judge the gradients, and hide the bad ones from it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import LBFGS, Optimizer

from stayfinite.detect.flags import (
    BAD,
    FINE,
    InstalledFlag,
    LateFlag,
    is_capturing,
    is_ready,
    obeys_flag,
    with_scaler,
)
from stayfinite.detect.gradients import HiddenGradients, gradients_of, pairs_of, params_of
from stayfinite.detect.lbfgs import LBFGSCopy
from stayfinite.errors import TrainingAbortedError

if TYPE_CHECKING:
    from stayfinite.detect.hooks import StepListener

Closure: TypeAlias = Callable[..., Any]

logger = logging.getLogger("stayfinite")


class StepAside:
    """Logs the first failure of our own and keeps quiet about the next ones."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self) -> None:
        if not self._said:
            self._said = True
            logger.exception("stayfinite failed inside a step; the step goes on without it")


class WatchedOptimizer:
    """The two hooks of one optimizer, and what they must remember between them.

    It keeps no reference to the optimizer, so it does not keep it alive.
    """

    def __init__(
        self, optimizer: Optimizer, listener: StepListener, *, defer: bool, aside: StepAside
    ) -> None:
        self._listener = listener
        self._judge = listener.judge
        self._stepped = listener.stepped
        self._aside = aside
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
        if is_dynamo_compiling():
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
        except Exception:
            self._fail()
        return None

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The post-hook; it must come first, so that others find the gradients in place."""
        if is_dynamo_compiling():
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
        except Exception:
            self._fail()

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
        except Exception:
            self._aside()

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
        except Exception:
            self._aside()
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

    def _fail(self) -> None:
        self._aside()
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
        except Exception:
            self._fail()


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
