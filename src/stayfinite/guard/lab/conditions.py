"""A child of the standing script is put under the conditions of its order."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from stayfinite.detect.gradients import params_of
from stayfinite.explain.experiments.replays import CannotReplayError, Change
from stayfinite.guard import Guard
from stayfinite.guard.conditions import clip_updates, multiply_scale
from stayfinite.guard.proving import higher_dtype, kept_inside
from stayfinite.guard.raising import raised
from stayfinite.guard.splitting import Split
from stayfinite.locate.lossgraph import only_term
from stayfinite.records import Incident
from stayfinite.recover.rates import lower_rates, schedulers_of
from stayfinite.snapshot.batches import rebuilt

Copies = list[tuple[Tensor, Tensor]]
Problem = Callable[[], str | None]


class Conditions:
    """What a change asks for, from now to the end of the process; nothing is put back."""

    def __init__(self, guard: Guard, incident: Incident, change: Change) -> None:
        self._guard, self._incident, self._change = guard, incident, change
        self._entered: list[Any] = []  # or they would be left with the last reference
        self._problems: list[Problem] = []
        self._has_delivered = False
        self._dtype: torch.dtype | None = None

    def begin(self, copies: Copies) -> None:
        """Put the process under them; CannotReplayError if that cannot be done."""
        change, guard = self._change, self._guard
        torch.set_num_threads(1)  # threads do not outlive a fork
        with guard.unseen():
            if change.snapshot is not None:
                _put_back(copies)
            self._gentler()
        if change.is_compiled:
            if not _compiled():
                raise CannotReplayError("nothing is compiled")
            guard.trace_no_more()
        if change.precision is not None:
            self._raise_precision(change.precision)
        if change.term is not None:
            self._take_term(change.term)
        if change.is_guarded:
            self._keep_inside()

    def problem(self) -> str | None:
        """Why what was seen says nothing about the change; None if it does."""
        return next((said for ask in self._problems if (said := ask()) is not None), None)

    def batch(self, batch: Any) -> Any:
        """What a loader hands over in place of its batch."""
        change = self._change
        with self._guard.unseen():
            if change.rows is not None and not self._has_delivered:
                split = Split(batch)
                batch = split.only(change.rows)
                if change.replaced is not None and change.donor is not None:
                    batch = split.with_values(batch, *change.replaced, change.donor)
            self._has_delivered = True
            return self._lifted(batch)

    def _gentler(self) -> None:
        change, optimizers = self._change, self._guard.evidence.optimizers()
        if change.learning_rate != 1.0:
            for optimizer in optimizers:
                lower_rates(optimizer, schedulers_of(optimizer), change.learning_rate)
        if change.clip is not None:
            self._entered.append(clip_updates(optimizers, max_norm=change.clip))
        if change.loss_scale != 1.0:
            if self._guard.evidence.scaler is None:
                raise CannotReplayError("there is no loss scale")
            multiply_scale(self._guard.evidence.scaler, change.loss_scale)

    def _take_term(self, number: int) -> None:
        if self._guard.evidence.scaler is not None:
            raise CannotReplayError("a term alone would go without its scale")
        context = only_term(number, self._guard.node_sites)
        begun = self._enter(context)
        said = "there is not one backward pass from a sum"
        self._problems.append(lambda: None if len(begun) == 1 else said)

    def _keep_inside(self) -> None:
        diagnosis, origin = self._incident.diagnosis, self._incident.origin
        assert diagnosis is not None
        assert origin is not None
        inside = self._enter(kept_inside(diagnosis.cause, origin))
        said = "the operation could not be guarded"
        self._problems.append(lambda: None if inside.applied else said)

    def _raise_precision(self, precision: str) -> None:
        assert self._incident.origin is not None
        self._dtype = higher_dtype(precision, self._incident.origin)
        self._enter(raised(_living(nn.Module), self._dtype))
        register_module_forward_pre_hook(self._lift_inputs)

    def _lift_inputs(self, module: nn.Module, args: Any) -> Any:
        with self._guard.unseen():
            return self._lifted(args)

    def _lifted(self, batch: Any) -> Any:
        dtype = self._dtype
        return batch if dtype is None else rebuilt(batch, lambda leaf: _raised(leaf, dtype))

    def _enter(self, context: Any) -> Any:
        self._entered.append(context)
        return context.__enter__()


def copies_of(optimizers: Iterable[Optimizer]) -> Copies:
    """The parameters as they are now."""
    params = (param for optimizer in optimizers for param in params_of(optimizer))
    return [(param, param.detach().clone()) for param in params]


def has_workers() -> bool:
    """Whether a loader is under way whose workers hand each batch over only once."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    return bool(_living(_MultiProcessingDataLoaderIter))


def _put_back(copies: Copies) -> None:
    with torch.no_grad():
        for param, before in copies:
            param.copy_(before)


def _raised(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.to(dtype) if leaf.dtype.itemsize < dtype.itemsize else leaf


def _compiled() -> bool:
    # Whoever compiles has imported it, and it takes seconds: it is not imported to ask.
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    modules = _living(dynamo.eval_frame.OptimizedModule)
    return bool(modules) or dynamo.utils.counters["frames"]["ok"] > 0


def _living(kind: type) -> list[Any]:
    return list(_each_living(kind))


def _each_living(kind: type) -> Iterator[Any]:
    # issubclass: isinstance would wake up proxies and lazy objects.
    return (each for each in gc.get_objects() if issubclass(type(each), kind))
