"""The gradients of whatever is to be clipped, each by the name that people know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.detect.gradients import params_of
from stayfinite.detect.parts import plain_parts
from stayfinite.detect.walk import Named
from stayfinite.errors import InputError

Target = nn.Module | Optimizer | Tensor | Iterable[Tensor]


class Gradient(NamedTuple):
    """A gradient, its parameter, and dense views of all that is in it, to be read and written."""

    name: str
    param: Tensor
    tensor: Tensor
    memory: list[Tensor]


def gradients_in(target: Target, names: Sequence[str] | None = None) -> list[Gradient]:
    """Each gradient once, by the name of its parameter."""
    found = {
        id(gradient): Gradient(name, param, gradient, _memory(gradient))
        for name, param in _parameters(target, names)
        if (gradient := param.grad) is not None
    }
    return list(found.values())


def _parameters(target: Target, names: Sequence[str] | None) -> Iterable[Named]:
    if isinstance(target, nn.Module) and names is None:
        return target.named_parameters()
    if isinstance(target, Optimizer) and names is None:
        names = [name for group in target.param_groups for name in group.get("param_names", ())]
    params = listed(target)
    return zip(names or map(str, range(len(params))), params, strict=True)


def listed(target: Target) -> list[Tensor]:
    """The parameters of the target; InputError where it is none."""
    if isinstance(target, nn.Module):
        return list(target.parameters())
    if isinstance(target, Optimizer):
        return params_of(target)
    params = [target] if isinstance(target, Tensor) else list(target)
    wrong = [type(param).__name__ for param in params if not isinstance(param, Tensor)]
    if wrong:
        raise InputError(
            f"clip_gradients got a {wrong[0]} among the parameters; "
            "it accepts a module, an optimizer, a parameter or several of them."
        )
    return params


def _memory(gradient: Tensor) -> list[Tensor]:
    if gradient.layout is torch.sparse_coo and not gradient.is_coalesced():
        gradient.copy_(gradient.coalesce())  # repeated entries are added; only sums have a norm
    return [part for part in plain_parts(gradient) if part.is_floating_point() or part.is_complex()]
