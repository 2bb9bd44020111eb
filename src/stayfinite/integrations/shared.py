"""What the integrations share: options, steps that cannot harm, clipping, calls to run again."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from stayfinite.detect.finite import all_finite
from stayfinite.detect.hooks import Attachment, is_run_again, listeners, together, wrapped
from stayfinite.detect.memory import is_sharded
from stayfinite.errors import TrainingAbortedError
from stayfinite.explain.experiments import CannotReplayError
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job
from stayfinite.guard.replay import NO_BATCH
from stayfinite.locate.source import Place, call_at, user_place
from stayfinite.nested import named_tensors, own_loss
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy, refuse_unanswered
from stayfinite.report.alerts import AlertRule
from stayfinite.report.sinks import Sink
from stayfinite.safely import harmless
from stayfinite.settings import GuardSettings
from stayfinite.training import params_of

logger = logging.getLogger("stayfinite")


def step_carefully(
    guard: Guard, fn: Callable[[Any], Any], batch: Any, *, gives_up: Callable[[], None]
) -> Any:
    """`guard.step(fn, batch)`; should that fail by itself, what `fn` gives without a guard.

    Errors of `fn` and TrainingAbortedError leave it; `gives_up` is called before we go on alone.
    """
    results: list[Any] = []
    theirs: list[BaseException] = []

    def run_and_note(given: Any) -> Any:
        try:
            results.append(fn(given))
        except BaseException as error:
            theirs.append(error)
            raise
        return results[-1]

    try:
        return guard.step(run_and_note, batch)
    except TrainingAbortedError:
        raise
    except Exception as error:
        if any(error is each for each in theirs):
            raise
        logger.exception("stayfinite failed in a step; training goes on without it")
        gives_up()
        return results[-1] if results else fn(batch)


OnNaN = Literal["recover", "stop", "warn"]


class WatchOptions(TypedDict):
    """The options of `stayfinite.watch` that every integration has."""

    config: RecoveryConfig | None
    on_nan: Literal["recover", "warn"]
    sinks: list[Sink] | None
    alerts: list[AlertRule]
    prove_seconds: float


def watch_options(
    config: RecoveryConfig | None,
    on_nan: OnNaN,
    sinks: Iterable[Sink] | None,
    alerts: Iterable[AlertRule],
    prove_seconds: float,
) -> WatchOptions:
    """To "stop" is to recover by giving up: the step is located and undone first."""
    GuardSettings(on_nan=on_nan, prove_seconds=prove_seconds)  # ConfigError for any other word
    refuse_unanswered(config, "nothing is forecast here; use watch(..., forecast=True).")
    if on_nan == "stop":
        abort = RecoveryStrategy.ABORT
        given = RecoveryConfig() if config is None else config
        config = dataclasses.replace(
            given, primary_strategy=abort, fallback_strategy=abort, ladder=()
        )
    return {
        "config": None if on_nan == "warn" else config,
        "on_nan": "warn" if on_nan == "warn" else "recover",
        "sinks": None if sinks is None else list(sinks),  # a list travels to other processes
        "alerts": list(alerts),
        "prove_seconds": prove_seconds,
    }


def keep_bad_gradients(optimizer: Optimizer) -> Attachment:
    """Let torch's clip_grad_norm_ leave gradients of this optimizer alone if some are bad.

    It would make NaN of all of them, and nobody could say any more which was the bad one. Only
    for updates that are vetoed then. Healthy gradients are clipped as ever, to the byte.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **more: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if not is_dynamo_compiling() and _would_spread(optimizer, given, max_norm, total_norm):
                return None
            return original(given, max_norm, total_norm, *args, **more)

        return clip

    # clip_grad_norm_ calls the first, which is private; the second is its public name.
    return together(
        wrapped(clip_grad, "_clip_grads_with_norm_", wrap),
        wrapped(utils, "clip_grads_with_norm_", wrap),
    )


def _would_spread(
    optimizer: Optimizer, parameters: Sequence[Tensor], max_norm: Any, total_norm: Any
) -> bool:
    try:
        # Of shards the norm is a DTensor: to read it would be a collective.
        if is_sharded(total_norm) or math.isfinite(total_norm):  # host sync
            return False
        ours = {id(param) for param in params_of(optimizer)}
        if not any(id(param) in ours for param in parameters):
            return False
        # Without a limit even gradients that are only large would become NaN.
        return max_norm == math.inf or not all_finite([param.grad for param in parameters])
    except Exception:
        logger.warning("gradients could not be looked at before clipping", exc_info=True)
        return False


def guard_of(optimizer: Optimizer) -> Guard | None:
    """The guard that recovers this optimizer's steps already, such as that of `stayfinite run`."""
    guards = (listener for listener in listeners() if isinstance(listener, Guard))
    return next((guard for guard in guards if id(optimizer) in guard.jobs), None)


class RecordedCalls:
    """What the model was called with in the step that is under way; by reference.

    Its own loss, or else what it gives out, is all that can be computed anew: what the loop
    made of that is not known here.
    """

    def __init__(self, model: nn.Module, job: Job, backward: Callable[[Tensor], Any]) -> None:
        self._model, self._job, self._backward = model, job, backward
        self._calls: list[tuple[Place | None, tuple[Any, ...], dict[str, Any]]] = []

    def attach(self) -> Attachment:
        hook = self._model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)

        def remove() -> None:
            hook.remove()
            self._calls.clear()

        return Attachment(remove)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_dynamo_compiling() or is_run_again() or not torch.is_grad_enabled():
            return
        with harmless("noting a call of the model"):
            if not self._job.has_begun:
                self._calls.clear()
            self._calls.append((user_place(sys._getframe(1)), args, kwargs))

    def batch(self) -> Any:
        """What the only call was given; NO_BATCH if there were several."""
        if len(self._calls) != 1:
            return NO_BATCH
        _, args, kwargs = self._calls[0]
        return [*args, kwargs]

    def again(self, batch: Any) -> None:
        """Run the calls again, each with a backward pass; NO_BATCH is what they were given."""
        if not self._calls:
            raise CannotReplayError("no call of the model is known")
        calls = self._calls
        if batch is not NO_BATCH:
            calls = [(calls[0][0], tuple(batch[:-1]), batch[-1])]
        for place, args, kwargs in calls:
            loss = _loss(call_at(place, self._model, *args, **kwargs))
            if loss is not None:
                self._backward(loss)


def _loss(output: Any) -> Tensor | None:
    """The model's own loss; without one, the sum of something bad that it gives out, if any."""
    own = own_loss(output)
    if own is not None and own.numel() == 1:
        return own
    for _, tensor in named_tensors(output, ""):
        if tensor.requires_grad and not all_finite([tensor]):
            return tensor.sum()
    return None
