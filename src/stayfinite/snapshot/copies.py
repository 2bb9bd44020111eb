"""The values of many tensors, copied into memory of our own and back in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from stayfinite.detect.parts import compact

Offload = Literal["none", "cpu", "pinned"]
Pair = tuple[Tensor, Tensor]
"""Where to, and from where."""
Group = tuple[list[Tensor], list[Tensor]]
"""The same, many at once."""


def memories(tensor: Tensor) -> list[Tensor]:
    """The tensors whose memory is the value: the tensor itself, or what it is made of.

    Nothing for what has no value yet, lazy or meta, and for what is replaced rather than written
    to: inference tensors and results that autograd remembers. Repeats that expand() made are
    left out, since they cannot be written to.
    """
    if is_simple(tensor):
        return [tensor]
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return []
    if tensor.is_inference() or tensor.grad_fn is not None:
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in memories(getattr(tensor, name))]
    if _is_odd(tensor) or tensor.is_contiguous():
        return [tensor]
    return [compact(tensor)]


def is_simple(tensor: Tensor) -> bool:
    """Whether it is an ordinary piece of memory, as nearly all are."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_meta
        and not tensor.is_inference()
        and tensor.grad_fn is None
    )


def _is_odd(tensor: Tensor) -> bool:
    """Whether it can only be copied alone."""
    return (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    )


def size_of(tensor: Tensor) -> int:
    """Bytes of its elements; of a sparse one, as if it were dense."""
    return tensor.numel() * tensor.element_size()


def place_of(tensor: Tensor) -> tuple[int, ...]:
    """Where its memory is."""
    found = [memory for memory in memories(tensor) if memory.layout is torch.strided]
    return tuple(memory.data_ptr() for memory in found)


def like(tensor: Tensor, offload: Offload = "none") -> Tensor:
    """New memory for a value like this one."""
    if _is_odd(tensor):
        return tensor.clone()
    device = torch.device("cpu") if offload != "none" else tensor.device
    # Only memory that an accelerator reads needs to be pinned.
    is_pinned = offload == "pinned" and not tensor.is_cpu
    return torch.empty_like(tensor, device=device, pin_memory=is_pinned, requires_grad=False)


def grouped(pairs: Iterable[Pair]) -> list[Group]:
    """Pairs that one call can copy together, as two lists."""
    groups: dict[object, Group] = {}
    for to, source in pairs:
        odd_one = id(to) if _is_odd(to) else None
        key = (to.dtype, source.dtype, to.device, source.device, odd_one)
        targets, sources = groups.setdefault(key, ([], []))
        targets.append(to)
        sources.append(source)
    return list(groups.values())


@torch.no_grad()
def copy_groups(groups: Iterable[Group], *, non_blocking: bool = False) -> None:
    """Copy each source into its target; few kernels for many tensors."""
    for targets, sources in groups:
        if len(targets) > 1:
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)
        else:
            targets[0].copy_(sources[0], non_blocking=non_blocking)


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copy each second tensor into the first."""
    copy_groups(grouped(pairs))


@torch.no_grad()
def put_back(live: Sequence[Tensor], saved: Sequence[Sequence[Tensor]]) -> None:
    """Write saved memories into the tensors they came from.

    A tensor that was given another shape since gets memory of the old one.
    """
    pairs: list[Pair] = []
    for tensor, values in zip(live, saved, strict=True):
        now = memories(tensor)
        if [t.shape for t in now] == [t.shape for t in values]:
            pairs.extend(zip(now, values, strict=True))
        elif len(values) == 1:
            tensor.data = values[0].to(tensor.device, copy=True)
    copy_all(pairs)
