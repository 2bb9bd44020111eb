"""Divergences and contrastive losses, finite with finite gradients for all finite inputs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.curves import curve, eps_of, floating, widened
from stayfinite.prevent.masked import Reduction, checked_mask, kept_only, reduced
from stayfinite.prevent.norms import direction

_COLDEST = 2.0**-14


def kl(
    p_logits: Tensor,
    q_logits: Tensor,
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """KL(p || q) of two categorical distributions given by their logits, over `dim`.

    In distillation p is the teacher. A class that p excludes with a logit of -inf costs nothing;
    one that q alone excludes costs a quarter of the largest number. `mask` has the shape without
    `dim`.

    >>> kl(torch.tensor([0.0, 0.0, -torch.inf]), torch.tensor([0.0, 0.0, -torch.inf]))
    tensor(0.)
    """
    if p_logits.shape != q_logits.shape:
        raise InputError(
            f"the logits of p are {tuple(p_logits.shape)} and those of q {tuple(q_logits.shape)}; "
            "they must have the same shape."
        )
    dtype = torch.promote_types(floating(p_logits).dtype, floating(q_logits).dtype)
    p_logits, q_logits = widened(p_logits.to(dtype)), widened(q_logits.to(dtype))
    if mask is not None:
        mask = checked_mask(mask, p_logits.select(dim, 0))
        p_logits, q_logits = kept_only(mask.unsqueeze(dim), p_logits, q_logits)
    log_p, log_q = _log_softmax(p_logits, dim), _log_softmax(q_logits, dim)
    return reduced((log_p.exp() * (log_p - log_q)).sum(dim), reduction, mask)


def info_nce(
    queries: Tensor,
    keys: Tensor,
    *,
    temperature: Tensor | float = 0.07,
    reduction: Reduction = "mean",
) -> Tensor:
    """InfoNCE: each query, (batch, features), should be nearest in angle to its own key.

    The other keys of the batch are the negatives. Temperatures below 6e-5 count as that (a learned
    one in float16: below 8e-3). A zero vector is equally near to all and gets no gradient, nor
    does one so short that its gradient is too large for the dtype.

    >>> info_nce(torch.eye(3), torch.eye(3), temperature=1.0)
    tensor(0.5514)
    """
    if queries.ndim != 2 or queries.shape != keys.shape:
        raise InputError(
            f"queries are {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            "both must be (batch, features), with the key of each query in its row."
        )
    temperature = _temperature(temperature, widened(queries))
    near = eps_of(queries.dtype) + 8 / (temperature.detach() * torch.finfo(queries.dtype).max)
    with _without_autocast(queries.device.type):  # it would multiply in half precision
        angles = direction(widened(queries), near) @ direction(widened(keys), near).T
    return reduced(-(angles / temperature).log_softmax(-1).diagonal(), reduction)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _log_softmax(logits: Tensor, dim: int) -> Tensor:
    # Logits that are further apart than the largest number give -inf; differences need room.
    return logits.log_softmax(dim).clamp_min(torch.finfo(logits.dtype).min / 4)


def _temperature(temperature: Tensor | float, like: Tensor) -> Tensor:
    """At least the coldest; below that a learned one still gets a gradient, to come back."""
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ConfigError(f"temperature is {temperature}; it must be greater than 0.")
        return like.new_full((), max(temperature, _COLDEST))
    # Its gradient is up to 2 / temperature**2, which float16 must hold.
    coldest = 2.0**-7 if temperature.dtype == torch.float16 else _COLDEST
    return curve(lambda t: t.clamp_min(coldest), (torch.ones_like,), widened(temperature))
