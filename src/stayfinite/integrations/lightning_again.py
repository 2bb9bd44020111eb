"""A step of Lightning run once more: the same hooks and precision, unseen by everybody else."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

Batches = Sequence[tuple[Any, int]]


class _ReachedError(Exception):
    """The update that the step leads up to."""


def run_again(trainer: Any, optimizer: Optimizer, batches: Batches) -> None:
    """Run the batches, with their numbers, up to the update; gradients are then as before it.

    Callbacks, loggers and the profiler hear nothing of it, what is logged is dropped, and no
    optimizer makes an update. Hooks of the module run, with clipping.
    """
    with _unheard(trainer), torch.enable_grad():
        if trainer.lightning_module.automatic_optimization:
            _run_automatic(trainer, optimizer, batches)
        else:
            _run_manual(trainer, optimizer, batches)


def can_run_again(trainer: Any) -> bool:
    """Whether its steps depend on nothing but their batches."""
    fetcher = type(trainer.fit_loop._data_fetcher).__name__
    # There the step takes its batches itself.
    if fetcher == "_DataLoaderIterDataFetcher":
        return False
    # A wrapper such as DDP cannot be entered once more from inside.
    module = trainer.lightning_module
    return module.automatic_optimization or trainer.strategy.model is module


def library_of(trainer: Any) -> str:
    """The package that the trainer is from: `lightning.pytorch` or `pytorch_lightning`."""
    return type(trainer.fit_loop).__module__.partition(".loops")[0]


def _run_automatic(trainer: Any, optimizer: Optimizer, batches: Batches) -> None:
    loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
    utilities = importlib.import_module(f"{library_of(trainer)}.loops.utilities")
    for place, (batch, number) in enumerate(batches, start=1):
        arguments = loop._build_kwargs(OrderedDict(), batch, number)
        is_last = place == len(batches)
        with utilities._block_parallel_sync_behavior(strategy, block=not is_last):
            loop.automatic_optimization._make_closure(arguments, optimizer, number)()
    _unscale(getattr(trainer.precision_plugin, "scaler", None), optimizer)
    trainer.precision_plugin._after_closure(trainer.lightning_module, optimizer)


def _unscale(scaler: Any, optimizer: Optimizer) -> None:
    """What the scaler does before the update; itself it would refuse to do it twice."""
    if scaler is None or not scaler.is_enabled():
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.div_(scaler.get_scale())


def _run_manual(trainer: Any, optimizer: Optimizer, batches: Batches) -> None:
    loop = trainer.fit_loop.epoch_loop
    with _without_updates(trainer, optimizer), contextlib.suppress(_ReachedError):
        for batch, number in batches:
            arguments = loop._build_kwargs(OrderedDict(), batch, number)
            trainer.strategy.training_step(*arguments.values())


@contextlib.contextmanager
def _without_updates(trainer: Any, wanted: Optimizer) -> Iterator[None]:
    """No optimizer makes an update, and that of the wanted one ends the run."""

    def instead(optimizer: Optimizer) -> Callable[..., None]:
        @functools.wraps(optimizer.step)  # by whose attributes schedulers know it
        def step(closure: Callable[[], Any] | None = None, **_: Any) -> None:
            if closure is not None:
                closure()
            if optimizer is wanted:
                raise _ReachedError

        return step

    with contextlib.ExitStack() as swaps:
        for outer in trainer.strategy._lightning_optimizers:
            step = instead(outer.optimizer)
            swaps.enter_context(swapped(outer, step=step))
            swaps.enter_context(swapped(outer.optimizer, step=step))
        yield


@contextlib.contextmanager
def _unheard(trainer: Any) -> Iterator[None]:
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop.automatic_optimization
    library, name = library_of(trainer), module._current_fx_name
    dummy = importlib.import_module(f"{library}.loggers.logger").DummyLogger
    profiler = importlib.import_module(f"{library}.profilers").PassThroughProfiler()
    loggers = [dummy() for _ in trainer.loggers]
    with (
        swapped(trainer, callbacks=[], _loggers=loggers, profiler=profiler),
        swapped(module, log=_nothing, log_dict=_nothing),
        swapped(loop, optim_progress=copy.deepcopy(loop.optim_progress)),
    ):
        module._current_fx_name = "training_step"
        try:
            yield
        finally:
            module._current_fx_name = name


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of a function that logs."""


@contextlib.contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of one object replaced for a while; those of its class show again after it."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
