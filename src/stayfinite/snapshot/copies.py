"""The values of many tensors, copied into memory of our own and back in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from stayfinite.detect.parts import compact

Offload = Literal["none", "cpu", "pinned"]
Pair = tuple[Tensor, Tensor]


def memories(tensor: Tensor) -> list[Tensor]:
    """The tensors whose memory is the value: the tensor itself, or what it is made of.

    Nothing for what has no value yet, is lazy or meta, or whose value stays: inference tensors.
    Repeats that expand() made are left out, since they cannot be written to.
    """
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_inference():
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in memories(getattr(tensor, name))]
    if _is_odd(tensor) or tensor.is_contiguous():
        return [tensor]
    return [compact(tensor)]


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


def like(tensor: Tensor, offload: Offload = "none") -> Tensor:
    """New memory for a value like this one."""
    if _is_odd(tensor):
        return tensor.clone()
    device = torch.device("cpu") if offload != "none" else tensor.device
    # Only memory that an accelerator reads needs to be pinned.
    is_pinned = offload == "pinned" and not tensor.is_cpu
    return torch.empty_like(tensor, device=device, pin_memory=is_pinned, requires_grad=False)


def fits(memory: Tensor | None, tensor: Tensor, offload: Offload) -> bool:
    """Whether the memory can take the tensor's value as it is."""
    return (
        memory is not None
        and memory.shape == tensor.shape
        and memory.dtype is tensor.dtype
        and memory.layout is tensor.layout
        and memory.device == (tensor.device if offload == "none" else torch.device("cpu"))
    )


@torch.no_grad()
def copy_all(pairs: Iterable[Pair], *, non_blocking: bool = False) -> None:
    """Copy each second tensor into the first; few kernels for many tensors."""
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for to, source in pairs:
        if _is_odd(to):
            to.copy_(source)
            continue
        key = (to.dtype, source.dtype, to.device, source.device)
        group = groups.setdefault(key, ([], []))
        group[0].append(to)
        group[1].append(source)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


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
