"""Every kind of tensor that people have, each made from the same plain one."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

WIDE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
BAD = (math.nan, math.inf, -math.inf)
NAN_ONLY = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


def quiet(make: Callable[..., Any]) -> Callable[..., Any]:
    """Making some kinds warns once; looking at them must not, so only the making is quiet."""

    @functools.wraps(make)
    def inner(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(*args)

    return inner


def in_gaps(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape, 2), math.nan).to(x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def jagged_with_holes(x: Tensor) -> Tensor:
    rows = torch.stack([x.flatten(), torch.full_like(x.flatten(), math.nan)])
    lengths = torch.tensor([x.numel(), 0])
    return torch.nested.nested_tensor_from_jagged(
        rows.flatten(), torch.tensor([0, x.numel(), 2 * x.numel()]), lengths
    )


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def masked(x: Tensor) -> Tensor:
    data = torch.cat([x.flatten(), torch.full((1,), math.nan, dtype=x.dtype)])
    mask = torch.ones(data.shape, dtype=torch.bool)
    mask[-1] = False
    return torch.masked.masked_tensor(data, mask)


def coo(x: Tensor) -> Tensor:
    index = torch.ones_like(x, dtype=torch.bool).nonzero().T
    return torch.sparse_coo_tensor(index, x.flatten(), x.shape)


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "one element at a time": lambda x: x.flatten()[:, None, None],
    "transposed": lambda x: x.T,
    "expanded": lambda x: x[None].expand(3, -1, -1),
    "expanded inside": lambda x: x[:, None].expand(-1, 5, -1).transpose(0, 2),
    "with gaps": in_gaps,
    "overlapping": lambda x: x.flatten().as_strided((x.numel() - 1, 2), (1, 1)),
    "parameter": lambda x: torch.nn.Parameter(x),
    "requires grad": lambda x: x.clone().requires_grad_().view_as(x),
    "inference": inference,
    "subclass": lambda x: x.as_subclass(type("Named", (Tensor,), {})),
}
ANY_FLOAT = DENSE | {"two tensors": lambda x: TwoTensor(torch.zeros_like(x), x)}
FLOAT = ANY_FLOAT | {
    "coo": coo,
    "coo with dense dims": lambda x: torch.sparse_coo_tensor(
        torch.arange(len(x))[None], x, x.shape
    ),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((1, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 1)),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
    "jagged with holes": jagged_with_holes,
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "negated": lambda x: torch.complex(x, x).conj().imag if x.dtype in WIDE[:2] else x._neg_view(),
}
FP32 = FLOAT | {
    "masked": masked,
    "mkldnn": lambda x: x.to_mkldnn(),
    "complex": lambda x: torch.complex(torch.zeros_like(x), x),
    "conjugated": lambda x: torch.complex(torch.zeros_like(x), x).conj(),
    "complex in gaps": lambda x: in_gaps(torch.complex(x, torch.zeros_like(x))),
}


def kinds_for(dtype: torch.dtype) -> list[str]:
    return sorted(_table(dtype))


def _table(dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    if dtype in FP8:
        return DENSE
    return FP32 if dtype is torch.float32 else FLOAT


@quiet
def make(kind: str, x: Tensor) -> Tensor:
    """The 2-d tensor `x` as a tensor of this kind, with the same values in it."""
    return _table(x.dtype)[kind](x)
