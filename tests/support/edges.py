"""Floating-point numbers of every dtype, edges first, for property tests of numerics."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
HALF = {torch.float16, torch.bfloat16}


def edges(dtype: torch.dtype) -> list[float]:
    """0, the largest, the smallest normal and subnormal numbers, what is around 1; both signs."""
    about = torch.finfo(dtype)
    smallest = about.tiny * about.eps
    sizes = [0.0, smallest, about.tiny, 1e-8, 6.2e-5, about.eps, 1 - about.eps / 2, 1.0]
    sizes += [1 + about.eps, 89.0, 710.0, math.sqrt(about.max), about.max / 2, about.max]
    return [sign * size for size in rounded(sizes, dtype) for sign in (1.0, -1.0)]


def rounded(values: list[float], dtype: torch.dtype) -> list[float]:
    """The nearest finite numbers of the dtype."""
    limit = torch.finfo(dtype).max
    return torch.tensor(values, dtype=torch.float64).clamp(-limit, limit).to(dtype).tolist()


def tensors(dtype: torch.dtype, *shape: int) -> st.SearchStrategy[Tensor]:
    """Tensors of any finite numbers: half of them edges, a quarter of everyday size.

    Drawn as bytes, because drawing each number costs more than what is tested.
    """
    count = math.prod(shape)
    return st.binary(min_size=9 * count, max_size=9 * count).map(
        lambda drawn: _numbers(drawn, dtype).reshape(shape)
    )


def _numbers(drawn: bytes, dtype: torch.dtype) -> Tensor:
    count = len(drawn) // 9
    kind = torch.frombuffer(bytearray(drawn[:count]), dtype=torch.uint8).long()
    whole = torch.frombuffer(bytearray(drawn[count:]), dtype=torch.int64)
    # The bits of whole numbers, so that all exponents are equally likely.
    anything = whole.to(_AS_WIDE[dtype]).view(dtype).nan_to_num()
    everyday = (whole / 2.0**61).to(dtype)
    table = torch.tensor(edges(dtype), dtype=dtype)
    return torch.where(
        kind < 128, table[kind % len(table)], torch.where(kind < 192, everyday, anything)
    )


_AS_WIDE = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The value, and the gradients of its sum by the inputs."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    value = function(*leaves)
    found = torch.autograd.grad(value, leaves, torch.ones_like(value))
    return value.detach(), list(found)
