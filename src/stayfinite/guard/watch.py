"""stayfinite.watch: one call that guards a training loop."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from stayfinite.errors import InputError
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job, Parts
from stayfinite.records import Incident
from stayfinite.recover.config import RecoveryConfig
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.settings import GuardSettings

logger = logging.getLogger("stayfinite")
Sink = Callable[[Incident], None]


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    ema: Any = None,
    loader: Any = None,
    config: RecoveryConfig | None = None,
    on_nan: Literal["recover", "stop", "warn"] = "recover",
    sinks: Iterable[Sink] | None = None,
) -> Guard:
    """A guard over this model's training, until `close()` or the end of a `with` block.

    A loop that knows nothing of it has its bad updates vetoed, as if their batches had not
    been; `guard.step(fn, batch)` can also replay and retry. `scheduler` and `ema` may be
    several. Each incident goes to all `sinks`; without any, its report goes to stderr.

    >>> import torch, stayfinite
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with stayfinite.watch(model, optimizer, sinks=[]) as guard:
    ...     for value in (1.0, float("nan"), 2.0):
    ...         optimizer.zero_grad()
    ...         model(torch.full((1, 2), value)).sum().backward()
    ...         optimizer.step()
    >>> len(guard.incidents), bool(model.weight.isfinite().all())
    (1, True)
    """
    _check(model, optimizer)
    settings = GuardSettings(on_nan=on_nan, folder=os.getcwd())
    guard = Guard(settings, on_incident=told_to(sinks), only=optimizer)
    if on_nan == "recover":
        config = RecoveryConfig() if config is None else config
        parts = Parts(
            optimizer=optimizer,
            modules=(model,),
            schedulers=_several(scheduler),
            scaler=scaler,
            emas=_several(ema),
            loader=loader,
        )
        guard.add(Job(parts, config, NaNRecoveryManager(config)))
    guard.attach()
    return guard


def told_to(sinks: Iterable[Sink] | None) -> Sink:
    """Tells all of them; without any, shows the report. One that fails keeps nobody."""
    return _fan_out([_show] if sinks is None else list(sinks))


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer."
        )


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _show(incident: Incident) -> None:
    state = random.getstate()  # which rich draws from, even when it is loaded
    from stayfinite.report.terminal import show

    show(incident)
    random.setstate(state)


def _fan_out(sinks: Sequence[Sink]) -> Sink:
    failed: set[int] = set()

    def tell(incident: Incident) -> None:
        for number, sink in enumerate(sinks):
            try:
                sink(incident)
            except Exception:
                if number not in failed:
                    failed.add(number)
                    logger.exception("a sink failed; it is told of later incidents all the same")

    return tell
