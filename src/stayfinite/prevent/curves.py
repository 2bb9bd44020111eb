"""Curves: functions that bring their own derivative, because the one torch derives can be Inf.

The trap that all of this avoids: `torch.where(x > 0, x.log(), 0)` looks safe and is not. Its
backward sends a gradient of 0 into the branch that was not taken, there it is multiplied by the
derivative 1 / 0, and 0 * Inf is NaN. The way out is a second `where`, before the operation:

    good = x > 0
    torch.where(good, torch.where(good, x, 1).log(), 0)

so that the branch that is not taken has a harmless input too. Slopes are written like that, for
second derivatives go through them; and masks are applied to the inputs of a loss, not to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from stayfinite.errors import ConfigError, InputError

EPS = 1e-8
"""How near to a singularity a gradient is still given, where the dtype can hold it."""


def eps_of(dtype: torch.dtype, eps: float | None = None, *, steepness: float = 1.0) -> float:
    """The given eps or the default, but so large that steepness / eps leaves two bits of room."""
    if eps is not None and not eps > 0:
        raise ConfigError(f"eps is {eps}; it must be greater than 0. Leave it out for the default.")
    return max(eps or EPS, 4 * steepness / torch.finfo(dtype).max)


def steepest(dtype: torch.dtype) -> float:
    """The largest slope that is given: sums and, but for float16, squares of it are finite."""
    return 2.0**14 if dtype == torch.float16 else 2.0 ** (62 if dtype != torch.float64 else 510)


def narrowest(*dtypes: torch.dtype) -> torch.dtype:
    """The one with the smallest largest number."""
    return min(dtypes, key=lambda dtype: torch.finfo(dtype).max)


def floating(x: Tensor) -> Tensor:
    """The tensor itself, or for integers and bools the same numbers as floats."""
    if x.is_complex():
        raise InputError(f"got a tensor of {x.dtype}; only real numbers have an order and limits.")
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def widened(x: Tensor) -> Tensor:
    """Half precision as float32, the rest as it is: sums and losses need the room."""
    x = floating(x)
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def curve(
    value: Callable[..., Tensor], slopes: tuple[Callable[..., Tensor], ...], *inputs: Tensor
) -> Tensor:
    """`value(*inputs)`, elementwise, whose derivative by each input is what its slope says.

    There are at most three inputs, of one shape and dtype; the last ones may be constants, which
    have no slope. Slopes are differentiated for second derivatives, so they are functions of the
    inputs and nothing else. There is no forward-mode derivative, since torch.compile does not take
    functions that have one.
    """
    apply: Callable[..., Tensor] = _Curve.apply
    return apply(value, slopes, *inputs, *[None] * (3 - len(inputs)))


class _Curve(Function):
    generate_vmap_rule = True

    # Three inputs rather than *inputs: torch.compile counts parameters to know there is no ctx.
    @staticmethod
    def forward(
        value: Callable[..., Tensor], _slopes: Any, x: Tensor, y: Tensor | None, z: Tensor | None
    ) -> Tensor:
        return value(*(each for each in (x, y, z) if each is not None))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.slopes, *given = inputs
        ctx.save_for_backward(*(each for each in given if each is not None))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        gradients = [
            gradient * slope(*inputs) if is_needed else None
            for slope, is_needed in zip(ctx.slopes, needed, strict=False)
        ]
        return None, None, *gradients, *[None] * (3 - len(gradients))
