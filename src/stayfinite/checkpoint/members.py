"""Who is saved or loaded: one object of a kind, or a sequence of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stayfinite.checkpoint.modules import canonical, named_owners
from stayfinite.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Members:
    """The members of a training job."""

    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    averages: tuple[Any, ...] = ()

    @property
    def has_none(self) -> bool:
        everyone = (*self.models, *self.optimizers, *self.schedulers, *self.averages)
        return not everyone and self.scaler is None


def gather(*, model: Any, optimizer: Any, scheduler: Any, scaler: Any, ema: Any) -> Members:
    """Members from what people pass; InputError names what is none."""
    return Members(
        models=_several(model, "model", nn.Module),
        optimizers=_several(optimizer, "optimizer", Optimizer),
        schedulers=_stateful(_several(scheduler, "scheduler", object), "scheduler"),
        scaler=next(iter(_stateful(_several(scaler, "scaler", object), "scaler")), None),
        averages=_stateful(_several(ema, "ema", object), "ema"),
    )


def _several(value: Any, name: str, kind: type) -> tuple[Any, ...]:
    if value is None:
        return ()
    members = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for member in members:
        if not isinstance(member, kind):
            raise InputError(
                f"{name} is a {type(member).__name__}; it must be a {kind.__name__} or a list "
                "of them."
            )
    return members


def _stateful(members: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    for member in members:
        if not (hasattr(member, "state_dict") and hasattr(member, "load_state_dict")):
            raise InputError(
                f"{name} is a {type(member).__name__}; it must have state_dict() and "
                "load_state_dict()."
            )
    return members


def parameter_names(optimizer: Optimizer, models: tuple[nn.Module, ...]) -> list[str | None]:
    """The name of each parameter of the optimizer, in its order; None for one of no model."""
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        above = f"{number}." if len(models) > 1 else ""
        for prefix, owner in named_owners(model):
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    full = canonical(f"{prefix}.{name}" if prefix else name)
                    names.setdefault(id(parameter), above + full)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [names.get(id(param)) for param in params]
