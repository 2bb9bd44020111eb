"""All that attaches to torch, and its removal.

These are hooks around every optimizer's step and around GradScaler.step, and wrappers of the
functions that every backward pass goes through.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import FrameType, FunctionType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import graph
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from stayfinite.detect.finite import all_finite, nonfinite, surely_finite
from stayfinite.detect.veto import STEP_FAILED, WatchedOptimizer, alone, is_muted
from stayfinite.errors import InputError
from stayfinite.safely import Safely
from stayfinite.training import Pairs

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class StepListener(Protocol):
    """Who is asked and told about each optimizer step; derive from it and change what you need.

    Only TrainingAbortedError leaves a listener; any other exception of it is logged once.
    """

    def judge(
        self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool
    ) -> Tensor | bool | None:
        """Whether the step is bad; None: this step is not judged.

        With `on_device` the answer must be a new 0-d bool tensor, made without a host read.
        It is called last thing before the update, also without gradients. Where a GradScaler
        leaves unscaling to a fused optimizer, the gradients are the scaled ones.
        """
        if on_device:
            return nonfinite(gradients, writable=True, exact_on_device=True)
        if surely_finite(gradients, of=optimizer):
            return False
        return not all_finite(gradients, writable=True)

    def begins(self, optimizer: Optimizer) -> None:
        """A step that was given a closure begins; others are only judged."""
        return

    def refused(self, optimizer: Optimizer, gradients: Pairs, *, late: bool) -> bool:
        """A bad step was found. Return True to veto the update, False to let it happen.

        `gradients` are the pairs of parameter and gradient. When `late`, the device has
        vetoed the step before this one, its gradients are gone and the answer is ignored.
        """
        return True

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        """A step was attempted: once for each, the vetoed ones and those of the scaler included.

        `vetoed` is None while only the device knows.
        """

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: GradScaler | None) -> None:
        """The GradScaler absorbed an overflow of its own scale; no harm done.

        `scaler` is None with a fused optimizer: there the skip is seen at the optimizer.
        """


class Attachment:
    """What is attached to torch, until `remove()` or the end of a `with` block.

    Do not remove it from inside a listener: torch is going through its hooks then.
    """

    def __init__(
        self, remove: Callable[[], None], *, flush: Callable[[], None] = lambda: None
    ) -> None:
        self._remove: Callable[[], None] | None = remove
        self._flush = flush

    def flush(self) -> None:
        """Read the flags that are still on a device; call it after the last step."""
        self._flush()

    def remove(self) -> None:
        """Leave torch as it was before; a second call does nothing."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def watch_steps(
    listener: StepListener, *, optimizer: Optimizer | None = None, defer: bool = True
) -> Attachment:
    """Judge the gradients at each step of one optimizer, or of all: also those made later.

    With `defer`, a fused optimizer is given its verdict on the device and the host reads it
    at the next step; without, and for all other optimizers, the host reads once per step.
    A step compiled by torch.compile is left alone.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer, "
            "or None to watch all of them."
        )
    watch = _StepWatch(listener, only=optimizer, defer=defer)
    return Attachment(watch.remove, flush=watch.flush)


class _StepWatch:
    """A global hook that runs first and sees to it that we judge last.

    It judges itself where no other hook follows, which saves a call in every step.
    """

    def __init__(self, listener: StepListener, *, only: Optimizer | None, defer: bool) -> None:
        self._listener = listener
        self._only = None if only is None else weakref.ref(only)
        self._defer = defer
        self._safely = Safely(STEP_FAILED)
        self._watched: dict[int, WatchedOptimizer] = {}
        self._handle = register_optimizer_step_pre_hook(self._arrive)

    def _arrive(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling() or (alone and is_muted(self._listener)):
            return None
        try:
            watched = self._watched.get(id(optimizer)) or self._adopt(optimizer)
            if watched is None:
                return None
            # Private, as torch has no order of hooks: ours is before those that look.
            following: Any = optimizer._optimizer_step_post_hooks
            if len(following) > 1 and next(iter(following)) != watched.after_handle.id:
                following.move_to_end(watched.after_handle.id, last=False)
            others: Any = optimizer._optimizer_step_pre_hooks
            if others or len(_global_optimizer_pre_hooks) > 1:
                watched.judge_last(optimizer)
                return None
        except Exception as error:
            self._safely.note(error)
            return None
        return watched.judge(optimizer, args, kwargs)

    def _adopt(self, optimizer: Optimizer) -> WatchedOptimizer | None:
        if self._only is not None and self._only() is not optimizer:
            return None
        known, key = self._watched, id(optimizer)
        known[key] = WatchedOptimizer(
            optimizer,
            self._listener,
            defer=self._defer,
            safely=self._safely,
            gone=lambda _: known.pop(key, None),
        )
        return known[key]

    def flush(self) -> None:
        for optimizer, watched in self._alive():
            watched.flush(optimizer)

    def remove(self) -> None:
        self._handle.remove()
        alive = self._alive()
        self._watched.clear()
        for optimizer, watched in alive:
            watched.release(optimizer)
        for optimizer, watched in alive:  # last, since a listener may abort
            watched.flush(optimizer)

    def _alive(self) -> list[tuple[Optimizer, WatchedOptimizer]]:
        known = list(self._watched.values())
        return [(optimizer, w) for w in known if (optimizer := w.optimizer()) is not None]


L = TypeVar("L")


class _Listeners(Generic[L]):
    """Those who share one wrapper, which is there as long as anybody listens."""

    def __init__(self, attach: Callable[[], Attachment]) -> None:
        self._attach = attach
        self._attachment: Attachment | None = None
        self.all: list[L] = []

    def add(self, listener: L) -> Attachment:
        self.all.append(listener)
        if self._attachment is None:
            self._attachment = self._attach()
        return Attachment(functools.partial(self._drop, listener))

    def _drop(self, listener: L) -> None:
        if listener in self.all:
            self.all.remove(listener)
        if not self.all and self._attachment is not None:
            self._attachment.remove()
            self._attachment = None


def watch_scalers(listener: StepListener) -> Attachment:
    """Tell the listener of each step that a GradScaler skips without calling the optimizer.

    torch has no hook there, so this wraps GradScaler.step, once for all listeners.
    """
    return _scaler_listeners.add(listener)


def tell_skipped(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Tell the listeners of a step that a scaler skipped, torch's or one in a way of its own."""
    for listener in listeners():
        if is_muted(listener):
            continue
        with _scalers_safely:
            listener.skipped_by_scaler(optimizer, scaler=scaler)
            listener.stepped(optimizer, vetoed=False)


