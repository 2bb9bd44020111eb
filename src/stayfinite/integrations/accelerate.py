"""Accelerate: one call after `accelerator.prepare`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

from torch import nn
from torch.optim import Optimizer

from stayfinite.detect.hooks import Attachment, together
from stayfinite.distributed import world_size
from stayfinite.errors import InputError
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job
from stayfinite.guard.replay import Replay
from stayfinite.guard.watch import watch as watch_loop
from stayfinite.integrations import check_package
from stayfinite.integrations.shared import (
    OnNaN,
    RecordedCalls,
    WatchOptions,
    guard_of,
    keep_bad_gradients,
    step_carefully,
    watch_options,
)
from stayfinite.records import Incident
from stayfinite.recover.config import RecoveryConfig
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.report.alerts import AlertRule
from stayfinite.report.sinks import Sink
from stayfinite.safely import harmless

check_package("accelerate", extra="hf")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

Batch = TypeVar("Batch")
Result = TypeVar("Result")
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def watch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    *,
    ema: Any = None,
    config: RecoveryConfig | None = None,
    on_nan: OnNaN = "recover",
    sinks: Iterable[Sink] | None = None,
    alerts: Iterable[AlertRule] = (),
    prove_seconds: float = 0.0,
) -> AcceleratorGuard:
    """A guard over training with Accelerate, until `close()` or the end of a `with` block.

    Give it what `accelerator.prepare` returned. A bad update is vetoed, and
    `accelerator.optimizer_step_was_skipped` says so. "stop" raises TrainingAbortedError at the
    first bad step, "warn" only tells. With `prove_seconds`, experiments on a bad step may take
    so long: its model, or what `guard.step` was given, is run again and again without its
    update, to find the bad samples and to prove the diagnosis. The other options are those
    of `stayfinite.watch`.
    """
    shared = guard_of(inner_optimizer(optimizer))
    guard = shared or guard_over(
        accelerator,
        model,
        optimizer,
        scheduler,
        watch_options(config, on_nan, sinks, alerts, prove_seconds),
        ema=ema,
    )
    return AcceleratorGuard(guard, accelerator, model, optimizer, is_shared=shared is not None)


def guard_over(
    accelerator: Any,
    model: Any,
    optimizer: Optimizer,
    scheduler: Any,
    options: WatchOptions,
    *,
    ema: Any = None,
) -> Guard:
    """A guard over the parts of torch inside those of Accelerate; it is attached already."""
    if not isinstance(accelerator, Accelerator):
        raise InputError(
            f"accelerator is a {type(accelerator).__name__}; it must be an accelerate.Accelerator."
        )
    if accelerator.distributed_type in _REFUSED:
        kind = accelerator.distributed_type.value
        raise InputError(
            f"training is sharded by {kind}, whose updates cannot be skipped from here."
        )
    return watch_loop(
        model,
        inner_optimizer(optimizer),
        scaler=accelerator.scaler,
        scheduler=inner_schedulers(scheduler),
        ema=ema,
        **options,
    )


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer of torch inside those of Accelerate."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def inner_schedulers(schedulers: Any) -> list[Any]:
    """The schedulers of torch inside those of Accelerate; None, one or several."""
    given = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
    return [getattr(each, "scheduler", each) for each in given if each is not None]


class AcceleratorGuard:
    """A guard that knows what Accelerate counts; `guard` is the one inside.

    That may be shared with somebody who watched the optimizer before (`stayfinite run`): then
    its settings count, and it stays when this one is closed.
    """

    def __init__(
        self,
        guard: Guard,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        is_shared: bool = False,
    ) -> None:
        self.guard = guard
        self._is_shared = is_shared
        self._accelerator = accelerator
        inner = inner_optimizer(optimizer)
        job = guard.jobs.get(id(inner))
        self._is_watching = job is not None
        if job is None:  # it only warns
            self._attachment = Attachment(lambda: None)
            return
        attachments = [keep_bad_gradients(inner), tell_skips(optimizer, job)]
        if world_size() == 1:  # else ranks run the loop again, each by itself or all together
            calls = RecordedCalls(model, job, accelerator.backward)
            replay = Replay(guard, calls.again, batch=calls.batch, is_whole=False)
            guard.replay_with(replay, only=job)
            attachments.append(calls.attach())
        self._attachment = together(*attachments)

    @property
    def incidents(self) -> list[Incident]:
        return self.guard.incidents

    @property
    def manager(self) -> NaNRecoveryManager:
        """Counts, history and recommendations of the recoveries."""
        return self.guard.manager

    def step(self, fn: Callable[[Batch], Result], batch: Batch) -> Result | None:
        """`fn(batch)`, or None when its update was bad and skipped; see `Guard.step`.

        `fn` may use `accelerator.accumulate`: when it is called again, Accelerate counts as it
        did the first time.
        """
        if self._is_shared or not self._is_watching:
            return fn(batch)
        # Where `accelerator.accumulate` is now.
        accelerator, state = self._accelerator, self._accelerator.gradient_state
        step, syncs, loader = accelerator.step, state.sync_gradients, state.active_dataloader
        is_last = state.end_of_dataloader

        def run_counted(given: Batch) -> Result:
            accelerator.step, state.sync_gradients = step, syncs
            if loader is not None:
                loader.end_of_dataloader = is_last
            return fn(given)

        result: Result | None = step_carefully(self.guard, run_counted, batch, gives_up=self.close)
        return result

    def close(self) -> None:
        """Leave torch and Accelerate as they were."""
        self._is_watching = False
        if not self._is_shared:
            self.guard.close()
        self._attachment.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tell_skips(optimizer: Optimizer, job: Job) -> Attachment:
    """Let `step_was_skipped` be true after a vetoed update, so that no scheduler steps.

    It can only be said by what Accelerate itself concludes it from, under private names.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        return Attachment(lambda: None)

    def say_if_skipped(inner: Optimizer, args: Any, kwargs: Any) -> None:
        with harmless("reporting a skipped step"):
            if optimizer.scaler is None:
                optimizer._is_overflow = not job.was_good
            elif not job.was_good:
                optimizer._accelerate_step_called = False

    def forget() -> None:
        handle.remove()
        if optimizer.scaler is None:  # nobody else would ever take it back
            optimizer._is_overflow = False

    handle = inner_optimizer(optimizer).register_step_post_hook(say_if_skipped)
    return Attachment(forget)
