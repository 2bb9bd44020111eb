"""stayfinite.watch: one call that guards a training loop."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from stayfinite.detect.hooks import Attachment
from stayfinite.errors import InputError
from stayfinite.guard.guard import Guard, GuardPast
from stayfinite.guard.job import Job, Parts
from stayfinite.guard.recorder import recorder_in
from stayfinite.nested import as_tuple
from stayfinite.recover.config import RecoveryConfig, refuse_unanswered
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.report.alerts import AlertRule
from stayfinite.report.sinks import Sink, forecasts_told_to, told_to, unasked
from stayfinite.settings import GuardSettings
from stayfinite.training import require_module


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
    alerts: Iterable[AlertRule] = (),
    run_dir: str | os.PathLike[str] | None = None,
    prove_seconds: float = 0.0,
    again: Literal["auto", "never"] = "auto",
    group: Any = None,
    forecast: bool = False,
) -> Guard:
    """A guard over this model's training, until `close()` or the end of a `with` block.

    A loop that knows nothing of it has its bad updates skipped, as if their batches had not
    been; `guard.step(fn, batch)` can also replay and retry. `scheduler` and `ema` may be
    several. Each incident goes to all `sinks`; without any, its report goes to
    stderr, and to the trackers that run in this process. Each of `alerts` tells one more
    receiver, under its rule of what matters and how often. With `run_dir` steps and incidents
    are recorded there, for `stayfinite show`, `html` and `ui`. With `prove_seconds`, experiments
    on a bad step of `guard.step` may take so long: they run it again and again without its
    update, to find the bad samples and to prove the diagnosis. Ranks that train together by DDP,
    FSDP, DTensors or a pipeline are found by themselves; where a script sums gradients itself,
    `group` is their process group. With `forecast` the guard also says what is going to overflow
    or diverge, and in how many steps; `config.on_forecast` and `config.on_spike` say what is done
    about it.

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
    settings = GuardSettings(
        on_nan=on_nan, folder=os.getcwd(), prove_seconds=prove_seconds, again=again
    )
    refuse_unanswered(config, _why_unanswered(on_nan, forecast=forecast))
    unchosen = unasked() if sinks is None else []
    sinks, alerts = unchosen if sinks is None else list(sinks), list(alerts)
    tell = told_to(sinks, *alerts)
    recorder = None if run_dir is None else recorder_in(run_dir, config=config)
    guard = Guard(settings, only=optimizer)
    guard.past = GuardPast(
        on_incident=tell if recorder is None else told_to([recorder.heard, tell]),
        on_step=None if recorder is None else recorder.stepped,
        on_pass=None if recorder is None else recorder.passed,
        on_forecast=forecasts_told_to(sinks, recorder, *alerts),
    )
    if forecast:
        from stayfinite.prevent.forecast.forecaster import Forecaster

        guard.past.forecaster = Forecaster(model)
    if group is not None:
        guard.past.rank_groups.given = group
    guard.keep_operations()
    guard.past.moments.watch_modules(model.modules())
    if on_nan == "recover":
        config = RecoveryConfig() if config is None else config
        parts = Parts(
            optimizer=optimizer,
            modules=(model,),
            schedulers=as_tuple(scheduler),
            scaler=scaler,
            emas=as_tuple(ema),
            loader=loader,
        )
        guard.add(Job(parts, config, NaNRecoveryManager(config)))
    more = [_watch_errors(guard), *map(_told_the_end, unchosen)]
    if recorder is not None:
        more.append(Attachment(lambda: recorder.end(is_finite=not guard.incidents)))
    guard.attach(*more)
    return guard


def _watch_errors(guard: Guard) -> Attachment:
    """Look at an error that ends the process, or a bad loss that was read last, without `with`."""
    before = sys.excepthook

    def look(kind: type[BaseException], error: BaseException, traceback: Any) -> Any:
        guard.script_crashed(error)
        return before(kind, error, traceback)

    def restore() -> None:
        atexit.unregister(guard.record_unused_loss)
        if sys.excepthook is look:
            sys.excepthook = before

    sys.excepthook = look
    atexit.register(guard.record_unused_loss)
    return Attachment(restore)


def _told_the_end(sink: Any) -> Attachment:
    """Tell it when the guard is closed, or the process ends; nobody who need not be told."""
    end = getattr(sink, "end", None)
    if end is None:
        return Attachment(lambda: None)
    atexit.register(end)

    def tell() -> None:
        atexit.unregister(end)
        end()

    return Attachment(tell)


def _why_unanswered(on_nan: str, *, forecast: bool) -> str | None:
    if on_nan != "recover":
        return f"with on_nan={on_nan!r} training is left alone; set on_nan='recover'."
    return None if forecast else "forecast is False, so nothing is forecast; set forecast=True."


def _check(model: Any, optimizer: Any) -> None:
    for given in (model, optimizer):
        if any(kind.__module__.partition(".")[0] == "deepspeed" for kind in type(given).__mro__):
            raise InputError(
                f"{type(given).__name__} is DeepSpeed's, which makes its updates where torch's "
                "optimizers do not see them; stayfinite does not handle it."
            )
    require_module(model)
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer."
        )
