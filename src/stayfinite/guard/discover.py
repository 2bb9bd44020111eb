"""The training jobs of an unchanged script, and the guard over its whole process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from stayfinite.detect.hooks import Attachment, wrapped
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.living import living
from stayfinite.recover.config import UNATTENDED, RecoveryConfig, RecoveryStrategy
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.settings import GuardSettings
from stayfinite.training import params_of

_MOST_JOBS = 4  # a sweep makes model after model; the older ones are let go


def recover_everything(guard: Guard) -> Attachment:
    """Make a job of every optimizer that is created from now on."""

    def adopt(optimizer: Optimizer) -> None:
        modules = tuple(_roots(optimizer))
        parts = Parts(optimizer=optimizer, modules=modules)
        manager = NaNRecoveryManager(UNATTENDED)
        look = look_around if modules else None
        guard.add(Job(parts, UNATTENDED, manager, look_around=look), at_most=_MOST_JOBS)

    return watch_optimizers(adopt)


def watch_optimizers(made: Callable[[Optimizer], None]) -> Attachment:
    """Call `made(optimizer)` for each that is created."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            made(self)

        return init

    return wrapped(Optimizer, "__init__", wrap)


def look_around(parts: Parts) -> Parts:
    """The parts with the schedulers, scaler and averages that are alive now."""
    optimizer = parts.optimizer
    schedulers = [s for s in living(LRScheduler) if s.__dict__.get("optimizer") is optimizer]
    held = {id(inner) for outer in schedulers for inner in getattr(outer, "_schedulers", ())}
    return Parts(
        optimizer=optimizer,
        modules=parts.modules,
        schedulers=tuple(s for s in schedulers if id(s) not in held),
        scaler=next(iter(s for s in living(GradScaler) if s.is_enabled()), None),
        emas=tuple(living(AveragedModel)),
    )


def _roots(optimizer: Optimizer) -> list[nn.Module]:
    """The topmost modules that hold its parameters."""
    ours = {id(param) for param in params_of(optimizer)}
    holders = [m for m in living(nn.Module) if any(id(p) in ours for p in m.parameters())]
    inner = {id(child) for m in holders for child in m.modules() if child is not m}
    return [module for module in holders if id(module) not in inner]


_STOP = RecoveryConfig(
    primary_strategy=RecoveryStrategy.ABORT, fallback_strategy=RecoveryStrategy.ABORT
)
_open: list[ProcessGuard] = []


class ProcessGuard:
    """Whoever watches this process: a guard of its own, or one that a framework lends.

    `attach` attaches the first, now and whenever the other has gone. Integrations find it until
    `close()`.
    """

    def __init__(self, guard: Guard, attach: Callable[[Guard], None]) -> None:
        self.guard = guard
        self._attach = attach
        self._is_taken = False
        attach(guard)
        _open.append(self)

    @property
    def is_free(self) -> bool:
        """Whether another guard may come; not where nothing is ever undone."""
        is_taken = self._is_taken or not self.guard.is_attached
        return not is_taken and self.guard.settings.on_nan != "warn"

    @property
    def stops(self) -> bool:
        """Whether the first bad step is the last one."""
        return self.guard.settings.on_nan == "stop"

    @property
    def settings(self) -> GuardSettings:
        """For the guard that comes: its jobs say what is done, and the tracer is shared."""
        return dataclasses.replace(self.guard.settings, on_nan="recover", trace="never")

    @property
    def config(self) -> RecoveryConfig:
        """For the jobs of the guard that comes."""
        return _STOP if self.stops else UNATTENDED

    def stand_in(self, guard: Guard) -> Attachment:
        """Let `guard`, which is not attached yet, watch in the place of the first, until removal.

        It knows all that the first one knew, and the other way round.
        """
        first = self.guard
        first.detach()
        for key in guard.jobs.keys() & first.jobs.keys():  # its own know more
            first.jobs.pop(key).close()
        others = list(first.jobs)
        guard.jobs |= first.jobs
        guard.past = first.past
        self.guard, self._is_taken = guard, True
        guard.attach()

        def give_back() -> None:
            for key in others:
                guard.jobs.pop(key, None)
            # An error that ends the script is looked into by the first guard, which comes later.
            guard.leaves_moments = sys.exc_info()[1] is not None
            guard.close()
            self.guard, self._is_taken = first, False
            if self in _open:
                self._attach(first)

        return Attachment(give_back)

    def close(self) -> None:
        """No guard comes any more, and whoever is there stops watching."""
        if self in _open:
            _open.remove(self)
        self.guard.close()


def free_process_guard() -> ProcessGuard | None:
    """Who watches this process, if there is somebody whose place can be taken."""
    return next((process_guard for process_guard in _open if process_guard.is_free), None)