def listeners() -> tuple[StepListener, ...]:
    """Everybody who listens in this process, oldest first."""
    return tuple(_scaler_listeners.all)


def _attach_to_scalers() -> Attachment:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(optimizer, Optimizer):  # whose steps cannot be counted
                return original(self, optimizer, *args, **kwargs)
            calls: list[Optimizer] = []
            handle = optimizer.register_step_pre_hook(lambda optimizer, *_: calls.append(optimizer))
            try:
                result = original(self, optimizer, *args, **kwargs)
            finally:
                handle.remove()
            if not calls and self.is_enabled():
                tell_skipped(self, optimizer)
            return result

        return step

    return wrapped(GradScaler, "step", wrap)


_scalers_safely = Safely(STEP_FAILED)
_scaler_listeners: _Listeners[StepListener] = _Listeners(_attach_to_scalers)


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrapped(owner: Any, name: str, wrap: Wrap) -> Attachment:
    """Put `wrap(original)` in the place of `owner.name`; removal leaves no trace of it.

    If somebody wrapped it again in the meantime, ours stays inside and does nothing more.
    """
    original = getattr(owner, name)
    was_own = name in vars(owner)  # else it is a method of one object, found in its class
    active = [True]
    watching = wrap(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (watching if active[0] else original)(*args, **kwargs)

    for function in (call, watching):
        _hide_from_warnings(function)

    def remove() -> None:
        active[0] = False
        if getattr(owner, name) is call:
            if was_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

    setattr(owner, name, call)
    return Attachment(remove)


def _hide_from_warnings(function: Any) -> None:
    """Let a warning that names its caller's caller name the one that it would without us.

    `warnings.warn` leaves out frames whose file is one of the import system's, and knows those by
    these two words.
    """
    code = function.__code__ if isinstance(function, FunctionType) else None
    if code is not None and code.co_filename.startswith(_OURS) and code.co_filename[-3:] == ".py":
        name = f"{code.co_filename} (importlib _bootstrap)"
        function.__code__ = code.replace(co_filename=name)


def together(*attachments: Attachment) -> Attachment:
    """Several attachments as one; the last attached is removed first."""

    def flush() -> None:
        for attachment in attachments:
            attachment.flush()

    def remove() -> None:
        with contextlib.ExitStack() as all_of_them:  # one that raises does not keep the others
            for attachment in attachments:
                all_of_them.callback(attachment.remove)

    return Attachment(remove, flush=flush)


def watch_backward(
    before: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None],
    after: Callable[[Any], None],
) -> Attachment:
    """Call `before(roots, their gradients)` and `after(result)` around every backward pass.

    Tensor.backward, autograd.backward, autograd.grad and torch.func.grad all come through
    the same engine entry. Passes inside a pass (checkpointing) are not told.
    """
    passes = threading.local()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(roots: Any, gradients: Any = (), *args: Any, **kwargs: Any) -> Any:
            if getattr(passes, "depth", 0) or torch.compiler.is_compiling():
                return original(roots, gradients, *args, **kwargs)
            tensors = [root for root in roots if isinstance(root, Tensor)]
            before(tensors, gradients)
            passes.depth = 1
            try:
                result = original(roots, gradients, *args, **kwargs)
            finally:
                passes.depth = 0
            after(result)
            return result

        return run

    return wrap_engine(wrap)


def wrap_engine(wrap: Wrap) -> Attachment:
    """Wrap what every backward pass goes through: torch has it under two names."""
    return together(
        wrapped(graph, "_engine_run_backward", wrap),
        wrapped(torch.autograd, "_engine_run_backward", wrap),
    )


