"""Operations that are finite, with a finite gradient, for every finite input.

One rule holds for all of them. The value is the true one wherever that exists and the dtype can
hold it; elsewhere the input is moved to the nearest number that has one, or the result to the
largest finite one. The gradient is the true one too, and 0 where the input was moved or is
nearer than eps to a singularity. 0 rather than the steep 1 / eps, because one such step of SGD
ruins a run: benchmarks/stable.py trains the same model with both. NaN stays NaN; an infinite
input is not covered. eps is 1e-8 unless given, but never so small that 1 / eps is too large for
the dtype (6e-5 in float16), or of two operands for the narrower one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from stayfinite.errors import ConfigError, InputError

EPS = 1e-8
"""How near to a singularity a gradient is still given, where the dtype can hold it."""


def safe_log(x: Tensor, eps: float | None = None) -> Tensor:
    """log(x); below eps it is log(eps), with a gradient of 0.

    >>> safe_log(torch.tensor([1.0, 0.0, -3.0]))
    tensor([  0.0000, -18.4207, -18.4207])
    """
    x = as_float(x)
    return x.clamp_min(eps_of(x.dtype, eps)).log()


def safe_sqrt(x: Tensor, eps: float | None = None) -> Tensor:
    """sqrt(x), 0 for negative x; below eps the gradient is 0.

    >>> safe_sqrt(torch.tensor([4.0, 0.0, -1e-7]))
    tensor([2., 0., 0.])
    """
    x = as_float(x)
    near = eps_of(x.dtype, eps)

    def slope(x: Tensor) -> Tensor:
        is_near = x < near
        return torch.where(is_near, 0.0, 0.5 * torch.where(is_near, 1.0, x).rsqrt())

    return curve(lambda x: x.clamp_min(0).sqrt(), (slope,), x)


def safe_div(
    numerator: Tensor | float, denominator: Tensor | float, eps: float | None = None
) -> Tensor:
    """The quotient, with a denominator that is at least eps away from 0 on its own side of it.

    So 0 / 0 is 0. Nearer than eps the denominator gets no gradient; a quotient that is too large
    for the dtype is its largest number.

    >>> safe_div(torch.tensor([1.0, 0.0, 3e38]), torch.tensor([4.0, 0.0, 0.1]))
    tensor([2.5000e-01, 0.0000e+00, 3.4028e+38])
    """
    a, b, narrow = _together(numerator, denominator)
    near, limit, steep = eps_of(narrow, eps), torch.finfo(a.dtype).max, steepest(narrow)

    def quotient(a: Tensor, b: Tensor) -> Tensor:
        return (a / _keep_away(b, near)).clamp(-limit, limit)

    def by_b(a: Tensor, b: Tensor) -> Tensor:
        kept = _keep_away(b, near)
        return torch.where(b.abs() < near, 0.0, -(quotient(a, b) / kept).clamp(-steep, steep))

    return curve(quotient, (lambda a, b: _keep_away(b, near).reciprocal(), by_b), a, b)


def safe_pow(base: Tensor, exponent: Tensor | float, eps: float | None = None) -> Tensor:
    """base ** exponent; a negative base with a fractional exponent counts as 0.

    For a negative exponent the base is at least eps away from 0. Nearer than eps the base gets no
    gradient if the exponent is below 1; an exponent gets none from a base of 0 or less. A power
    that is too large for the dtype is its largest number.

    >>> safe_pow(torch.tensor([9.0, 0.0, -8.0]), 0.5)
    tensor([3., 0., 0.])
    >>> safe_pow(torch.tensor([-2.0, 0.0]), -3)
    tensor([-1.2500e-01,  1.0000e+24])
    """
    if not isinstance(exponent, Tensor):
        x, p = as_float(base), float(exponent)
        near, steep = eps_of(x.dtype, eps), steepest(x.dtype)
        slope = partial(_power_by_base, p=p, near=near, steep=steep)
        return curve(lambda x: _power(x, p, near), (slope,), x)
    base, exponent, narrow = _together(base, exponent)
    near, steep = eps_of(narrow, eps), steepest(narrow)
    slopes = (
        lambda x, p: _power_by_base(x, p, near, steep),
        lambda x, p: _power_by_exponent(x, p, near, steep),
    )
    return curve(lambda x, p: _power(x, p, near), slopes, base, exponent)


def safe_acos(x: Tensor, eps: float | None = None) -> Tensor:
    """acos(x), with x beyond 1 or -1 counted as that; nearer to them than eps the gradient is 0.

    Unless eps is given, only 1 and -1 and what is beyond have no gradient: at their neighbours it
    is 2896 in float32.

    >>> safe_acos(torch.tensor([0.0, 1.0, 1.0000001]))
    tensor([1.5708, 0.0000, 0.0000])
    """
    x = as_float(x)
    near = torch.finfo(x.dtype).eps / 4 if eps is None else eps_of(x.dtype, eps)

    def slope(x: Tensor) -> Tensor:
        is_near = 1 - x.abs() < near
        x = torch.where(is_near, 0.0, x)
        return torch.where(is_near, 0.0, -((1 - x) * (1 + x)).rsqrt())

    return curve(lambda x: x.clamp(-1, 1).acos(), (slope,), x)


def safe_atan2(y: Tensor | float, x: Tensor | float, eps: float | None = None) -> Tensor:
    """The angle of the point (x, y), as torch.atan2; nearer than eps to the origin no gradient.

    >>> safe_atan2(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.7854])
    """
    y, x, narrow = _together(y, x)
    near = eps_of(narrow, eps)

    def by_first(first: Tensor, second: Tensor) -> Tensor:
        is_near = torch.hypot(first, second) < near
        second = torch.where(is_near, 1.0, second)
        length = torch.hypot(first, second)
        return torch.where(is_near, 0.0, second / length / length)

    return curve(torch.atan2, (by_first, lambda y, x: -by_first(x, y)), y, x)


def log1mexp(x: Tensor, eps: float | None = None) -> Tensor:
    """log(1 - exp(-|x|)): the log of 1 - p from the log of p, whichever sign that is kept with.

    Exact for small and for large |x|; below eps it is the value at eps, with a gradient of 0.

    >>> log1mexp(torch.tensor([-1e-6, -0.5, -30.0]))
    tensor([-1.3816e+01, -9.3275e-01, -9.3576e-14])
    """
    x = as_float(x)
    near = eps_of(x.dtype, eps)

    # By sinh, for expm1 that torch.compile makes for a CPU is exp(x) - 1, which is 0 for small x.
    def value(x: Tensor) -> Tensor:
        size = x.abs().clamp_min(near)
        small = (2 * (size / 2).sinh()).log() - size / 2
        return torch.where(size < math.log(2), small, (-(-size).exp()).log1p())

    def slope(x: Tensor) -> Tensor:
        is_near = x.abs() < near
        size = torch.where(is_near, 1.0, x).abs()
        return torch.where(is_near, 0.0, x.sign() * (-size / 2).exp() / (2 * (size / 2).sinh()))

    return curve(value, (slope,), x)


def _power(x: Tensor, p: Tensor | float, near: float) -> Tensor:
    limit, dtype = torch.finfo(x.dtype).max, x.dtype
    x, p = _finer(x, p)
    x = torch.where((x.abs() < near) & (p < 0), _keep_away(x, near), x)
    return torch.pow(x, p).clamp(-limit, limit).to(dtype)


def _power_by_base(x: Tensor, p: Tensor | float, near: float, steep: float) -> Tensor:
    dtype = x.dtype
    x, p = _finer(x, p)
    is_near = (x.abs() < near) & (p < 1)
    slope = p * torch.pow(torch.where(is_near, 1.0, x), p - 1)
    return torch.where(is_near, 0.0, slope.clamp(-steep, steep)).to(dtype)


def _power_by_exponent(x: Tensor, p: Tensor, near: float, steep: float) -> Tensor:
    dtype, is_positive = x.dtype, x > 0
    x, p = widen(x), widen(p)
    x = torch.where((x < near) & (p < 0), near, torch.where(is_positive, x, 1.0))
    slope = (torch.pow(x, p) * x.log()).clamp(-steep, steep)
    return torch.where(is_positive, slope, 0.0).to(dtype)


def _finer(x: Tensor, p: Tensor | float) -> tuple[Tensor, Tensor | float]:
    """Base and exponent, 0 for a base without a root; half precision is too coarse for an exponent.

    torch rounds a number to the dtype of the base: x ** -0.7 is off by 15% in bfloat16.
    """
    x, p = widen(x), widen(p) if isinstance(p, Tensor) else p
    return torch.where((x <= 0) & (p % 1 != 0), 0.0, x), p  # <=, for there is a -0.0


def _keep_away(x: Tensor, near: float) -> Tensor:
    """x, but at least `near` away from 0 on its own side."""
    return x.abs().clamp_min(near).copysign(x)


def _together(first: Tensor | float, second: Tensor | float) -> tuple[Tensor, Tensor, torch.dtype]:
    """Both as floating tensors of one shape and dtype, and the dtype that all gradients fit into.

    At least one is a tensor.
    """
    tensors = [as_float(value) for value in (first, second) if isinstance(value, Tensor)]
    if not tensors:
        raise InputError(
            f"got two {type(first).__name__}s; at least one must be a tensor. "
            "For plain numbers use the math module."
        )
    # As in torch, numbers and 0-d tensors take the dtype of the other.
    dtypes = [tensor.dtype for tensor in tensors if tensor.ndim or len(tensors) == 1]
    dtypes = dtypes or [tensor.dtype for tensor in tensors]
    dtype, device = torch.promote_types(dtypes[0], dtypes[-1]), tensors[0].device
    a, b = torch.broadcast_tensors(
        torch.as_tensor(first, dtype=dtype, device=device),
        torch.as_tensor(second, dtype=dtype, device=device),
    )
    return a, b, narrowest(dtype, *(tensor.dtype for tensor in tensors))


# Curves: functions that bring their own derivative, because the one torch derives can be Inf.
#
# The trap that all of this avoids: `torch.where(x > 0, x.log(), 0)` looks safe and is not. Its
# backward sends a gradient of 0 into the branch that was not taken, there it is multiplied by the
# derivative 1 / 0, and 0 * Inf is NaN. The way out is a second `where`, before the operation:
#
#     good = x > 0
#     torch.where(good, torch.where(good, x, 1).log(), 0)
#
# so that the branch that is not taken has a harmless input too. Slopes are written like that, for
# second derivatives go through them; and masks are applied to the inputs of a loss, not to it.


def eps_of(dtype: torch.dtype, eps: float | None = None, *, steepness: float = 1.0) -> float:
    """The given eps or the default, but so large that steepness / eps leaves two bits of room."""
    if eps is not None and not eps > 0:
        raise ConfigError(
            f"eps is {eps}; it must be greater than 0. Do not pass it to use the default."
        )
    return max(eps or EPS, 4 * steepness / torch.finfo(dtype).max)


def steepest(dtype: torch.dtype) -> float:
    """The largest slope that is given: sums and, but for float16, squares of it are finite."""
    return 2.0**14 if dtype == torch.float16 else 2.0 ** (62 if dtype != torch.float64 else 510)


def narrowest(*dtypes: torch.dtype) -> torch.dtype:
    """The one with the smallest largest number."""
    return min(dtypes, key=lambda dtype: torch.finfo(dtype).max)


def as_float(x: Tensor) -> Tensor:
    """The tensor itself, or for integers and bools the same numbers as floats."""
    if x.is_complex():
        raise InputError(f"got a tensor of {x.dtype}; only real numbers have an order and limits.")
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def widen(x: Tensor) -> Tensor:
    """Half precision as float32, the rest as it is: sums and losses need the room."""
    x = as_float(x)
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


def safe_norm(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """The Euclidean norm over `dim`, or of the whole tensor; for a zero vector the gradient is 0.

    Nothing is squared before it is divided by the largest element, so that neither large nor
    small elements are lost; a norm that is too large for the dtype is its largest number.

    >>> safe_norm(torch.tensor([[3e30, 4e30], [0.0, 0.0]]), dim=-1)
    tensor([5.0000e+30, 0.0000e+00])
    """
    x = as_float(x)
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    if not x.numel():
        return x.sum(dims, keepdim=keepdim)
    limit = torch.finfo(x.dtype).max

    def length(x: Tensor) -> Tensor:
        ratios, largest = _ratios(x, dims)
        return (_root_of_squares(ratios, dims) * largest).clamp(max=limit)

    def slope(x: Tensor) -> Tensor:
        ratios, _ = _ratios(x, dims)
        return ratios / _root_of_squares(ratios, dims)

    norm = curve(length, (slope,), widen(x)).to(x.dtype)
    return norm if keepdim else norm.squeeze(dims)


def direction(x: Tensor, near: Tensor | float) -> Tensor:
    """x over its length along the last dimension; a zero vector stays zero.

    A vector whose largest element is below `near` gets no gradient: that of its direction is
    1 / length.
    """

    def slope(x: Tensor, largest: Tensor) -> Tensor:
        is_near = largest < near
        return torch.where(is_near, 0.0, 1 / torch.where(is_near, 1.0, largest))

    # The direction does not depend on the divisor, so it may be a constant.
    largest = x.detach().abs().amax(-1, keepdim=True)
    divisor = torch.where(largest == 0, 1.0, largest)
    ratios = curve(torch.div, (slope,), x, divisor.expand_as(x))
    return ratios / _root_of_squares(ratios, (-1,))


def _ratios(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The elements over the largest of their vector, and that one; all 0 for a zero vector."""
    largest = x.detach().abs().amax(dims, keepdim=True)
    return x / torch.where(largest == 0, 1.0, largest), largest


def _root_of_squares(ratios: Tensor, dims: tuple[int, ...]) -> Tensor:
    """At least 1, for one of the ratios is; and 1 for a zero vector."""
    total = (ratios * ratios).sum(dims, keepdim=True)
    return torch.where(total == 0, 1.0, total).sqrt()
