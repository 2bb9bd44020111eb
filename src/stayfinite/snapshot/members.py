"""Who belongs to a training job, and all the state they have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.errors import InputError
from stayfinite.snapshot.census import Census
from stayfinite.snapshot.owners import (
    add_gradients,
    add_loader,
    add_loose_parameters,
    add_modules,
    add_object,
    add_optimizer,
)
from stayfinite.snapshot.rng import global_cells


@dataclass(frozen=True, kw_only=True)
class Members:
    """The members of one training job."""

    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    averages: tuple[Any, ...] = ()
    loader: Any = None
    generators: tuple[Any, ...] = ()

    def census(self) -> Census:
        """All that can change in them now. The order of the parts decides who owns what."""
        census = Census()
        add_modules(census, self.models)
        names = add_loose_parameters(census, self.optimizers)
        add_gradients(census, ((name, param) for param, name in names.items()))
        for optimizer in self.optimizers:
            add_optimizer(census, optimizer, names)
        for name, owner in _numbered("scheduler", self.schedulers):
            add_object(census, owner, name, "scheduler")
        if self.scaler is not None:
            add_object(census, self.scaler, "scaler", "scaler")
        for name, owner in _numbered("ema", self.averages):
            add_object(census, owner, name, "ema")
        census.cells += global_cells()
        for name, generator in _numbered("random.generator", self.generators):
            census.value(generator, name, "random")
        if self.loader is not None:
            add_loader(census, self.loader)
        return census


def _numbered(name: str, owners: tuple[Any, ...]) -> Iterable[tuple[str, Any]]:
    if len(owners) == 1:
        return [(name, owners[0])]
    return [(f"{name}.{number}", owner) for number, owner in enumerate(owners)]


def gathered(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, ema: Any, loader: Any, generators: Any
) -> Members:
    """Members from what people pass: one of a kind, a sequence, or None."""
    return Members(
        models=_several(model, nn.Module, "model"),
        optimizers=_several(optimizer, Optimizer, "optimizer"),
        schedulers=_several(scheduler, object, "scheduler"),
        scaler=scaler,
        # A dict or a list of tensors is one average.
        averages=_several([ema] if _is_of_tensors(ema) else ema, object, "ema"),
        loader=loader,
        generators=_several(generators, object, "generators"),
    )


def _several(value: Any, kind: type, name: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    members = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    wrong = [type(member).__name__ for member in members if not isinstance(member, kind)]
    if wrong:
        raise InputError(
            f"{name} is a {wrong[0]}; it must be a {kind.__name__} or a sequence of them."
        )
    return members


def _is_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value)