def watch_scaling(scaled: Callable[[GradScaler, Any, Any], None]) -> Attachment:
    """Call `scaled(scaler, losses, scaled losses)` after every GradScaler.scale."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(self: GradScaler, outputs: Any) -> Any:
            result = original(self, outputs)
            scaled(self, outputs, result)
            return result

        return scale

    return wrapped(GradScaler, "scale", wrap)


def watch_loading(loading: Callable[[Any, Mapping[str, Any]], None]) -> Attachment:
    """Call `loading(module or optimizer, state_dict)` before a state dict is loaded."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            loading(self, state_dict)
            return original(self, state_dict, *args, **kwargs)

        return load_state_dict

    return together(
        wrapped(nn.Module, "load_state_dict", wrap),
        wrapped(torch.optim.Optimizer, "load_state_dict", wrap),
    )


def watch_buffers(registered: Callable[[nn.Module, str, Tensor | None], None]) -> Attachment:
    """Call `registered(module, name, buffer)` whenever a module gets a buffer."""
    return Attachment(register_module_buffer_registration_hook(registered).remove)


@contextlib.contextmanager
def listening_alone(listener: StepListener) -> Iterator[None]:
    """A block in which no other listener of this process hears of steps and backward passes."""
    alone.append(listener)
    try:
        yield
    finally:
        alone.remove(listener)


_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


def hear_no_hook_warning() -> Attachment:
    """Keep torch from warning of hooks on all modules, which are ours: it may be an error there."""
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message=_GLOBAL_HOOKS, category=UserWarning)
    added = [each for each in warnings.filters if each not in before]

    def remove() -> None:
        for each in added:
            with contextlib.suppress(ValueError):  # somebody has restored the filters
                cast("list[Any]", warnings.filters).remove(each)

    return Attachment(remove)


def watch_first_call(entered: Callable[[FrameType, nn.Module], None]) -> Attachment:
    """Call `entered(frame, module)` at the next call of a module, and after each new optimizer."""
    handles: list[RemovableHandle | Attachment] = []

    def enter(module: nn.Module, args: Any) -> None:
        if not is_dynamo_compiling():
            stop_waiting()
            entered(sys._getframe(1), module)

    def wait() -> None:
        if not handles:  # a hook on all modules costs time, so it stays for one call
            handles.append(hear_no_hook_warning())
            handles.append(register_module_forward_pre_hook(enter))

    def stop_waiting() -> None:
        while handles:
            handles.pop().remove()

    def around_making(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            wait()

        return init

    wait()
    return together(wrapped(Optimizer, "__init__", around_making), Attachment(stop_waiting))


_RUNNING: ContextVar[bool] = ContextVar("stayfinite_run_again", default=False)


@contextlib.contextmanager
def run_again() -> Iterator[None]:
    """A block that repeats a step which was counted already, to look at it or to try it anew."""
    token = _RUNNING.set(True)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def is_run_again() -> bool:
    """Whether the step that runs now was counted before."""
    return _RUNNING.get()


Told = Callable[[Tensor, float, FrameType], None]

logger = logging.getLogger("stayfinite")


def watch_numbers(told: Told) -> Attachment:
    """Call `told(tensor, value, caller's frame)` when `Tensor.item` gives a NaN or an Inf.

    The host waits there anyway, so looking costs one call and no device wait. Formatting and
    printing a tensor of one element come through `item` too; `float(tensor)` does not.
    """
    return _number_listeners.add(told)


def _attach_to_item() -> Attachment:
    original: Any = Tensor.item
    before = Tensor.__dict__.get("item")  # None: it is inherited

    def item(self: Tensor, /) -> Any:
        value = original(self)
        # A float that is not finite; an int is not, nor a symbol while a graph is exported.
        if type(value) is float and value - value != 0:
            _tell_number(self, value, sys._getframe(1))
        return value

    def restore() -> None:
        if Tensor.__dict__.get("item") is not item:
            return
        if before is None:
            del Tensor.item
        else:
            setattr(Tensor, "item", before)  # noqa: B010

    _leave_to_interpreter(item.__code__)
    functools.update_wrapper(item, original)
    setattr(Tensor, "item", item)  # noqa: B010  mypy knows it as a method
    return Attachment(restore)


def _tell_number(tensor: Tensor, value: float, frame: FrameType) -> None:
    for told in tuple(_number_listeners.all):
        if is_muted(getattr(told, "__self__", None)):
            continue
        try:
            told(tensor, value, frame)
        except Exception:  # our bug is never their crash
            _number_listeners.all.remove(told)
            logger.exception("stayfinite failed while a value was read; it stops looking")


_number_listeners: _Listeners[Told] = _Listeners(_attach_to_item)


def _leave_to_interpreter(code: Any) -> None:
    """Keep torch.compile from compiling our frame where its graph breaks at `item`.

    `torch.compiler.disable` would do, but it imports torch._dynamo.
    """
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # another version of torch
        logger.debug("torch.compile may compile our frame around Tensor.item")
