"""The plain memory behind any tensor, in whole or in small pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.parameter import Parameter, is_lazy

PIECE = 1 << 16
"""Elements looked at together where a copy cannot be avoided: the largest temporary we make."""

_FAKE = torch._C._TorchDispatchModeKey.FAKE
# Packed 4-bit floats have neither NaN nor Inf, and torch cannot convert them.
_PACKED = {getattr(torch, "float4_e2m1fn_x2", None)}
_INTEGERS = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
_INTEGERS |= {torch.int8, torch.int16, torch.int32, torch.int64}

P = ParamSpec("P")
R = TypeVar("R")


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """The function, deaf to the caller's autograd, default device, vmap and fake tensors.

    Below autograd no graph is made and no version counter moves; this costs half of no_grad.
    """

    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        is_real = (
            torch._C._len_torch_dispatch_stack() == 0 or torch._C._get_dispatch_mode(_FAKE) is None
        )
        if is_real and _functorch.peek_interpreter_stack() is None:
            with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction():
                return function(*args, **kwargs)
        with temporarily_clear_interpreter_stack(), unset_fake_temporarily():
            return inner(*args, **kwargs)

    return inner


def float_parts(value: Any) -> Iterator[Tensor]:
    """Dense, strided, real floating-point tensors that are finite if and only if `value` is.

    They share its memory. Nothing comes from what cannot be non-finite or has no memory:
    None and other non-tensors, integers, empty, meta, fake and freed tensors. Of a sparse
    tensor the stored values are meant, of a DTensor the local shard, of a quantized one the
    scales.
    """
    for part in plain_parts(value):
        if part.is_complex():
            if not part.is_conj():
                yield torch.view_as_real(part)
                continue
            both = torch.view_as_real(part.conj())
            yield both[..., 0]
            yield both[..., 1]._neg_view()
        elif part.is_floating_point() and is_readable(part.dtype):
            yield part


def is_readable(dtype: torch.dtype) -> bool:
    """Whether torch can convert elements of this dtype to numbers."""
    if dtype in _INTEGERS or dtype.is_complex:
        return True
    return dtype.is_floating_point and dtype not in _PACKED


def plain_parts(value: Any) -> Iterator[Tensor]:
    """Like float_parts, but of any dtype."""
    if not isinstance(value, Tensor):
        return
    for applies, inner_tensors in () if _is_ordinary(value) else _WRAPPERS:
        if applies(value):
            for inner in inner_tensors(value):
                yield from plain_parts(inner)
            return
    # FSDP frees the storage of parameters that are not in use; reading them would crash.
    if value.numel() and value.untyped_storage().size():
        yield value


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether none of the wrappers below can apply; most tensors need no more questions."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
        and not _functorch.is_functorch_wrapped_tensor(tensor)
    )


def _nested_tensors(tensor: Any) -> tuple[Tensor, ...]:
    # With lengths there are holes between the rows, and they may hold anything.
    if tensor.layout is torch.jagged and tensor._lengths is None:
        return (tensor._values,)
    return tuple(tensor.unbind())


def _scales(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (torch.tensor(tensor.q_scale(), device=tensor.device),)
    return (tensor.q_per_channel_scales(),)


_WRAPPERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (_functorch.is_functorch_wrapped_tensor, lambda t: (_functorch.get_unwrapped(t),)),
    (lambda t: isinstance(t, FakeTensor) or is_lazy(t) or t.is_meta, lambda t: ()),
    # A collective that may still be under way.
    (lambda t: hasattr(t, "trigger_wait"), lambda t: (t.trigger_wait(),)),
    (lambda t: t.is_nested, _nested_tensors),
    (
        lambda t: hasattr(t, "__tensor_flatten__"),
        lambda t: [getattr(t, name) for name in t.__tensor_flatten__()[0]],
    ),
    # Masked-out elements may be non-finite; only a copy tells them apart.
    (
        lambda t: hasattr(t, "_masked_data"),
        lambda t: (t._masked_data.masked_fill(~t._masked_mask, 0),),
    ),
    (lambda t: t.layout is torch.sparse_coo, lambda t: (t._values(),)),
    # The packed memory of mkldnn cannot be read in place.
    (lambda t: t.is_mkldnn, lambda t: (t.to_dense(),)),
    (lambda t: t.layout is not torch.strided, lambda t: (t.values(),)),
    (lambda t: t.is_quantized, _scales),
)


def compact(tensor: Tensor) -> Tensor:
    """A view of the same elements, contiguous where the memory has no gaps.

    Repeats made by expand() are left out and dimensions are put in memory order.
    """
    if tensor.is_contiguous():
        return tensor
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    kept = sorted(((step, size) for step, size in dims if step and size > 1), reverse=True)
    sizes, strides = [size for _, size in kept], [step for step, _ in kept]
    return tensor.as_strided(sizes, strides, tensor.storage_offset())


def pieces(tensor: Tensor, limit: int = PIECE) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Views of at most `limit` elements in row-major order, each with the index of its start.

    A piece may have fewer dimensions than the tensor; they are its last ones.
    """
    if tensor.numel() <= limit:
        yield (0,) * tensor.dim(), tensor
        return
    rows = tensor.shape[0]
    step = limit * rows // tensor.numel()
    if step == 0:
        for row in range(rows):
            for start, piece in pieces(tensor[row], limit):
                yield (row, *start), piece
        return
    rest = (0,) * (tensor.dim() - 1)
    for row in range(0, rows, step):
        yield (row, *rest), tensor.narrow(0, row, min(step, rows - row))


def unwrap(tensor: Tensor) -> Tensor:
    """The tensor that torch.func's transforms have wrapped, or a DTensor's shard; else itself."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return local(tensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor as it is.

    Nothing is ever asked of a DTensor itself: its sums and norms are collectives, which a rank that
    asks alone would wait in for ever.
    """
    if type(tensor) in (Tensor, Parameter) or not is_sharded(tensor):
        return tensor
    shard: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    # One that a functional collective still fills is waited for.
    return shard.trigger_wait() if hasattr(shard, "trigger_wait") else shard


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which each rank has a part; its module is not imported to ask."""
    return is_sharded_type(type(tensor))


def is_sharded_type(kind: type) -> bool:
    """The same of all tensors of a type."""
    # Private, and the only way to the shard that makes no node in the graph: to_local() does.
    return hasattr(kind, "_local_tensor") and hasattr(kind, "device_mesh")
