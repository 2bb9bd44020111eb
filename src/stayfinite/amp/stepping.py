"""The optimizer's side of a scaled step: its hooks, and what the fused ones are given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from stayfinite.detect.flags import is_ready, obeys_flag
from stayfinite.detect.gradients import gradients_of
from stayfinite.detect.scan import all_finite

_GIVEN = ("grad_scale", "found_inf")


class SpoiledGradients(Exception):
    """Raised through optimizer.step() before it has changed anything."""


@contextmanager
def last_look(optimizer: Optimizer) -> Iterator[None]:
    """Let optimizer.step() raise SpoiledGradients if its own pre-hooks made a gradient bad.

    Without such hooks, or with none but ours, nothing is attached and nothing is looked at.
    """
    if not _has_hooks(optimizer):
        yield
        return
    handle = optimizer.register_step_pre_hook(_refuse)  # the last one registered runs last
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def nothing_left_behind(optimizer: Optimizer) -> Iterator[None]:
    """Where a fused step() raises, torch leaves the scale on it: the next step divides twice."""
    before = {key: value for key, value in vars(optimizer).items() if key in _GIVEN}
    try:
        yield
    except BaseException:
        for key in _GIVEN:
            vars(optimizer).pop(key, None)
        vars(optimizer).update(before)
        raise


def is_called_when_bad(optimizer: Optimizer) -> bool:
    """Whether torch calls it with a flag that says "bad", and it might not obey.

    torch's own fused ones obey once all their state exists: before, SGD keeps an uninitialised
    momentum buffer. One that takes the scaler itself, the older way, is left to its own means.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        return False
    return not (obeys_flag(optimizer) and is_ready(optimizer))


def _has_hooks(optimizer: Optimizer) -> bool:
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if own is None:  # not torch's kind of optimizer
        return False
    hooks = [*_global_optimizer_pre_hooks.values(), *own.values()]
    return any(not _is_ours(hook) for hook in hooks)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("stayfinite.")


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not is_dynamo_compiling() and not all_finite(gradients_of(optimizer)):  # host sync
        raise SpoiledGradients
