"""The one clip function, with a limit that is given or found from the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import torch

from stayfinite.clip.memory import Drop, drop_bad, scale_down
from stayfinite.clip.norms import quick_norm, true_norm
from stayfinite.clip.result import ClipResult, left_alone, result_of
from stayfinite.clip.targets import Gradient, Target, gradients_in
from stayfinite.detect.known import note_finite
from stayfinite.errors import ConfigError

Allowed = Callable[[float, bool], float]
"""From a norm, and whether it is of sound gradients, to the norm that they may have at most."""


@torch.no_grad()
def clip_gradients(
    target: Target,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    drop: Drop = "elements",
    names: Iterable[str] | None = None,
) -> ClipResult:
    """Scale all gradients together, in place, so that their norm is at most `max_norm`.

    The target is a module, an optimizer, a parameter or several. NaN and Inf are set to 0 first,
    or with drop="tensors" each whole gradient that has one; the norm is that of the rest, and
    `max_norm` inf drops without clipping. With drop="nothing", gradients with something bad in
    them stay as they are, all of them, for whoever judges them next. Gradients are named as in
    the module or the optimizer, by `names` (one for each parameter), or else by their number.
    Costs one pass and one host read when there is nothing to do.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> weight.grad = torch.tensor([3e38, float("nan"), 4e30])
    >>> clip_gradients(weight, 1.0, names=["weight"]).dropped
    ('weight',)
    >>> weight.grad
    tensor([1.0000e+00, 0.0000e+00, 1.3333e-08])
    """
    _check_options(max_norm, norm_type)
    check_drop(drop)
    gradients = gradients_in(target, None if names is None else list(names))
    return clip_whole(gradients, lambda norm, is_sound: max_norm, norm_type=norm_type, drop=drop)


def clip_whole(
    gradients: Sequence[Gradient], allowed: Allowed, *, norm_type: float = 2.0, drop: Drop
) -> ClipResult:
    """Scale all gradients together; the norm decides what is allowed, and is asked about once."""
    parts = [part for gradient in gradients for part in gradient.memory]
    elements = sum(part.numel() for part in parts)
    norm, dropped = quick_norm(parts, norm_type), dict[str, int]()
    if norm is None:
        found = drop_bad(gradients, drop)
        if found is None:
            return left_alone(elements)
        norm, dropped = true_norm(parts, norm_type), found
    max_norm = allowed(float(norm), not dropped)
    if norm > max_norm:
        scale_down(parts, norm, max_norm)
    note_finite([gradient.tensor for gradient in gradients], min(norm, max_norm))
    return result_of(float(norm), dropped, elements, was_clipped=norm > max_norm, max_norm=max_norm)


def _check_options(max_norm: float, norm_type: float) -> None:
    if not max_norm > 0:
        raise ConfigError(
            f"max_norm is {max_norm}; it must be greater than 0. "
            "To drop bad values without clipping, use inf."
        )
    if not norm_type >= 1:
        raise ConfigError(f"norm_type is {norm_type}; it must be at least 1, or inf.")


def check_drop(drop: str) -> None:
    """ConfigError unless it is one of the choices."""
    if drop not in get_args(Drop):
        raise ConfigError(f"drop is {drop!r}; it must be one of {', '.join(get_args(Drop))}.")
